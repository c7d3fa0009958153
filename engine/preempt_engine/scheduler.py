"""Decides what each step computes. Owns the queues; knows no tensors, no text, no sampling.

One mechanism: every sequence has tokens still to compute, and a step computes the next of them up
to a budget. Running requests come first, in admission order; then waiting ones, in arrival order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from preempt_engine.admission import WaitingQueue, find_hits, fits
from preempt_engine.block_manager import BlockManager
from preempt_engine.config import EngineConfig
from preempt_engine.observer import EngineObserver, PoolCounts, PoolState
from preempt_engine.sequence import Request, RequestStatus, Sequence
from preempt_engine.step import (
    ScheduledSequence,
    SchedulerOutput,
    SequenceKey,
    StateCheck,
    state_checksum,
)
from preempt_engine.victims import PreemptionController, choose_victim


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
        num_generated_tokens: tokens sampled.
        num_finished_requests: ended by themselves, errors included; aborted ones are not counted.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished_requests: int = 0


class Scheduler:
    """The queues and the step.

    Args:
        config: of the engine.
        num_blocks: size of the pool.
        controller: forces preemptions, if given.
        observer: is told every decision, if given.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        *,
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
        self.num_watermark_blocks = int(config.watermark * num_blocks)
        self.controller = controller
        self.observer = observer
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.next_step_id = 0
        self._forced: dict[str, None] = {}
        self._dropped: list[SequenceKey] = []
        self._step_in_flight: int | None = None

    # From outside, between steps ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.push(request)
        if self.observer is not None:
            self.observer.arrived(
                self.next_step_id,
                request.request_id,
                request.sequence.token_ids,
                request.params.max_tokens,
                0,
            )

    def refuse(self, request: Request) -> None:
        """A request that can never run: it ends without having been queued."""
        self.counters.num_finished_requests += 1
        if self.observer is not None:
            self.observer.arrived(
                self.next_step_id,
                request.request_id,
                request.sequence.token_ids,
                request.params.max_tokens,
                0,
            )
            self.observer.finished(self.next_step_id, request.request_id, "error")

    def append_token(self, request: Request, token_id: int) -> None:
        """A token was sampled from the logits of the request's last position."""
        sequence = request.sequence
        assert sequence.num_computed_tokens == sequence.num_tokens
        sequence.token_ids.append(token_id)
        self.counters.num_generated_tokens += 1

    def force_preemption(self, request_id: str) -> None:
        """Preempt the request before the next step is scheduled, if it runs then."""
        self._forced[request_id] = None

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
        """Decide the next step; `scheduled` is empty when nothing can run."""
        step = SchedulerOutput(step_id=self.next_step_id)
        self.next_step_id += 1
        preemptions_before = self.counters.num_preemptions
        for request_id in self._take_forced(step.step_id):
            self._preempt(step, self.requests[request_id], "forced")
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        # A step that took blocks away admits nobody: no request is victim and newcomer at once.
        if self.counters.num_preemptions == preemptions_before:
            self._schedule_waiting(step, budget)
        if step.scheduled:
            step.dropped, self._dropped = self._dropped, []
            step.poison_block_ids = self.blocks.take_blocks_to_poison()
            if self.config.debug_worker_state:
                step.state_check = self._state_check(step)
            self.counters.num_steps += 1
            self._step_in_flight = step.step_id
        return step

    def advance(self, step: SchedulerOutput) -> None:
        """The step is done: what it computed is in the cache, what waited for it is free."""
        for item in step.scheduled:
            request = self.requests.get(item.key.request_id)
            if request is None:  # ended while the step ran
                continue
            sequence = request.sequences[item.key.branch]
            sequence.set_computed(item.end)
            self.blocks.make_findable(sequence)
            request.num_steps_since_admission += 1
            if item.start < request.num_prefill_tokens:
                request.num_chunks += 1
        self._step_in_flight = None
        self.blocks.pass_fence(step.step_id)

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Returns what is left of the budget."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            sequence = request.sequence
            end = min(sequence.num_tokens, sequence.num_computed_tokens + budget)
            while not self.blocks.can_grow(sequence, end):
                victim = choose_victim(self.running)
                self._preempt(step, victim, "out_of_blocks")
                if victim is request:
                    return budget
            self._schedule_tokens(step, request, end)
            budget -= end - sequence.num_computed_tokens
            index += 1
        return budget

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        while len(self.waiting) and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            hits = find_hits(request, self.blocks)
            # The watermark protects those who run; with nobody running it would only starve.
            spare = self.num_watermark_blocks if self.running else 0
            if not fits(request, hits, self.blocks, spare):
                return
            self.waiting.pop()
            self._admit(step, request, hits)
            sequence = request.sequence
            end = min(sequence.num_tokens, sequence.num_computed_tokens + budget)
            self._schedule_tokens(step, request, end)
            budget -= end - sequence.num_computed_tokens

    def _admit(self, step: SchedulerOutput, request: Request, hits: list[int]) -> None:
        sequence = request.sequence
        request.status = RequestStatus.RUNNING
        request.num_steps_since_admission = 0
        request.num_chunks = 0
        request.num_prefill_tokens = sequence.num_tokens
        self.running.append(request)
        num_cached_tokens = len(hits) * self.config.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            self.counters.num_cached_tokens += num_cached_tokens
        elif self.observer is not None:
            self.observer.resumed(step.step_id, request.request_id, num_cached_tokens)
        self.blocks.share(sequence, hits)
        self.blocks.grow(sequence, sequence.num_tokens)
        sequence.set_computed(num_cached_tokens)
        if self.observer is not None:
            self.observer.blocks_allocated(
                step.step_id, sequence.key, sequence.block_table, len(hits)
            )

    def _schedule_tokens(self, step: SchedulerOutput, request: Request, end: int) -> None:
        """Compute the sequence's next tokens, up to `end`; blocks for them are there."""
        sequence = request.sequence
        start = sequence.num_computed_tokens
        new_blocks = self.blocks.grow(sequence, end)
        self.counters.num_computed_tokens += end - start
        self.counters.num_recomputed_tokens += max(
            0, min(end, sequence.max_computed_tokens) - start
        )
        step.scheduled.append(
            ScheduledSequence(
                key=sequence.key,
                start=start,
                end=end,
                logits_start=min(max(start, request.first_wanted_logits), end),
                reset=not sequence.known_to_workers,
                new_token_ids=sequence.token_ids[sequence.num_sent_tokens :],
                new_block_ids=sequence.block_table[sequence.num_sent_blocks :],
                full_logits=request.full_logits,
            )
        )
        sequence.known_to_workers = True
        sequence.num_sent_tokens = sequence.num_tokens
        sequence.num_sent_blocks = len(sequence.block_table)
        if self.observer is not None:
            if new_blocks:
                self.observer.blocks_allocated(step.step_id, sequence.key, new_blocks, 0)
            self.observer.scheduled(step.step_id, sequence.key, start, end)

    def _state_check(self, step: SchedulerOutput) -> StateCheck:
        """What the workers must know after the step; taken from the sequences, not the deltas."""
        scheduled = [
            self.requests[item.key.request_id].sequences[item.key.branch] for item in step.scheduled
        ]
        return StateCheck(
            num_sequences=sum(sequence.known_to_workers for sequence in self._sequences()),
            checksums=[
                state_checksum(sequence.token_ids, sequence.block_table) for sequence in scheduled
            ],
        )

    # Losing blocks ------------------------------------------------------------------------------

    def _take_forced(self, step_id: int) -> list[str]:
        wanted, self._forced = self._forced, {}
        if self.controller is not None:
            wanted.update(dict.fromkeys(self.controller.select_victims(step_id, self.running)))
        running = {request.request_id for request in self.running}
        return [request_id for request_id in wanted if request_id in running]

    def _preempt(self, step: SchedulerOutput, request: Request, reason: str) -> None:
        """Preemption by recompute: blocks go, tokens stay, the request waits in its old place."""
        if self.observer is not None:
            self.observer.preempted(
                step.step_id,
                request.request_id,
                mode="recompute",
                phase=self._phase(request),
                reason=reason,
                num_computed_tokens=request.sequence.num_computed_tokens,
                num_tokens=request.sequence.num_tokens,
            )
        self._free_blocks(step.step_id, request)
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.push(request)

    def _phase(self, request: Request) -> str:
        """What a running request is doing, as reported when it is preempted.

        The last chunk is next when what remains fits the whole budget of one step.
        """
        if request.num_preemptions and request.num_steps_since_admission <= 1:
            return "just_resumed"
        remaining = request.num_prefill_tokens - request.sequence.num_computed_tokens
        if remaining > self.config.max_num_batched_tokens:
            return "prefill_first" if request.num_chunks <= 1 else "prefill_middle"
        if remaining > 0:
            return "prefill_last"
        return "first_decode" if request.sequence.num_output_tokens == 1 else "decode"

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free_blocks(self.next_step_id - 1, request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _free_blocks(self, step_id: int, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.block_table and self.observer is not None:
                self.observer.blocks_freed(step_id, sequence.key, list(sequence.block_table))
            if sequence.known_to_workers:
                self._dropped.append(sequence.key)
            self.blocks.free(sequence, self._step_in_flight)
            sequence.forget_cache()

    # Looking ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that blocks, references, queues and progress agree with each other."""
        self.blocks.check_integrity(self._sequences())
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
        for request in self.waiting.in_order():
            assert request.status is RequestStatus.WAITING
            assert not any(sequence.block_table for sequence in request.sequences)
        assert len(self.running) + len(self.waiting) == len(self.requests)

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
            ref_counts={block: count for block, count in enumerate(blocks.ref_counts) if count},
            tables={
                sequence.key: list(sequence.block_table)
                for sequence in self._sequences()
                if sequence.block_table
            },
            waiting=[request.request_id for request in self.waiting.in_order()],
            running=[request.request_id for request in self.running],
            counters=asdict(self.counters),
        )

    def _sequences(self) -> Iterable[Sequence]:
        for request in self.requests.values():
            yield from request.sequences
