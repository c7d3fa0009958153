"""Work: nobody stands still between steps that are decided ahead.

A running request whose last step samples a token goes on in the next one before that token is
known. Where an engine leaves it out, it computes nothing until the token has come, and every second
step goes by without it.

Judged is who was given a token in the step before, and goes without in a step that leaves tokens of
the budget unused, also those of who has ended since it was decided, though its blocks had room for
the next position when the step was decided, and its output goes on for longer than is decided
ahead: for both, drafts count as if they were right. Of several outputs, when all of them have begun
and none has ended since the step was decided, if each has room and no block to copy; not beams,
which wait for each other. Not for as many steps as are decided ahead after a preemption, an action
of the plan, an error or withheld blocks. For engines that promise an order, as others have reasons
of their own to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from preempt_harness.checks._conditions import num_withheld, steps_ahead
from preempt_harness.checks._service_order import promises_order
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    CacheReset,
    EngineError,
    Forked,
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
        # By so much a sequence may be longer when what is decided ahead is done.
        num_drafts = self._depth * trace.header.config.get("num_speculative_tokens", 0)
        self._num_drafts, self._num_ahead = num_drafts, self._depth + num_drafts
        self._tables = SchedulerTables()
        most = trace.header.max_total_tokens
        self._last = {  # request -> where its longest output ends
            name: min(spec.num_prompt_tokens + spec.sampling.max_tokens, most or 1 << 62)
            for name, spec in trace.specs.items()
            if spec.sampling.beam is None
        }
        self._to_begin = {  # request -> outputs that have no token yet
            name: {f"{name}.{branch}" for branch in range(trace.specs[name].sampling.n)}
            for name in self._last
            if trace.specs[name].sampling.n > 1
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
            if isinstance(event, Forked):
                self._known[event.child] = self._known.get(event.parent, 0)
        else:
            self._is_disturbed = True

    def _end_step(self, pool: PoolCounts) -> None:
        budget = self._header.config.get("max_num_batched_tokens")
        known_then = frozenset[str]().union(*self._held)
        # Who has ended since the step was decided had its share of the budget then.
        num_ended = len(known_then - self._tables.leases.keys())
        num_tokens = self._num_tokens + num_ended * (1 + self._num_drafts)
        has_tokens = isinstance(budget, int) and num_tokens < budget
        self._is_disturbed |= bool(num_withheld(self._header, pool))
        self._num_calm_steps = 0 if self._is_disturbed else self._num_calm_steps + 1
        if has_tokens and self._num_calm_steps > self._depth:
            for seq in sorted(self._got - self._computing):
                self._judge(pool.step, seq, known_then, f"{self._num_tokens} of {budget}")
        given = [seq for seq, num_tokens in self._delivered if num_tokens]
        for seq, num_tokens in self._delivered:
            self._known[seq] = self._known.get(seq, 0) + num_tokens
        # Several are split off when the first token has come: the step decided before has none.
        self._got = {seq for seq in given if self._has_begun(request_of(seq))}
        for seq in given:
            self._to_begin.get(request_of(seq), set()).discard(seq)
        self._begin_step()

    def _has_begun(self, request: str) -> bool:
        """With all its outputs."""
        return request in self._last and not self._to_begin.get(request)

    def _judge(self, step: int, seq: str, known_then: Set[str], computed: str) -> None:
        self.listing.count("left out judged")
        request, known = request_of(seq), self._known[seq]
        if seq not in self._tables.leases or known + self._num_ahead >= self._last[request]:
            return
        together = [other for other in known_then if request_of(other) == request]
        if not all(other in self._tables.leases and self._has_room(other) for other in together):
            return
        self.listing.report(
            Code.WORK_IDLE,
            step,
            f"it runs, was given its token number {known} in the step before, has room for it and "
            f"computes nothing, in a step that computes {computed} tokens and was decided ahead",
            once=request,
            request=request,
        )

    def _has_room(self, seq: str) -> bool:
        """Whether it had blocks for all that it knows, and has to copy none."""
        known, size = self._known.get(seq, 0), self._header.block_size
        index = (known - 1) // size
        room = size * min(held.get(seq, 0) for held in self._held)
        if known + self._num_drafts > room:
            return False
        blocks = self._tables.leases[seq].blocks
        return index < len(blocks) and self._tables.refs[blocks[index]] == 1
