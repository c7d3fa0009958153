"""Scheduling ahead: step N + 1 is decided while step N runs, before its tokens are known.

A sequence that a step samples from goes on in the next step with a placeholder for the token to
come:

    step N        [ start ... n )        samples token n
    step N + 1                 [ n )     computes token n, a placeholder until step N is done

`num_computed_tokens` counts what is decided. A step is launched when all before it are done: then
its placeholders are filled, and rows that nobody wants any more, of sequences that have ended or
lost their blocks since, are taken out. What is launched cannot be taken back: if its sequence loses
its blocks meanwhile, the result is of no use; it is computed again, and gives the same.

Drafts are not decided ahead. They join a row when its step is launched, as far as nobody waits for
what they take, and count as computed when they are verified.
"""

from __future__ import annotations

from typing import Any

from preempt_engine.config import PreemptionMode
from preempt_engine.flights import Flight, Flights, Row, has_rows
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.scheduler import Scheduler
from preempt_engine.sequence import PLACEHOLDER, Request, Sequence
from preempt_engine.step import ScheduledSequence, SchedulerOutput, StateCheck

# Counters of what workers do; they count when a step is launched.
_WORK_COUNTERS = (
    "num_steps",
    "num_computed_tokens",
    "num_recomputed_tokens",
    "num_copied_blocks",
    "num_swapped_out_blocks",
    "num_swapped_in_blocks",
)


class AsyncScheduler(Scheduler):
    """A scheduler whose steps are launched later than they are decided.

    step = schedule()       as often as wanted, ahead of what runs
    if launch(step): ...    in order, when all steps before it are done
    advance(step)           when it is done
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flights = Flights(self.residency)
        self._flight_rows: list[Row] = []  # of the step that is being decided
        self._offered: dict[Sequence, list[int]] = {}  # drafts for the next step to be launched

    def schedule(self) -> SchedulerOutput:
        """Decide a step behind all that are decided; without `has_work` it is not to be launched.

        The number of a step in which nothing happened is used again.
        """
        counters = self.counters
        before = {name: getattr(counters, name) for name in _WORK_COUNTERS}
        num_preemptions = counters.num_preemptions
        self._flight_rows = []
        step = Scheduler.schedule(self)
        counts = {name: getattr(counters, name) - before[name] for name in _WORK_COUNTERS}
        for name, value in before.items():
            setattr(counters, name, value)
        if step.has_work:
            self.flights.queue(Flight(step, self._flight_rows, counts))
        elif counters.num_preemptions == num_preemptions and self.flights:
            self.residency.next_step_id -= 1
        return step

    def launch(self, step: SchedulerOutput) -> bool:
        """All steps before it are done: complete the step.

        Returns:
            False when nothing of it is wanted any more; then it is not to be executed.
        """
        flight = self.flights.take()
        assert flight.step is step
        assert not self.flights.launched
        kept: list[Row] = []
        for row in flight.rows:
            if self.flights.is_live(row):
                self._fill(row)
                kept.append(row)
            elif row.item.reset:
                self.flights.never_sent(row.item.key)
        flight.rows = kept
        step.scheduled = [row.item for row in kept]
        if self._offered and kept:  # else they wait for the next step, which is launched instead
            self._add_drafts(flight)
        for row in kept:
            self._count(step, row)
        if not step.has_work:
            self.flights.pass_on(step)
            self.leave_step(step)
            return False
        for name in ("num_copied_blocks", "num_swapped_out_blocks", "num_swapped_in_blocks"):
            setattr(self.counters, name, getattr(self.counters, name) + flight.counts[name])
        self.counters.num_steps += bool(step.scheduled)
        self.flights.launch(flight)
        return True

    def advance(self, step: SchedulerOutput) -> list[Request | None]:
        """The step is done; see `Scheduler.advance`."""
        flight = self.flights.launched.popleft()
        assert flight.step is step
        requests: list[Request | None] = []
        for item, row in zip(step.scheduled, flight.rows, strict=True):
            if not self.flights.is_live(row):
                requests.append(None)
                continue
            requests.append(row.request)
            sequence = row.sequence
            if sequence.followers:
                sequence.release_followers()
            self._make_findable(sequence, item.end - len(sequence.drafts_in_flight))
            sequence.num_steps_since_admission += 1
            if item.start < sequence.num_prefill_tokens:
                sequence.num_chunks += 1
        self.leave_step(step)
        return requests

    def leave_step(self, step: SchedulerOutput) -> None:
        """Nobody works at the step any more; what waits for a later one goes on waiting."""
        latest = self.residency.step_in_flight
        super().leave_step(step)
        if latest != step.step_id:
            self.residency.step_in_flight = latest

    @property
    def is_idle(self) -> bool:
        """Nothing is decided that is not done."""
        return not self.flights

    # Drafts -------------------------------------------------------------------------------------

    def wants_drafts(self, sequence: Sequence) -> bool:
        """Whether the next step to be launched computes its newest token, and nothing else."""
        if not sequence.block_table:
            return False  # it was swapped out
        first = next(iter(self.flights.rows_of(sequence)), None)
        start = sequence.num_computed_tokens if first is None else first.item.start
        return start == sequence.num_tokens - 1

    def offer_drafts(self, sequence: Sequence, token_ids: list[int]) -> None:
        """See `Scheduler.offer_drafts`; for the next step that is launched."""
        self._offered[sequence] = token_ids

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """See `Scheduler.append_token`; what is queued for the sequence goes with it."""
        drafts = sequence.drafts_in_flight
        if not drafts:
            super().append_token(sequence, token_id)
        elif drafts[0] == token_id:
            self.counters.num_generated_tokens += 1
            self.counters.num_accepted_tokens += 1
            self._accept(sequence, token_id)
        else:
            self._reject(sequence)
            super().append_token(sequence, token_id)

    def _verify_draft(self, sequence: Sequence, token_id: int) -> None:
        """The token of a placeholder has come."""
        sequence.fill_placeholder(token_id)

    def _accept(self, sequence: Sequence, token_id: int) -> None:
        sequence.accept_in_flight(token_id)
        for row in self.flights.rows_of(sequence):
            row.shift(1)
        num_known = sequence.num_tokens + len(sequence.draft_token_ids)
        most = self.requests[sequence.key.request_id].last_position
        if num_known > most and sequence.num_computed_tokens < num_known:
            sequence.draft_token_ids.pop()  # a step less is needed, and it is not decided yet
        self._make_findable(sequence, sequence.num_tokens)

    def _reject(self, sequence: Sequence) -> None:
        """What is left of its drafts was wrong, or is not wanted: the workers cut it off."""
        num_rejected = len(sequence.drafts_in_flight)
        sequence.drafts_in_flight = []
        self.counters.num_rejected_tokens += num_rejected
        first = next(iter(self.flights.rows_of(sequence)), None)
        if first is None:
            sequence.num_stale_tokens += num_rejected
        else:
            first.item.num_stale_tokens += num_rejected

    def _cut_drafts(self) -> None:
        """There are none when a step is decided."""

    # Deciding -----------------------------------------------------------------------------------

    def _schedule_tokens(
        self, step: SchedulerOutput, request: Request, sequence: Sequence, end: int
    ) -> None:
        super()._schedule_tokens(step, request, sequence, end)
        self._flight_rows.append(
            Row(
                step.scheduled[-1],
                request,
                sequence,
                sequence.incarnation,
                num_tokens=max(sequence.num_sent_tokens, end),
                num_blocks=sequence.num_sent_blocks,
            )
        )
        sequence.plan_computed(end)
        if self._goes_on(request, sequence, step.scheduled[-1]):
            sequence.draft_token_ids.append(PLACEHOLDER)

    def _report_scheduled(self, step: SchedulerOutput, item: ScheduledSequence) -> None:
        """Reported when it is launched."""

    def _goes_on(self, request: Request, sequence: Sequence, item: ScheduledSequence) -> bool:
        """Whether the step samples a token after which the sequence needs another step.

        Not of beams, nor before the branches of a prompt are split off: they go on from logits.
        """
        num_known = sequence.num_tokens + len(sequence.draft_token_ids)
        if item.end < num_known or not isinstance(request.params, SamplingParams):
            return False
        if request.next_branch < request.num_seqs:
            return False
        scored_to = (request.score_from or 0) + request.num_to_score
        if request.score_from is not None and scored_to >= sequence.num_prompt_tokens:
            return False  # it is scored, and nothing is sampled
        num_outputs = num_known + 1 - sequence.num_prompt_tokens
        return num_outputs < request.max_output_tokens

    def _admit(self, step: SchedulerOutput, request: Request) -> bool:
        """One that was swapped out with its newest token under way has nothing to compute yet."""
        return not _waits_for_tokens(request) and super()._admit(step, request)

    def _make_room(self, step: SchedulerOutput, request: Request, num_blocks: int) -> bool:
        """Nobody loses blocks for tokens that are not known yet; they may never come."""
        return not _waits_for_tokens(request) and Scheduler._make_room(
            self, step, request, num_blocks
        )

    def _preempt(
        self,
        step: SchedulerOutput,
        request: Request,
        reason: str,
        mode: PreemptionMode | None = None,
    ) -> None:
        """A request with rows that are not launched yet is recomputed: they will not be.

        So is one that may be split when what is under way is done: that takes blocks. Drafts that
        are under way go with the blocks.
        """
        mode = mode or self.config.preemption_mode
        if has_rows(self.flights.queued, request):
            mode = "recompute"
            self._take_back(request)
        may_be_split = (
            not isinstance(request.params, SamplingParams) or request.next_branch < request.num_seqs
        )
        if may_be_split and has_rows(self.flights.launched, request):
            mode = "recompute"
        for sequence in request.sequences.values():
            self._reject(sequence)
        Scheduler._preempt(self, step, request, reason, mode)

    def _take_back(self, request: Request) -> None:
        """What is decided and not launched will not be computed."""
        for flight in reversed(self.flights.queued):
            for item, row in zip(flight.step.scheduled, flight.rows, strict=True):
                if row.request is request and self.flights.is_live(row):
                    row.sequence.plan_computed(item.start)

    # Launching ----------------------------------------------------------------------------------

    def _fill(self, row: Row) -> None:
        """Tokens stand in place of the placeholders, and there are blocks for them."""
        item, sequence = row.item, row.sequence
        if PLACEHOLDER in item.new_token_ids:
            first = item.end - len(item.new_token_ids)
            item.new_token_ids = sequence.token_ids[first : item.end]
            assert len(item.new_token_ids) == item.end - first
        self.flights.send_blocks(row, self.blocks.blocks_for(item.end))

    def _add_drafts(self, flight: Flight) -> None:
        """What is decided comes first: drafts have what is left of the token budget.

        Blocks they take only while no request waits for some. What is decided for their sequence
        before they are verified must find room behind them.
        """
        budget = self.config.max_num_batched_tokens - flight.step.num_scheduled_tokens
        for row in flight.rows:
            item, sequence = row.item, row.sequence
            drafts = self._offered.get(sequence, [])
            if not drafts or item.end != sequence.num_tokens:
                continue
            ahead = item.end + self.config.async_scheduling
            most = row.request.last_position
            num_spare = 0 if len(self.waiting) else self.blocks.num_available_blocks
            room = (len(sequence.block_table) + num_spare) * self.config.block_size
            count = min(len(drafts), budget)
            if room < most:
                count = min(count, room - ahead)
            if count > 0:
                budget -= count
                self._take_along(flight, row, drafts[:count], min(ahead + count, most))
        self._offered.clear()

    def _take_along(self, flight: Flight, row: Row, drafts: list[int], end: int) -> None:
        """Compute drafts behind a row; all that is decided by then ends before `end`."""
        item, sequence = row.item, row.sequence
        num_blocks = len(sequence.block_table)
        self.residency.extend_table(flight.step, sequence, end)
        self.flights.keep(sequence.block_table[num_blocks:])
        sequence.drafts_in_flight = drafts
        item.new_token_ids = item.new_token_ids + drafts
        item.end += len(drafts)
        self.flights.send_blocks(row, self.blocks.blocks_for(item.end))

    def _count(self, step: SchedulerOutput, row: Row) -> None:
        """Count and report what is computed."""
        item, sequence = row.item, row.sequence
        num_drafts = len(sequence.drafts_in_flight)
        counters = self.counters
        counters.num_computed_tokens += item.end - item.start
        counters.num_drafted_tokens += num_drafts
        again = min(item.end, sequence.max_computed_tokens) - item.start
        counters.num_recomputed_tokens += max(0, again)
        sequence.max_computed_tokens = max(sequence.max_computed_tokens, item.end - num_drafts)
        Scheduler._report_scheduled(self, step, item)

    def _state_check(self, step: SchedulerOutput) -> StateCheck | None:
        """Made when the step is launched."""
        return None

    def _make_findable(self, sequence: Sequence, end: int) -> None:
        """Make blocks findable as far as they are computed, not as far as that is decided."""
        if not sequence.block_table:
            return  # they have gone to the host since
        planned = sequence.num_computed_tokens
        sequence.num_computed_tokens = end
        self.blocks.make_findable(sequence)
        sequence.num_computed_tokens = planned


def _waits_for_tokens(request: Request) -> bool:
    """Everything is computed, or decided, but tokens that are not known yet."""
    return all(
        sequence.num_computed_tokens >= sequence.num_tokens
        for sequence in request.sequences.values()
    )
