"""Work: nobody who runs stands still, or half still, in a step with tokens to spare.

A running request that has blocks for all its known tokens needs nothing more than tokens of the
budget. In a step that leaves some of those unused it computes all that it can: up to its newest
token.

Known tokens are the prompt and what was delivered, or chosen for a beam, before the step. Of a
request of several branches some may wait for each other: one that computes nothing is not judged,
one that computes something is. Nor is a step with a forced preemption, an action of the plan, an
error or withheld blocks. Where prefills and decodes share no step, only steps that decode are
judged, and who has nothing but its newest token left to compute. For engines of which
`admits_when_it_can`, as others have reasons of their own to wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from preempt_harness.checks._conditions import mixes_steps, num_withheld
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Arrived,
    BlocksFreed,
    EngineError,
    Forked,
    PlanApplied,
    PoolCounts,
    Preempted,
    TokensChosen,
)


def check_standstill(trace: Trace) -> CheckResult:
    """Who has blocks and known tokens goes on as far as the budget lasts."""
    judge = _Standstill(trace)
    for event in trace.of(
        SteadySteps,
        IdleSteps,
        *TABLE_EVENTS,
        Arrived,
        DeliveredRows,
        TokensChosen,
        EngineError,
        PlanApplied,
        PoolCounts,
        Preempted,
        ScheduledRows,
    ):
        judge.take(event)
    return judge.listing.result("work", "standstill")


class _Standstill:
    """What a step computed, of whom, and what it might have."""

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._header = trace.header
        self._tables = SchedulerTables()
        self._mixes_steps = mixes_steps(trace.header)
        self._known: dict[str, int] = {}  # sequence -> tokens
        self._decoding: set[str] = set()  # sequences that got a token since they got blocks
        self._single = {
            f"{name}.0" for name, spec in trace.specs.items() if spec.sampling.num_sequences == 1
        }
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_tokens = 0
        self._ends: dict[str, int] = {}
        self._delivered: list[tuple[str, int]] = []
        self._is_excused = False

    def take(self, event: object) -> None:
        """The next thing that happened."""
        if isinstance(event, ScheduledRows):
            self._take_rows(event.seqs, event.ends, event.num_tokens)
        elif isinstance(event, DeliveredRows):
            lengths = map(len, event.token_ids)
            self._delivered += zip(event.seqs, lengths, strict=True)
        elif isinstance(event, PoolCounts):
            self._end_step(event.step, event)
        elif isinstance(event, SteadySteps):
            self._take_several(event)
        elif isinstance(event, IdleSteps):
            self._end_step(event.step, event.pool)
        elif isinstance(event, TokensChosen):
            self._delivered.append((event.seq, len(event.token_ids)))
        elif isinstance(event, Arrived):
            self._known[f"{event.request}.0"] = len(event.prompt_token_ids)
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
            if isinstance(event, Forked):
                self._known[event.child] = self._known.get(event.parent, 0)
            elif isinstance(event, BlocksFreed):
                self._decoding.discard(event.seq)
        elif not isinstance(event, Preempted) or event.reason == "forced":
            self._is_excused = True  # by the plan, or an error

    def _take_rows(self, seqs: Iterable[str], ends: Iterable[int], num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._ends.update(zip(seqs, ends, strict=True))

    def _take_several(self, steady: SteadySteps) -> None:
        """The same happens in each of them, so the first stands for all."""
        ends = [start + length for start, length in zip(steady.starts, steady.lengths, strict=True)]
        self._take_rows(steady.seqs, ends, sum(steady.lengths))
        self._delivered = [(seq, steady.num_steps) for seq in steady.delivered_seqs]
        self._end_step(steady.step, steady.pool)

    def _end_step(self, step: int, pool: PoolCounts) -> None:
        budget = self._header.config.get("max_num_batched_tokens")
        has_tokens = isinstance(budget, int) and self._num_tokens < budget
        self._is_excused |= bool(num_withheld(self._header, pool))
        others_go = self._mixes_steps or self._only_decodes()
        if has_tokens and others_go and not self._is_excused:
            self._judge(step, f"{self._num_tokens} of {budget}")
        self._decoding.update(seq for seq, _ in self._delivered if seq in self._tables.leases)
        for seq, num_tokens in self._delivered:
            self._known[seq] = self._known.get(seq, 0) + num_tokens
        self._begin_step()

    def _only_decodes(self) -> bool:
        """Whether no row is of a prefill, and there is a place for another."""
        most = self._header.config.get("max_num_seqs")
        has_place = isinstance(most, int) and len(self._ends) < most
        return has_place and self._ends.keys() <= self._decoding

    def _judge(self, step: int, computed: str) -> None:
        for seq, lease in self._tables.leases.items():
            known, end = self._known.get(seq, 0), self._ends.get(seq, 0)
            has_room = known <= len(lease.blocks) * self._header.block_size
            if not has_room or not (seq in self._single or seq in self._ends):
                continue
            if not self._mixes_steps and seq not in self._decoding:
                continue  # it is to be prefilled
            self.listing.count("running judged")
            if end < known:
                what = f"up to position {end} only" if seq in self._ends else "nothing"
                request = request_of(seq)
                self.listing.report(
                    Code.WORK_IDLE,
                    step,
                    f"it runs, has blocks for all its {known} known tokens and computes {what}, "
                    f"in a step that computes {computed} tokens",
                    once=request,
                    request=request,
                )
