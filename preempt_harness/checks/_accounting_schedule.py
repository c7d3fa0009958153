"""Accounting of decisions: preemptions that make sense, and a step's limits."""

from __future__ import annotations

from collections import Counter

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import SchedulerTables
from preempt_harness.checks.trace import (
    DeliveredRows,
    Folded,
    RequestNames,
    ScheduledRows,
    Trace,
)
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    Finished,
    Forked,
    Preempted,
    Resumed,
    StepDone,
    StepLaunched,
    TokensChosen,
)


def check_preemptions(trace: Trace) -> CheckResult:
    """A victim held blocks, gives them back, is not computed, and its figures are right."""
    judge = _Preemptions(trace.header.block_size)
    if trace.has(Preempted):  # without one there is nothing to follow the requests for
        for event in trace.of(*_OF_PREEMPTIONS):
            judge.take(event)
    return judge.listing.result("accounting", "preemptions")


_OF_PREEMPTIONS = (
    SteadySteps,
    ScheduledRows,
    DeliveredRows,
    StepLaunched,
    StepDone,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    Forked,
    TokensChosen,
    Preempted,
    Resumed,
    Finished,
    Aborted,
)


class _Preemptions:
    def __init__(self, block_size: int) -> None:
        self.listing = Listing()
        self._block_size = block_size
        self._tables = SchedulerTables()
        self._freed_in: dict[str, int] = {}
        self._scheduled_in: dict[str, int] = {}
        self._away: dict[str, int] = {}
        self._swapped: set[str] = set()
        self._branched: set[str] = set()
        self._num_tokens: Counter[str] = Counter()
        self._computed: dict[str, set[int]] = {}
        self._kept: set[str] = set()  # requests that were swapped in when they last came back
        self._in_flight: dict[int, dict[str, set[int]]] = {}
        self._num_dropped: Counter[str] = Counter()  # rows under way when their blocks went
        self._requests = RequestNames()

    def take(self, event: Folded) -> None:
        if isinstance(event, SteadySteps):
            self._go_on(event)
        elif isinstance(event, ScheduledRows):
            self._schedule(event)
        elif isinstance(event, DeliveredRows):
            for seq, token_ids in zip(event.seqs, event.token_ids, strict=True):
                self._num_tokens[seq] += len(token_ids)
        elif isinstance(event, StepLaunched):
            self._judge_away(event.step)
        elif isinstance(event, StepDone):
            self._judge_away(event.step)
            self._computed.update(self._in_flight.pop(event.step, {}))
        elif isinstance(event, BlocksAllocated):
            if event.seq not in self._tables.leases and request_of(event.seq) not in self._kept:
                self._begin_anew(event)
            self._tables.allocate(event)
        elif isinstance(event, BlocksFreed):
            self._tables.free(event)
            if self._away_since(event.seq) is None:
                self._freed_in[request_of(event.seq)] = event.step
        elif isinstance(event, BlocksReplaced):
            self._tables.replace(event)
        elif isinstance(event, Forked):
            self._tables.fork(event)
            self._branched.add(request_of(event.parent))
        elif isinstance(event, Arrived):
            self._num_tokens[f"{event.request}.0"] = len(event.prompt_token_ids)
        elif isinstance(event, TokensChosen):
            self._num_tokens[event.seq] += len(event.token_ids)
        elif isinstance(event, Preempted):
            self._preempt(event)
        elif isinstance(event, Resumed | Finished | Aborted):
            self._come_back(event)
            if event.request in self._swapped:  # what was computed comes back with its blocks
                self._swapped.discard(event.request)
                self._kept.add(event.request)
            else:
                self._kept.discard(event.request)

    def _begin_anew(self, event: BlocksAllocated) -> None:
        """What is under way of the stay before says nothing of this one; its token may come."""
        self._computed[event.seq] = {event.num_cached * self._block_size}
        for rows in self._in_flight.values():
            self._num_dropped[event.seq] += rows.pop(event.seq, None) is not None

    def _schedule(self, rows: ScheduledRows) -> None:
        self._note_scheduled(rows.seqs, rows.step, rows.step)
        ends = self._in_flight.setdefault(rows.step, {})
        computed = self._computed
        for seq, start, end in zip(rows.seqs, rows.starts, rows.ends, strict=True):
            ends[seq] = self._possible_ends(seq, start, end)
            if seq in computed:
                computed[seq] |= ends[seq]
            else:
                computed[seq] = set(ends[seq])

    def _go_on(self, steps: SteadySteps) -> None:
        """All of them, of which the last one says where its rows are."""
        self._note_scheduled(steps.seqs, steps.step, steps.last_step)
        self._judge_away(steps.step)
        for seq in steps.delivered_seqs:
            self._num_tokens[seq] += steps.num_steps - 1
        for seq, length, end in zip(steps.seqs, steps.lengths, steps.ends, strict=True):
            self._computed[seq] = self._possible_ends(seq, end - length, end)
        for seq in steps.delivered_seqs:
            self._num_tokens[seq] += 1

    def _possible_ends(self, seq: str, start: int, end: int) -> set[int]:
        """Where a row may leave its sequence.

        What lies beyond the known tokens is drafts, of which any number may be accepted.
        """
        return set(range(min(end, max(start + 1, self._num_tokens[seq])), end + 1))

    def _note_scheduled(self, seqs: tuple[str, ...], first_step: int, last_step: int) -> None:
        requests = self._requests[seqs]
        self._scheduled_in.update(dict.fromkeys((*requests, *seqs), last_step))
        if not self._away.keys().isdisjoint((*requests, *seqs)):
            for seq in seqs:
                preempted = self._away_since(seq)
                if preempted is not None:
                    self._report_scheduled(first_step, request_of(seq), preempted)

    def _away_since(self, seq: str) -> int | None:
        """The step in which the sequence, alone or with its request, was preempted."""
        return self._away.get(seq, self._away.get(request_of(seq)))

    def _come_back(self, event: Resumed | Finished | Aborted) -> None:
        one = event.seq if isinstance(event, Resumed) else ""
        for name in [one] if one else list(self._away):
            if one or event.request in (name, request_of(name)):
                self._away.pop(name, None)

    def _report_scheduled(self, step: int, request: str, preempted: int) -> None:
        self.listing.report(
            Code.ACC_PREEMPTED_SCHEDULED,
            step,
            f"it is scheduled although it was preempted in step {preempted} and not admitted again",
            once=request,
            request=request,
        )

    def _preempt(self, event: Preempted) -> None:
        self.listing.count("preemptions judged")
        request = event.request
        unit = event.seq or request
        held = any(unit in (seq, request_of(seq)) for seq in self._tables.leases)
        if event.mode == "swap":
            self._swapped.add(request)
        elif request in self._swapped:  # what it has in host blocks can be taken away too
            self._swapped.discard(request)
            held = True
        if not held and self._freed_in.pop(request, None) != event.step:
            self.listing.report(
                Code.ACC_PREEMPTED_EMPTY,
                event.step,
                "it is preempted although it holds no blocks"
                + (", being preempted already" if unit in self._away else ""),
                request=request,
            )
        if self._scheduled_in.get(unit) == event.step:
            self._report_scheduled(event.step, request, event.step)
        self._away[unit] = event.step
        first = event.seq in ("", f"{request}.0")
        if request not in self._branched and first:  # of several branches they are nobody's
            self._judge_figures(event)

    def _judge_figures(self, event: Preempted) -> None:
        """The event's own figures; with steps in flight they may lie on either side of them."""
        seq = f"{event.request}.0"
        ends = self._computed.get(seq, {0})
        num_known = self._num_tokens[seq]
        num_late = sum(seq in rows for rows in self._in_flight.values()) + self._num_dropped[seq]
        if event.num_computed_tokens not in ends:
            self.listing.report(
                Code.ACC_PREEMPTED_COUNT,
                event.step,
                f"it is preempted with {event.num_computed_tokens} computed tokens by the "
                f"engine's account, with {' or '.join(map(str, sorted(ends)))} by the log's",
                request=event.request,
            )
        elif not num_known <= event.num_tokens <= num_known + num_late:
            self.listing.report(
                Code.ACC_PREEMPTED_COUNT,
                event.step,
                f"it is preempted with {event.num_tokens} tokens by the engine's account, but "
                f"prompt and delivered tokens are {num_known}",
                request=event.request,
            )

    def _judge_away(self, step: int) -> None:
        if not self._away:
            return
        for seq, lease in self._tables.leases.items():
            preempted = self._away_since(seq)
            if preempted is not None and lease.blocks:
                self.listing.report(
                    Code.ACC_PREEMPTED_KEEPS,
                    step,
                    f"it was preempted in step {preempted} and still holds "
                    f"{len(lease.blocks)} blocks",
                    once=(seq, preempted),
                    seq=seq,
                    block=lease.blocks[0],
                )


def check_limits(trace: Trace) -> CheckResult:
    """No step exceeds the token budget or the number of sequences that may run."""
    listing = Listing()
    tokens: Counter[int] = Counter()
    sequences: dict[int, frozenset[str]] = {}
    num_more = 0  # steady steps, all like the first of them
    for rows in trace.of(SteadySteps, ScheduledRows):
        if isinstance(rows, SteadySteps):
            tokens[rows.step] = sum(rows.lengths)
            num_more += rows.num_steps - 1
        else:
            tokens[rows.step] += rows.num_tokens
        sequences[rows.step] = sequences.get(rows.step, frozenset()).union(rows.seqs)
    budget = trace.header.config.get("max_num_batched_tokens")
    most = trace.header.config.get("max_num_seqs")
    if sequences:
        listing.count("steps judged", len(sequences) + num_more)
    for step in sorted(sequences):
        if isinstance(budget, int) and tokens[step] > budget:
            listing.report(
                Code.ACC_TOKEN_BUDGET,
                step,
                f"{tokens[step]} tokens are scheduled, the budget is {budget}",
                once="budget",
            )
        if isinstance(most, int) and len(sequences[step]) > most:
            listing.report(
                Code.ACC_MAX_SEQS,
                step,
                f"{len(sequences[step])} sequences are scheduled, at most {most} may run",
                once="seqs",
            )
    return listing.result("accounting", "limits")
