"""Decides what each step computes. Owns the queues; knows no tensors, no text, no sampling.

One mechanism: every sequence has tokens still to compute, and a step computes the next of them up
to a budget. Running requests come first, then waiting ones, swapped ones among them, each in order
of precedence: priority (with `scheduling_policy="priority"`; else all are equal), then arrival.
Sequences are scheduled one by one, requests are admitted and preempted.

Nobody waits for ever among equals. The first of the running requests computes at least one token in
every step and is never a victim unless it is alone, and no request is admitted before one that
precedes it. So a request r ends after at most

    sum of N(q) + interruptions * max of N(q)          N(q) = prompt tokens + n * max_tokens

steps, over r and all q that precede it at any time of its stay. Interruptions are arrivals that
precede r, changes of priority, and cache resets that preempt. With swapping it is twice as many:
the first may wait one step for each of its tokens, while the blocks it takes are copied to the
host. The bound is the engine's own: preemptions forced from outside and blocks withheld from
requests void it.
"""

from __future__ import annotations

from preempt_engine.branches import Branches
from preempt_engine.config import EngineConfig, PreemptionMode
from preempt_engine.headroom import cut_drafts_to_fit, num_blocks_beside, victims_of
from preempt_engine.observer import EngineObserver, PoolCounts, PoolState
from preempt_engine.pool_view import check_integrity, pool_counts, pool_state
from preempt_engine.residency import Residency
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import ScheduledSequence, SchedulerOutput, StateCheck, state_checksum
from preempt_engine.victims import (
    ForcedPreemption,
    PreemptionController,
    choose_victim,
    evictions_suffice,
)

Work = list[tuple[Sequence, int]]  # sequences to compute, each with one past its last position


class Scheduler:
    """The step.

    Args:
        config: of the engine.
        num_blocks: size of the pool.
        num_host_blocks: size of the swap space.
        controller: forces preemptions, if given.

    Attributes:
        residency: the requests and their blocks; `blocks`, `swapper`, `waiting`, `running`,
            `requests` and `counters` are its parts.
        branches: splits and ends the sequences of a request.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        controller: PreemptionController | None = None,
    ) -> None:
        self.config = config
        self.residency = residency = Residency(config, num_blocks, num_host_blocks)
        self.branches = Branches(residency)
        self.blocks = residency.blocks
        self.swapper = residency.swapper
        self.waiting = residency.waiting
        self.running = residency.running
        self.requests = residency.requests
        self.counters = residency.counters
        self.controller = controller
        self._room_made_for: Request | None = None  # victims of the last step are copied for it
        self._forced: dict[str, PreemptionMode | None] = {}
        # Whose the rows of the step are that was decided last, so that nobody is looked up again.
        self._requests: list[Request | None] = []
        self._sequences: list[Sequence] = []

    @property
    def observer(self) -> EngineObserver | None:
        """Is told every decision, if there is one."""
        return self.residency.observer

    @observer.setter
    def observer(self, observer: EngineObserver | None) -> None:
        self.residency.observer = observer

    @property
    def next_step_id(self) -> int:
        """Number of the next step to be decided."""
        return self.residency.next_step_id

    # From outside, between steps ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.residency.arrive(request)

    def refuse(self, request: Request) -> None:
        """A request that can never run: it ends without having been queued."""
        self.counters.num_finished_requests += 1
        self.residency.report_arrival(request)
        if self.observer is not None:
            self.observer.finished(self.next_step_id, request.request_id, "error")

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """A token was chosen from the logits of the sequence's last position."""
        self.counters.num_generated_tokens += 1
        if sequence.draft_token_ids:
            self._verify_draft(sequence, token_id)
        else:
            sequence.append_token(token_id)

    def _verify_draft(self, sequence: Sequence, token_id: int) -> None:
        num_drafts = len(sequence.draft_token_ids)
        if sequence.verify_draft(token_id):
            self.counters.num_accepted_tokens += 1
            self.blocks.make_findable(sequence)
        else:
            self.counters.num_rejected_tokens += num_drafts

    def wants_drafts(self, sequence: Sequence) -> bool:
        """Whether its newest token, and nothing else, is computed next."""
        return sequence.num_computed_tokens == sequence.num_tokens - 1

    def offer_drafts(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Guesses at the sequence's next tokens; as many are computed as there is room for."""
        sequence.draft_token_ids = token_ids

    def force_preemption(self, request_id: str, mode: PreemptionMode | None = None) -> None:
        """Preempt the request before the next step is scheduled, if it runs then."""
        self._forced[request_id] = mode

    def set_priority(self, request: Request, priority: int) -> None:
        """Give an unfinished request another place, in the queue or among those that run."""
        self.residency.set_priority(request, priority)

    def preempt_all(self) -> None:
        """Every running request loses its blocks now, between steps, and every swapped one its own.

        All are recomputed, whatever the engine's mode: a swap is part of a step, and would keep
        what was computed.
        """
        next_step = SchedulerOutput(step_id=self.next_step_id)  # a name for the report
        swapped = [request for request in self.waiting.in_order() if request.host_blocks]
        for request in [*reversed(self.running), *swapped]:
            self._preempt(next_step, request, "forced", "recompute")

    def finish(self, request: Request, reason: str) -> None:
        """The request ended by itself."""
        self.residency.leave(request)
        self.counters.num_finished_requests += 1
        if self.observer is not None:
            self.observer.finished(self.next_step_id - 1, request.request_id, reason)

    def abort(self, request: Request) -> None:
        """The request is given up from outside."""
        self.residency.leave(request)
        if self.observer is not None:
            self.observer.aborted(self.next_step_id, request.request_id)

    # A step -------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; without `has_work` it need not be executed."""
        step = SchedulerOutput(step_id=self.next_step_id)
        self._requests, self._sequences = [], []
        self.residency.next_step_id += 1
        forced = self._take_forced(step.step_id)
        for request, mode in forced:
            self._preempt(step, request, "forced", mode)
        if self.config.scheduling_policy == "priority" and not forced:
            self._admit_urgent(step)
        if self.config.num_speculative_tokens:
            self._cut_drafts()
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if not forced:
            self._schedule_waiting(step, budget)
        if step.has_work:
            self.residency.tell_workers(step)
            if self.config.debug_worker_state:
                step.state_check = self._state_check(step)
            self.counters.num_steps += bool(step.scheduled)
            self.residency.step_in_flight = step.step_id
        return step

    def advance(self, step: SchedulerOutput) -> list[Request | None]:
        """The step is done: what it computed is in the cache, what waited for it is free.

        Returns:
            Whose each scheduled sequence is; None where it ended or lost its blocks while the step
            ran. What was computed for that one is of no use: it is computed again, and gives the
            same.
        """
        requests, block_size = self._requests, self.config.block_size
        rows = zip(step.scheduled, self._sequences, strict=True)
        for row, (item, sequence) in enumerate(rows):
            if not sequence.known_to_workers:
                requests[row] = None
                continue
            sequence.set_computed(item.end)
            if sequence.draft_token_ids:
                self.counters.num_drafted_tokens += sequence.num_unverified_tokens
            if sequence.followers:
                sequence.release_followers()
            if item.end >= (sequence.num_findable_blocks + 1) * block_size:
                self.blocks.make_findable(sequence)
            sequence.num_steps_since_admission += 1
            if item.start < sequence.num_prefill_tokens:
                sequence.num_chunks += 1
        self.leave_step(step)
        return requests

    def leave_step(self, step: SchedulerOutput) -> None:
        """Nobody works at the step any more, done or failed: what waited for it is free."""
        self.residency.step_in_flight = None
        self.residency.pass_fence(step.step_id)

    def _admit_urgent(self, step: SchedulerOutput) -> None:
        """Admit waiting requests that are more urgent than a running one, at its cost if need be.

        Done before anything is scheduled, so there are no tokens to take back from a victim. While
        a step is in flight the blocks of a victim are not free: to evict it would not make room.
        Nor are they while it is copied to the host: then the request comes in the next step, even
        if the token budget has nothing left for it.
        """
        if self.residency.step_in_flight is not None:
            return
        while len(self.waiting) and self.running:
            request = self.waiting.peek()
            is_owed = request is self._room_made_for
            self._room_made_for = None
            if not is_owed and request.priority >= self.running[-1].priority:
                return
            victims = victims_of(self.residency, request)
            if victims is None:
                return
            for victim in victims:
                self._preempt(step, victim, "priority")
            if step.swap_out:
                self._room_made_for = request
                return
            if not self._admit(step, request):
                return

    def _cut_drafts(self) -> None:
        cut_drafts_to_fit(self.residency)

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Returns what is left of the budget: nothing when blocks ran short.

        A step that takes blocks away, or lacks blocks, admits nobody.
        """
        blocks_are_short = False
        for request in self.running:  # victims go from its end
            if budget <= 0:
                break
            if request.num_seqs == 1 and (num_tokens := self._go_on(step, request, budget)):
                budget -= num_tokens
                continue
            work = self._next_tokens(request, budget)
            num_blocks = self.blocks.num_to_write(work)
            if num_blocks > self.blocks.num_available_blocks:
                blocks_are_short = True
                if not self._make_room(step, request, num_blocks):
                    continue
            budget -= self._schedule_work(step, request, work, num_blocks)
        return 0 if blocks_are_short else budget

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        if not len(self.waiting) or budget <= 0:
            return
        num_seqs = sum(request.num_seqs for request in self.running)
        while len(self.waiting) and budget > 0:
            request = self.waiting.peek()
            num_seqs += request.num_seqs
            if num_seqs > self.config.max_num_seqs or not self._admit(step, request):
                return
            work = self._next_tokens(request, budget)
            num_blocks = self.blocks.num_to_write(work)
            budget -= self._schedule_work(step, request, work, num_blocks)

    def _go_on(self, step: SchedulerOutput, request: Request, budget: int) -> int:
        """Compute what is left of the only sequence of a request, if nothing has to be weighed up.

        That is what most requests do in most steps: the blocks are there, and the budget lasts.
        Nothing is copied on write: a block that is not full is shared by branches of one request
        only, and there is but one.

        Returns:
            The number of tokens; 0 when it is not as simple as that.
        """
        sequence = request.sequence
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        if (
            end > len(sequence.block_table) * self.config.block_size
            or end - start > budget
            or sequence.draft_token_ids
            or sequence.follows
            or start == end
        ):
            return 0
        self._schedule_tokens(step, request, sequence, end)
        return end - start

    @staticmethod
    def _next_tokens(request: Request, budget: int) -> Work:
        """What to compute of a request with a budget above 0."""
        work = []
        for sequence in request.sequences.values():
            num_tokens = len(sequence.token_ids) + len(sequence.draft_token_ids)
            start = sequence.num_computed_tokens
            if start == num_tokens or sequence.follows:
                continue
            end = min(num_tokens, start + budget)
            work.append((sequence, end))
            budget -= end - start
            if not budget:
                break
        return work

    def _schedule_work(
        self, step: SchedulerOutput, request: Request, work: Work, num_blocks: int
    ) -> int:
        """Compute tokens; so many blocks are there for them. Returns the number of tokens."""
        num_tokens = 0
        for sequence, end in work:
            if num_blocks:
                self.residency.extend_table(step, sequence, end)
            num_tokens += end - sequence.num_computed_tokens
            self._schedule_tokens(step, request, sequence, end)
        return num_tokens

    def _schedule_tokens(
        self, step: SchedulerOutput, request: Request, sequence: Sequence, end: int
    ) -> None:
        """Compute the sequence's next tokens, up to `end`; blocks for them are there."""
        start, table = sequence.num_computed_tokens, sequence.block_table
        wanted = sequence.first_wanted_logits
        counters = self.counters
        counters.num_computed_tokens += end - start
        if start < sequence.max_computed_tokens:
            counters.num_recomputed_tokens += min(end, sequence.max_computed_tokens) - start
        item = ScheduledSequence(
            sequence.key,
            start,
            end,
            start if wanted < start else wanted if wanted < end else end,
            not sequence.known_to_workers,
            sequence.token_ids[sequence.num_sent_tokens :],
            sequence.block_table[sequence.num_sent_blocks :]
            if sequence.num_sent_blocks < len(table)
            else (),
            sequence.num_stale_blocks,
            sequence.full_logits,
        )
        step.scheduled.append(item)
        self._requests.append(request)
        self._sequences.append(sequence)
        if sequence.draft_token_ids or sequence.num_stale_tokens:
            self._send_drafts(item, sequence)
        sequence.known_to_workers = True
        sequence.num_sent_tokens = len(sequence.token_ids)
        sequence.num_sent_blocks = len(table)
        sequence.num_stale_blocks = 0
        if self.residency.observer is not None:
            self._report_scheduled(step, item)

    def _report_scheduled(self, step: SchedulerOutput, item: ScheduledSequence) -> None:
        if self.observer is not None:
            self.observer.scheduled(step.step_id, item.key, item.start, item.end)

    @staticmethod
    def _send_drafts(item: ScheduledSequence, sequence: Sequence) -> None:
        """Drafts travel behind the known tokens, and rejected ones of earlier steps are cut off."""
        del sequence.draft_token_ids[max(0, item.end - sequence.num_tokens) :]
        item.new_token_ids += sequence.draft_token_ids[max(0, item.start - sequence.num_tokens) :]
        item.num_stale_tokens = sequence.num_stale_tokens
        sequence.num_stale_tokens = 0

    def _state_check(self, step: SchedulerOutput) -> StateCheck | None:
        """What the workers must know after the step; taken from the sequences, not the deltas."""
        scheduled = [
            self.requests[item.key.request_id].sequences[item.key.branch] for item in step.scheduled
        ]
        return StateCheck(
            num_sequences=sum(sequence.known_to_workers for sequence in self.residency.sequences()),
            checksums=[
                state_checksum(sequence.token_ids + sequence.draft_token_ids, sequence.block_table)
                for sequence in scheduled
            ],
        )

    # Blocks -------------------------------------------------------------------------------------

    def _admit(self, step: SchedulerOutput, request: Request) -> bool:
        """Let the head of the queue run if its blocks are there; returns whether."""
        num_spare = num_blocks_beside(self.residency, request) if self.running else 0
        num_available = self.blocks.num_available_blocks - num_spare
        if request.host_blocks is not None:
            copied_now = {host for _, host in step.swap_out}
            if not copied_now.isdisjoint(request.host_blocks.values()):
                return False  # a step copies in before it copies out
            if self.swapper.num_blocks_to_return(request) > num_available:
                return False
            self.residency.swap_in(step, request)
        elif not self.residency.find_room(step, request, num_available):
            return False
        self.residency.run(request)
        return True

    def _take_forced(self, step_id: int) -> list[tuple[Request, PreemptionMode | None]]:
        forced, self._forced = self._forced, {}
        if self.controller is not None:
            for victim in self.controller.select_victims(step_id, self.running):
                entry = ForcedPreemption(victim) if isinstance(victim, str) else victim
                forced[entry.request_id] = entry.mode
        if not forced:
            return []
        running = {request.request_id: request for request in self.running}
        return [(running[name], mode) for name, mode in forced.items() if name in running]

    def _make_room(self, step: SchedulerOutput, request: Request, num_blocks: int) -> bool:
        """Preempt until a running request can have so many blocks.

        Returns:
            False when it cannot in this step: it was the last to preempt, the less urgent have too
            little to give up, or the blocks are withheld until a step is done.
        """
        # Every request has a block of its own, so one block can always be had of another.
        several = num_blocks > 1 and self.running[-1] is not request
        if several and not evictions_suffice(request, self.running, self.blocks, num_blocks):
            return False
        while num_blocks > self.blocks.num_available_blocks:
            if num_blocks <= self.blocks.num_available_blocks + len(self.blocks.fenced_blocks):
                return False
            victim = choose_victim(self.running)
            self._preempt(step, victim, "out_of_blocks")
            if victim is request:
                return False
        return True

    def _preempt(
        self,
        step: SchedulerOutput,
        request: Request,
        reason: str,
        mode: PreemptionMode | None = None,
    ) -> None:
        """Take a request's blocks; a mode of None is the engine's."""
        self.residency.preempt(step, request, reason, mode or self.config.preemption_mode)

    # Looking ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that blocks, references, queues and progress agree with each other."""
        check_integrity(self.residency)

    def pool_counts(self) -> PoolCounts:
        """Sizes of the pool's parts."""
        return pool_counts(self.residency)

    def pool_state(self) -> PoolState:
        """A copy of the raw state of pool and queues."""
        return pool_state(self.residency)
