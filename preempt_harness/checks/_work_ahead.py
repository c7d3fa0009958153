"""Work: nobody stands still between steps that are decided ahead.

A running request whose last step samples a token goes on in the next one before that token is
known. Where an engine leaves it out, it computes nothing until the token has come, and every second
step goes by without it.

Judged is who was given a token in the step before, and goes without in a step that leaves tokens of
the budget unused, though its blocks had room for the next position when the step was decided, and
its output goes on for longer than is decided ahead. Requests of one sequence, since branches and
beams wait for each other; not for as many steps as are decided ahead after a preemption, an action
of the plan, an error or withheld blocks. For engines that promise an order, as others have reasons
of their own to wait.
"""

from __future__ import annotations

from collections import deque

from preempt_harness.checks._service_order import promises_order
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.progress import num_withheld, steps_ahead
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    CacheReset,
    EngineError,
    Header,
    PlanApplied,
    PoolCounts,
    Preempted,
    PriorityChanged,
)


def decides_ahead_in_order(header: Header) -> bool:
    """Whether an engine of this configuration is held to it."""
    return steps_ahead(header) > 0 and promises_order(header)


def check_ahead(trace: Trace) -> CheckResult:
    """Who was given a token goes on in the step that was decided before it came."""
    judge = _Ahead(trace)
    for event in trace.of(
        *TABLE_EVENTS,
        Aborted,
        Arrived,
        CacheReset,
        DeliveredRows,
        EngineError,
        PlanApplied,
        PoolCounts,
        Preempted,
        PriorityChanged,
        ScheduledRows,
    ):
        judge.take(event)
    return judge.listing.result("work", "ahead")


class _Ahead:
    """What a step computes, and what everybody had when it was decided."""

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._header = trace.header
        self._depth = steps_ahead(trace.header)
        self._tables = SchedulerTables()
        most = trace.header.max_total_tokens
        self._last = {  # where the longest output of a request of one sequence ends
            f"{name}.0": min(spec.num_prompt_tokens + spec.sampling.max_tokens, most or 1 << 62)
            for name, spec in trace.specs.items()
            if spec.sampling.num_sequences == 1 and spec.sampling.beam is None
        }
        self._known: dict[str, int] = {}
        self._got: set[str] = set()  # who was given tokens in the step before
        self._num_calm_steps = 0
        # Blocks of everybody before this step, and before those that were decided with it.
        self._held: deque[dict[str, int]] = deque(maxlen=self._depth + 1)
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_tokens = 0
        self._computing: set[str] = set()
        self._delivered: list[tuple[str, int]] = []
        self._is_disturbed = False
        self._held.append({seq: len(own.blocks) for seq, own in self._tables.leases.items()})

    def take(self, event: object) -> None:
        """The next thing that happened."""
        if isinstance(event, ScheduledRows):
            self._num_tokens += event.num_tokens
            self._computing.update(event.seqs)
        elif isinstance(event, DeliveredRows):
            self._delivered += zip(event.seqs, map(len, event.token_ids), strict=True)
        elif isinstance(event, PoolCounts):
            self._end_step(event)
        elif isinstance(event, Arrived):
            self._known[f"{event.request}.0"] = len(event.prompt_token_ids)
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
        else:
            self._is_disturbed = True

    def _end_step(self, pool: PoolCounts) -> None:
        budget = self._header.config.get("max_num_batched_tokens")
        has_tokens = isinstance(budget, int) and self._num_tokens < budget
        self._is_disturbed |= bool(num_withheld(self._header, pool))
        self._num_calm_steps = 0 if self._is_disturbed else self._num_calm_steps + 1
        if has_tokens and self._num_calm_steps > self._depth:
            for seq in sorted(self._got - self._computing):
                self._judge(pool.step, seq, f"{self._num_tokens} of {budget}")
        for seq, num_tokens in self._delivered:
            self._known[seq] = self._known.get(seq, 0) + num_tokens
        self._got = {seq for seq, number in self._delivered if number and seq in self._last}
        self._begin_step()

    def _judge(self, step: int, seq: str, computed: str) -> None:
        self.listing.count("left out judged")
        known = self._known[seq]
        room = self._header.block_size * min(held.get(seq, 0) for held in self._held)
        if seq not in self._tables.leases or known > room:
            return
        if known + self._depth >= self._last[seq]:
            return
        request = request_of(seq)
        self.listing.report(
            Code.WORK_IDLE,
            step,
            f"it runs, was given its token number {known} in the step before, has room for it and "
            f"computes nothing, in a step that computes {computed} tokens and was decided ahead",
            once=request,
            request=request,
        )
