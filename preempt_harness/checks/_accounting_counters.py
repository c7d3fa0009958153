"""Accounting of totals: the engine's counters against the harness's own counts over the log.

A counter and the event that it is compared with never come from the same line of the engine, so
that one mistake cannot spoil both.
"""

from __future__ import annotations

from collections import Counter

from preempt_harness.checks.drafts import DRAFT_KINDS, DraftLedger, has_drafts
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.trace import DeliveredRows, Folded, ScheduledRows, Trace
from preempt_harness.record import (
    BlocksAllocated,
    Counters,
    Event,
    Finished,
    Forked,
    Preempted,
    TrialRecord,
    WorkerCopied,
    WorkerSwappedIn,
    WorkerSwappedOut,
)

COUNTER_INPUTS = {
    "num_preemptions": {"Preempted"},
    "num_recomputed_tokens": {"Preempted", "Scheduled"},
    "num_cached_tokens": {"BlocksAllocated"},
    "num_computed_tokens": {"Scheduled"},
    "num_generated_tokens": {"TokensDelivered"},
    "num_finished_requests": {"Finished"},
    "num_steps": {"Scheduled"},
    "num_drafted_tokens": {"Arrived", "Computed", "TokensDelivered"},
    "num_accepted_tokens": {"Arrived", "Computed", "TokensDelivered"},
    "num_rejected_tokens": {"Arrived", "BlocksFreed", "Computed", "TokensDelivered"},
    "num_copied_blocks": {"WorkerCopied"},
    "num_swapped_out_blocks": {"WorkerSwappedOut"},
    "num_swapped_in_blocks": {"WorkerSwappedIn"},
}
"""Counter -> the event types that the harness counts it from."""


TALLIED = (
    SteadySteps,
    ScheduledRows,
    DeliveredRows,
    BlocksAllocated,
    Forked,
    Preempted,
    Finished,
    WorkerCopied,
    WorkerSwappedOut,
    WorkerSwappedIn,
)
"""What a tally counts."""

_COPY_COUNTERS: dict[type[Event], str] = {
    WorkerCopied: "num_copied_blocks",
    WorkerSwappedOut: "num_swapped_out_blocks",
    WorkerSwappedIn: "num_swapped_in_blocks",
}


class Tally:
    """The harness's own totals, event by event.

    Recomputed tokens are those scheduled below the mark that the sequence had reached when it lost
    its blocks. A position that is computed again because a draft was rejected was never reached,
    and is none. What a request finds in the prefix cache counts once, at its first admission.

    Attributes:
        values: totals by the names of `COUNTER_NAMES`.
        preemptions: request -> how often it was preempted.
        cached_tokens: request -> tokens found at its first admission.
        recomputed_tokens: request -> tokens recomputed.

    Args:
        block_size: of the engine.
        drafts: follows drafts, where there are any.
    """

    def __init__(self, block_size: int, drafts: DraftLedger | None = None) -> None:
        self.drafts = drafts
        self.values: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.cached_tokens: dict[str, int] = {}
        self.recomputed_tokens: Counter[str] = Counter()
        self._block_size = block_size
        self._computed: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._swapped: set[str] = set()  # requests that find what they had before
        self._continued: set[str] = set()  # got a token since it was scheduled; with drafts only
        self._last_step = -1

    def take(self, event: Folded) -> None:
        """Count an event, the rows of a step, or steady steps."""
        if self.drafts is not None:
            assert not isinstance(event, SteadySteps | IdleSteps)  # there are none with drafts
            self.drafts.take(event)
            if isinstance(event, DeliveredRows):
                self._continued.update(event.seqs)
        if isinstance(event, SteadySteps):
            self._schedule(event)
            self.values["num_steps"] += event.num_steps - 1
            self._last_step = event.last_step
            delivered = event.num_steps * len(event.delivered_seqs)
            self.values["num_generated_tokens"] += delivered
        elif isinstance(event, ScheduledRows):
            self._schedule(event)
        elif isinstance(event, DeliveredRows):
            self.values["num_generated_tokens"] += event.num_tokens
        elif isinstance(event, BlocksAllocated):
            request = request_of(event.seq)
            found = event.num_cached * self._block_size
            if request not in self.cached_tokens:
                self.cached_tokens[request] = found
                self.values["num_cached_tokens"] += found
            if request not in self._swapped:
                # It may be preempted before it runs; what it found is then lost as well.
                self._computed[event.seq] = max(self._computed.get(event.seq, 0), found)
        elif isinstance(event, Forked):
            self._computed[event.child] = self._computed.get(event.parent, 0)
            self._lost[event.child] = self._lost.get(event.parent, 0)
        elif isinstance(event, Preempted):
            self._preempt(event)
        elif isinstance(event, Finished):
            self.values["num_finished_requests"] += 1
        elif isinstance(event, WorkerCopied | WorkerSwappedOut | WorkerSwappedIn):
            own = 0 if event.rank else len(event.pairs)  # every rank makes the same copies
            self.values[_COPY_COUNTERS[type(event)]] += own

    def _schedule(self, rows: ScheduledRows | SteadySteps) -> None:
        if self._lost:
            for seq, start, end in zip(rows.seqs, rows.starts, rows.ends, strict=True):
                again = min(end, self._lost.get(seq, 0)) - start
                if again > 0:
                    self.values["num_recomputed_tokens"] += again
                    self.recomputed_tokens[request_of(seq)] += again
        self.values["num_computed_tokens"] += rows.num_tokens
        self._computed.update(zip(rows.seqs, rows.ends, strict=True))
        self._continued.difference_update(rows.seqs)
        if rows.step != self._last_step:
            self._last_step = rows.step
            self.values["num_steps"] += 1

    def _preempt(self, event: Preempted) -> None:
        self.values["num_preemptions"] += 1
        self.preemptions[event.request] += 1
        if event.mode == "swap":
            self._swapped.add(event.request)
            return
        self._swapped.discard(event.request)
        for seq, computed in self._computed.items():
            if request_of(seq) == event.request:
                if self.drafts is not None:
                    # A token that came since is not computed yet, and drafts are no progress
                    # unless they came true.
                    known = self.drafts.known[seq] - (seq in self._continued)
                    computed = min(computed, known)
                self._lost[seq] = max(self._lost.get(seq, 0), computed)


class TalliedTrial:
    """The harness's own totals over a whole trial.

    Attributes:
        tally: at the end.
        at_counters: every `Counters` event, with the totals at its place.
    """

    def __init__(self, trace: Trace) -> None:
        drafts = DraftLedger() if has_drafts(trace.header) else None
        kinds = (Counters, *TALLIED) if drafts is None else (Counters, *TALLIED, *DRAFT_KINDS)
        self.tally = Tally(trace.header.block_size, drafts)
        self.at_counters: list[tuple[Counters, Counter[str]]] = []
        for event in trace.of(*dict.fromkeys(kinds)):
            if isinstance(event, Counters):
                own = self.tally.values.copy()
                if drafts is not None:
                    own.update(drafts.totals)
                self.at_counters.append((event, own))
            else:
                self.tally.take(event)


def check_counters(trace: Trace) -> CheckResult:
    """Every `Counters` event, and what each result says of its request."""
    listing = Listing()
    tallied = trace.derive(TalliedTrial)
    names = [name for name, inputs in COUNTER_INPUTS.items() if trace.sees(*inputs)]
    for event, own in tallied.at_counters:
        for name in names:
            if name in event.values:
                _compare(event, name, own[name], listing)
    if trace.sees("Preempted"):
        _judge_results(trace.record, "num_preemptions", tallied.tally.preemptions, listing)
    if trace.sees("BlocksAllocated"):
        _judge_results(trace.record, "num_cached_tokens", tallied.tally.cached_tokens, listing)
    return listing.result("accounting", "counters")


def _compare(event: Counters, name: str, own: int, listing: Listing) -> None:
    listing.count("counters judged")
    value = event.values[name]
    if value != own:
        listing.report(
            Code.ACC_COUNTER,
            event.step,
            f"the engine's {name} is {value}, the log's events add up to {own}",
            once=name,
        )


def _judge_results(record: TrialRecord, name: str, own: dict[str, int], listing: Listing) -> None:
    for request, result in record.results.items():
        reported = getattr(result, name)
        if reported is not None and reported != own.get(request, 0):
            listing.report(
                Code.ACC_REQUEST_COUNTER,
                None,
                f"the result says {name} {reported}, the log's events add up to "
                f"{own.get(request, 0)}",
                request=request,
            )
