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

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from operator import attrgetter

from preempt_engine.admission import Placement, WaitingQueue, num_blocks_to_admit, place
from preempt_engine.block_manager import BlockManager
from preempt_engine.config import EngineConfig, PreemptionMode
from preempt_engine.observer import EngineObserver, PoolCounts, PoolState
from preempt_engine.sequence import PLACEHOLDER, Request, RequestStatus, Sequence
from preempt_engine.spec_decode.allowance import Claim, cut_drafts, num_lookahead_blocks
from preempt_engine.step import (
    ScheduledSequence,
    SchedulerOutput,
    SequenceKey,
    StateCheck,
    state_checksum,
)
from preempt_engine.swapping import Swapper
from preempt_engine.victims import (
    ForcedPreemption,
    PreemptionController,
    choose_victim,
    evictions_suffice,
    victims_for,
)

Work = list[tuple[Sequence, int]]  # sequences to compute, each with one past its last position


@dataclass(slots=True)
class Counters:
    """Totals since the engine was built.

    Attributes:
        num_steps: steps that computed something.
        num_preemptions: requests that lost their blocks, counted each time.
        num_computed_tokens: tokens scheduled.
        num_recomputed_tokens: those of them that had been computed before.
        num_cached_tokens: prompt tokens found in the prefix cache at first admissions; what a
            preempted request finds again is not counted.
        num_generated_tokens: tokens given to users; of a beam search, those of its results.
        num_finished_requests: ended by themselves, errors included; aborted ones are not counted.
        num_drafted_tokens: drafts computed; each is accepted or rejected when its step is done.
        num_accepted_tokens: drafts that were equal to the tokens of their positions.
        num_rejected_tokens: the others, and those behind the end of their sequence.
        num_copied_blocks: blocks copied because somebody writes to what others share.
        num_swapped_out_blocks, num_swapped_in_blocks: blocks copied to the host and back.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished_requests: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    num_copied_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


_precedence = attrgetter("precedence")


class Scheduler:
    """The queues and the step.

    Args:
        config: of the engine.
        num_blocks: size of the pool.
        num_host_blocks: size of the swap space.
        controller: forces preemptions, if given.
        observer: is told every decision, if given.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        controller: PreemptionController | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.config = config
        self.blocks = BlockManager(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            reuse_order=config.block_reuse_order,
            seed=config.seed,
            poison=config.poison,
        )
        self.swapper = Swapper(self.blocks, num_host_blocks)
        self.num_watermark_blocks = int(config.watermark * num_blocks)
        self.controller = controller
        self.observer = observer
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.next_step_id = 0
        self._room_made_for: Request | None = None  # victims of the last step are copied for it
        self._forced: dict[str, PreemptionMode | None] = {}
        self._forks: list[tuple[SequenceKey, SequenceKey]] = []
        self._dropped: list[SequenceKey] = []
        self._step_in_flight: int | None = None

    # From outside, between steps ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.push(request)
        self._report_arrival(request)

    def refuse(self, request: Request) -> None:
        """A request that can never run: it ends without having been queued."""
        self.counters.num_finished_requests += 1
        self._report_arrival(request)
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
        if sequence.draft_token_ids[0] == PLACEHOLDER:
            sequence.fill_placeholder(token_id)
        elif sequence.verify_draft(token_id):
            self.counters.num_accepted_tokens += 1
            self.blocks.make_findable(sequence)
        else:
            self.counters.num_rejected_tokens += num_drafts

    def fork(self, request: Request, parent: Sequence) -> Sequence:
        """Split a branch off a sequence whose tokens are all computed."""
        child = parent.fork(SequenceKey(request.request_id, request.next_branch))
        request.next_branch += 1
        request.sequences[child.key.branch] = child
        self.blocks.fork(parent, child)
        if child.known_to_workers:
            self._forks.append((parent.key, child.key))
        if self.observer is not None:
            self.observer.forked(self.next_step_id - 1, parent.key, child.key)
        return child

    def continue_beams(self, request: Request, beams: Seq[tuple[int, int]]) -> list[int]:
        """Replace a request's sequences by the beams of the next step.

        Args:
            beams: (branch it continues, its next token). A branch may be continued several
                times; one that is not continued gives up its blocks at once.

        Returns:
            Branch of each beam.
        """
        continued = {branch for branch, _ in beams}
        for branch in [branch for branch in request.sequences if branch not in continued]:
            self._drop(request, request.sequences[branch])
        chosen: list[Sequence] = []
        for branch, _ in beams:
            parent = request.sequences[branch]
            chosen.append(self.fork(request, parent) if branch not in continued else parent)
            continued.discard(branch)
        for sequence, (_, token_id) in zip(chosen, beams, strict=True):
            sequence.append_token(token_id)
            if self.observer is not None:
                self.observer.tokens_chosen(self.next_step_id - 1, sequence.key, [token_id])
        return [sequence.key.branch for sequence in chosen]

    def end_branch(self, request: Request, sequence: Sequence) -> None:
        """One of several branches ended by itself; the others go on."""
        request.num_seqs -= 1
        self._drop(request, sequence)

    def force_preemption(self, request_id: str, mode: PreemptionMode | None = None) -> None:
        """Preempt the request before the next step is scheduled, if it runs then."""
        self._forced[request_id] = mode

    def set_priority(self, request: Request, priority: int) -> None:
        """Give an unfinished request another place, in the queue or among those that run."""
        is_waiting = request.status is RequestStatus.WAITING
        if is_waiting:
            self.waiting.remove(request)
        request.priority = priority
        if is_waiting:
            self.waiting.push(request)
        else:
            self.running.sort(key=_precedence)
        if self.observer is not None:
            self.observer.priority_changed(self.next_step_id, request.request_id, priority)

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
        self._leave(request)
        self.counters.num_finished_requests += 1
        if self.observer is not None:
            self.observer.finished(self.next_step_id - 1, request.request_id, reason)

    def abort(self, request: Request) -> None:
        """The request is given up from outside."""
        self._leave(request)
        if self.observer is not None:
            self.observer.aborted(self.next_step_id, request.request_id)

    # A step -------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; without `has_work` it need not be executed."""
        step = SchedulerOutput(step_id=self.next_step_id)
        self.next_step_id += 1
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
            step.forks, self._forks = self._forks, []
            step.dropped, self._dropped = self._dropped, []
            step.poison_block_ids = self.blocks.take_blocks_to_poison()
            if self.config.debug_worker_state:
                step.state_check = self._state_check(step)
            self.counters.num_steps += bool(step.scheduled)
            self._step_in_flight = step.step_id
        return step

    def advance(self, step: SchedulerOutput) -> list[Request | None]:
        """The step is done: what it computed is in the cache, what waited for it is free.

        Returns:
            Whose each scheduled sequence is; None where it ended or lost its blocks while the step
            ran. What was computed for that one is of no use: it is computed again, and gives the
            same.
        """
        requests: list[Request | None] = []
        for item in step.scheduled:
            request_id, branch = item.key
            request = self.requests.get(request_id)
            sequence = request.sequences.get(branch) if request is not None else None
            if sequence is None or not sequence.known_to_workers:
                requests.append(None)
                continue
            requests.append(request)
            sequence.set_computed(item.end)
            if sequence.draft_token_ids:
                self.counters.num_drafted_tokens += sequence.num_unverified_tokens
            if sequence.followers:
                sequence.release_followers()
            self.blocks.make_findable(sequence)
            sequence.num_steps_since_admission += 1
            if item.start < sequence.num_prefill_tokens:
                sequence.num_chunks += 1
        self.leave_step(step)
        return requests

    def leave_step(self, step: SchedulerOutput) -> None:
        """Nobody works at the step any more, done or failed: what waited for it is free."""
        self._step_in_flight = None
        self.blocks.pass_fence(step.step_id)
        self.swapper.host.pass_fence(step.step_id)

    def _admit_urgent(self, step: SchedulerOutput) -> None:
        """Admit waiting requests that are more urgent than a running one, at its cost if need be.

        Done before anything is scheduled, so there are no tokens to take back from a victim. While
        a step is in flight the blocks of a victim are not free: to evict it would not make room.
        Nor are they while it is copied to the host: then the request comes in the next step, even
        if the token budget has nothing left for it.
        """
        if self._step_in_flight is not None:
            return
        while len(self.waiting) and self.running:
            request = self.waiting.peek()
            is_owed = request is self._room_made_for
            self._room_made_for = None
            if not is_owed and request.priority >= self.running[-1].priority:
                return
            victims = self._victims_for(request)
            if victims is None:
                return
            for victim in victims:
                self._preempt(step, victim, "priority")
            if step.swap_out:
                self._room_made_for = request
                return
            if not self._admit(step, request):
                return

    def _victims_for(self, request: Request) -> list[Request] | None:
        """Who must go so that the head of the queue can run; None if nobody would help."""
        num_blocks, hits = self._blocks_to_admit(request)
        return victims_for(
            request,
            self.running,
            self.blocks,
            num_blocks=num_blocks,
            hits=hits,
            max_num_seqs=self.config.max_num_seqs,
            num_watermark_blocks=self.num_watermark_blocks + self._num_lookahead_blocks(request),
        )

    def _blocks_to_admit(self, request: Request) -> tuple[int, set[int]]:
        """Blocks that a waiting request takes from the pool to run, and those of them it finds."""
        if request.host_blocks is not None:
            return self.swapper.num_blocks_to_return(request), set()
        placements = place(request, self.blocks)
        hits = {block_id for placement in placements for block_id in placement.hits}
        return num_blocks_to_admit(placements, self.blocks), hits

    def _cut_drafts(self) -> None:
        """Keep the drafts for which this step has room.

        They come last: after the known tokens of those who run, and after the head of the queue if
        it can be let in.
        """
        budget = self.config.max_num_batched_tokens
        num_seqs = sum(request.num_seqs for request in self.running)
        head = None
        if len(self.waiting):
            head = self.waiting.peek()
            if num_seqs + head.num_seqs > self.config.max_num_seqs:
                head = None
        if head is None:
            cut_drafts(self.running, self.blocks, budget)
            return
        num_blocks, hits = self._blocks_to_admit(head)
        num_blocks += self.num_watermark_blocks + self._num_lookahead_blocks(head)
        num_tokens = sum(
            sequence.num_tokens - sequence.num_computed_tokens
            for sequence in head.sequences.values()
        )
        num_tokens -= len(hits) * self.config.block_size
        cut_drafts(self.running, self.blocks, budget, head=Claim(max(1, num_tokens), num_blocks))

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Returns what is left of the budget: nothing when blocks ran short.

        A step that takes blocks away, or lacks blocks, admits nobody.
        """
        blocks_are_short = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            work = self._next_tokens(request, budget)
            num_blocks = self.blocks.num_to_write(work)
            if num_blocks > self.blocks.num_available_blocks:
                blocks_are_short = True
                if not self._make_room(step, request, num_blocks):
                    continue
            budget -= self._schedule_work(step, work, num_blocks)
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
            budget -= self._schedule_work(step, work, self.blocks.num_to_write(work))

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

    def _schedule_work(self, step: SchedulerOutput, work: Work, num_blocks: int) -> int:
        """Compute tokens; so many blocks are there for them. Returns the number of tokens."""
        num_tokens = 0
        for sequence, end in work:
            if num_blocks:
                self._extend_table(step, sequence, end)
            num_tokens += end - sequence.num_computed_tokens
            self._schedule_tokens(step, sequence, end)
        return num_tokens

    def _extend_table(self, step: SchedulerOutput, sequence: Sequence, end: int) -> None:
        """Give the sequence the blocks that it writes up to `end`."""
        copy = self.blocks.copy_on_write(sequence)
        if copy is not None:
            step.block_copies.append(copy)
            self.counters.num_copied_blocks += 1
        new_blocks = self.blocks.grow(sequence, end)
        if self.observer is None:
            return
        if copy is not None:
            self.observer.blocks_allocated(step.step_id, sequence.key, [copy[1]], 0)
            self.observer.blocks_freed(step.step_id, sequence.key, [copy[0]])
            self.observer.blocks_copied(step.step_id, [copy])
        if new_blocks:
            self.observer.blocks_allocated(step.step_id, sequence.key, new_blocks, 0)

    def _schedule_tokens(self, step: SchedulerOutput, sequence: Sequence, end: int) -> None:
        """Compute the sequence's next tokens, up to `end`; blocks for them are there."""
        start = sequence.num_computed_tokens
        counters = self.counters
        counters.num_computed_tokens += end - start
        if start < sequence.max_computed_tokens:
            counters.num_recomputed_tokens += min(end, sequence.max_computed_tokens) - start
        step.scheduled.append(
            ScheduledSequence(
                sequence.key,
                start,
                end,
                min(max(start, sequence.first_wanted_logits), end),
                not sequence.known_to_workers,
                sequence.token_ids[sequence.num_sent_tokens :],
                sequence.block_table[sequence.num_sent_blocks :],
                sequence.num_stale_blocks,
                sequence.full_logits,
            )
        )
        if sequence.draft_token_ids or sequence.num_stale_tokens:
            self._send_drafts(step.scheduled[-1], sequence)
        sequence.known_to_workers = True
        sequence.num_sent_tokens = len(sequence.token_ids)
        sequence.num_sent_blocks = len(sequence.block_table)
        sequence.num_stale_blocks = 0
        if self.observer is not None:
            self._report_scheduled(step, step.scheduled[-1])

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

    # Getting blocks -----------------------------------------------------------------------------

    def _admit(self, step: SchedulerOutput, request: Request) -> bool:
        """Let the head of the queue run if its blocks are there; returns whether."""
        # The watermark protects those who run; with nobody running it would only starve.
        num_spare = self.num_watermark_blocks if self.running else 0
        num_available = self.blocks.num_available_blocks - num_spare
        if self.running:  # and so would those who are let in have room for their drafts
            num_available -= self._num_lookahead_blocks(request)
        if request.host_blocks is not None:
            if self.swapper.num_blocks_to_return(request) > num_available:
                return False
            self._swap_in(step, request)
        elif not self._find_room(step, request, num_available):
            return False
        self.waiting.pop()
        insort(self.running, request, key=_precedence)
        request.status = RequestStatus.RUNNING
        for sequence in request.sequences.values():
            sequence.num_steps_since_admission = 0
        return True

    def _num_lookahead_blocks(self, request: Request) -> int:
        num_drafts = self.config.num_speculative_tokens
        return num_lookahead_blocks(request, self.blocks, num_drafts) if num_drafts else 0

    def _find_room(self, step: SchedulerOutput, request: Request, num_available: int) -> bool:
        """Give all known tokens of the request their blocks, if there are as many."""
        placements = place(request, self.blocks)
        if num_blocks_to_admit(placements, self.blocks) > num_available:
            return False
        num_cached_tokens = len(placements[0].hits) * self.config.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            self.counters.num_cached_tokens += num_cached_tokens
        elif self.observer is not None:
            self.observer.resumed(step.step_id, request.request_id, num_cached_tokens)
        for placement in placements:  # hits first: growing may evict what is not shared yet
            self.blocks.share(placement.sequence, placement.hits)
            placement.sequence.set_computed(len(placement.hits) * self.config.block_size)
        for placement in placements:
            self._build_table(step, placement)
        return True

    def _build_table(self, step: SchedulerOutput, placement: Placement) -> None:
        """Complete a table that has its hits."""
        sequence, leader = placement.sequence, placement.leader
        if leader is not None:
            self.blocks.share(sequence, leader.block_table[: placement.num_leader_blocks])
            num_tokens = placement.num_leader_blocks * self.config.block_size
            leader.followers.append((sequence, num_tokens))
            sequence.follows = True
        num_shared = len(sequence.block_table)
        self.blocks.grow(sequence, sequence.num_tokens)
        sequence.num_prefill_tokens = sequence.num_tokens
        sequence.num_chunks = 0
        if self.observer is not None:
            self.observer.blocks_allocated(
                step.step_id, sequence.key, sequence.block_table, num_shared
            )

    def _swap_in(self, step: SchedulerOutput, request: Request) -> None:
        pairs, num_shared = self.swapper.swap_in(request, step.step_id)
        step.swap_in += pairs
        self.counters.num_swapped_in_blocks += len(pairs)
        if self.observer is None:
            return
        self.observer.resumed(step.step_id, request.request_id, 0)
        for branch, sequence in request.sequences.items():
            self.observer.blocks_allocated(
                step.step_id, sequence.key, sequence.block_table, num_shared[branch]
            )
        self.observer.swapped_in(step.step_id, request.request_id, pairs)

    def _state_check(self, step: SchedulerOutput) -> StateCheck | None:
        """What the workers must know after the step; taken from the sequences, not the deltas."""
        scheduled = [
            self.requests[item.key.request_id].sequences[item.key.branch] for item in step.scheduled
        ]
        return StateCheck(
            num_sequences=sum(sequence.known_to_workers for sequence in self._sequences()),
            checksums=[
                state_checksum(sequence.token_ids + sequence.draft_token_ids, sequence.block_table)
                for sequence in scheduled
            ],
        )

    # Losing blocks ------------------------------------------------------------------------------

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
        """Blocks go, tokens stay, the request waits in its old place.

        Args:
            mode: None is the engine's. Where there is no room, or nothing, to swap out, the
                request is recomputed.
        """
        mode = mode or self.config.preemption_mode
        if mode == "swap" and not self.swapper.can_swap_out(request):
            mode = "recompute"
        if self.observer is not None:
            sequences = request.sequences.values()
            self.observer.preempted(
                step.step_id,
                request.request_id,
                mode=mode,
                phase=self._phase(request),
                reason=reason,
                num_computed_tokens=sum(sequence.num_computed_tokens for sequence in sequences),
                num_tokens=sum(sequence.num_tokens for sequence in sequences),
            )
        if mode == "swap":
            self._swap_out(step, request)
        else:
            # What another victim of this step shared with this one is still being copied.
            fence = step.step_id if step.swap_out else self._step_in_flight
            for sequence in request.sequences.values():
                self._free_blocks(step.step_id, sequence, fence)
            self.swapper.discard(request, fence)
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            request.status = RequestStatus.WAITING
            self.waiting.push(request)

    def _swap_out(self, step: SchedulerOutput, request: Request) -> None:
        pairs = self.swapper.swap_out(request, step.step_id)
        step.swap_out += pairs
        self.counters.num_swapped_out_blocks += len(pairs)
        if self.observer is None:
            return
        for sequence in request.sequences.values():
            self.observer.blocks_freed(step.step_id, sequence.key, list(sequence.swapped_table))
        self.observer.swapped_out(step.step_id, request.request_id, pairs)

    def _phase(self, request: Request) -> str:
        """What a running request is doing, as reported when it is preempted.

        The last chunk is next when what remains fits the whole budget of one step.
        """
        sequence = request.sequence
        if request.num_preemptions and sequence.num_steps_since_admission <= 1:
            return "just_resumed"
        remaining = sequence.num_prefill_tokens - sequence.num_computed_tokens
        if remaining > self.config.max_num_batched_tokens:
            return "prefill_first" if sequence.num_chunks <= 1 else "prefill_middle"
        if remaining > 0:
            return "prefill_last"
        return "first_decode" if sequence.num_output_tokens == 1 else "decode"

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        for sequence in request.sequences.values():
            self._free_blocks(self.next_step_id - 1, sequence, self._step_in_flight)
        self.swapper.discard(request, self._step_in_flight)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _drop(self, request: Request, sequence: Sequence) -> None:
        self._free_blocks(self.next_step_id - 1, sequence, self._step_in_flight)
        del request.sequences[sequence.key.branch]

    def _free_blocks(self, step_id: int, sequence: Sequence, step_in_flight: int | None) -> None:
        if sequence.block_table and self.observer is not None:
            self.observer.blocks_freed(step_id, sequence.key, list(sequence.block_table))
        if sequence.known_to_workers:
            self._dropped.append(sequence.key)
        self.counters.num_rejected_tokens += sequence.num_unverified_tokens
        self.blocks.free(sequence, step_in_flight)
        sequence.forget_cache()

    # Looking ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that blocks, references, queues and progress agree with each other."""
        self.blocks.check_integrity(self._sequences())
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
        assert self.running == sorted(self.running, key=_precedence)
        for request in self.waiting.in_order():
            assert request.status is RequestStatus.WAITING
            assert not any(sequence.block_table for sequence in request.sequences.values())
        assert len(self.running) + len(self.waiting) == len(self.requests)
        host_blocks = self._host_blocks()
        self.swapper.host.check_integrity([b for blocks in host_blocks.values() for b in blocks])
        for request in self.requests.values():
            swapped = request.host_blocks is not None
            assert not (swapped and request.status is RequestStatus.RUNNING)
            assert swapped == any(seq.swapped_table for seq in request.sequences.values())

    def pool_counts(self) -> PoolCounts:
        """Sizes of the pool's parts."""
        blocks = self.blocks
        return PoolCounts(
            num_blocks=blocks.num_blocks,
            free=len(blocks.free_blocks),
            cached=len(blocks.cached_blocks),
            held=len(blocks.held_blocks),
            fenced=len(blocks.fenced_blocks),
            used=blocks.num_used_blocks,
        )

    def pool_state(self) -> PoolState:
        """A copy of the raw state of pool and queues."""
        blocks = self.blocks
        return PoolState(
            num_blocks=blocks.num_blocks,
            free=list(blocks.free_blocks),
            cached=list(blocks.cached_blocks),
            held=list(blocks.held_blocks),
            fenced=list(blocks.fenced_blocks),
            ref_counts=list(blocks.ref_counts),
            tables={
                sequence.key: list(sequence.block_table)
                for sequence in self._sequences()
                if sequence.block_table
            },
            waiting=[request.request_id for request in self.waiting.in_order()],
            running=[request.request_id for request in self.running],
            counters=asdict(self.counters),
            num_host_blocks=self.swapper.host.num_blocks,
            host_free=list(self.swapper.host.free_blocks),
            host_fenced=list(self.swapper.host.fenced_blocks),
            host_blocks=self._host_blocks(),
        )

    def _sequences(self) -> Iterable[Sequence]:
        for request in self.requests.values():
            yield from request.sequences.values()

    def _host_blocks(self) -> dict[str, list[int]]:
        return {
            request.request_id: list(request.host_blocks.values())
            for request in self.requests.values()
            if request.host_blocks is not None
        }

    def _report_arrival(self, request: Request) -> None:
        if self.observer is not None:
            self.observer.arrived(
                self.next_step_id,
                request.request_id,
                request.sequence.token_ids,
                request.params.max_tokens,
                request.priority,
            )
