"""Which requests are in the pool, and with which blocks. Carries out what the scheduler decides.

Owns every request that has not ended, the two queues, the account of what the workers are yet to be
told, and the counters of all of it. Decides nothing: who comes, who goes and what is computed is
the scheduler's business. Every change of hands is reported from here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from preempt_engine.admission import Placement, WaitingQueue, num_blocks_to_admit, place
from preempt_engine.block_manager import BlockManager
from preempt_engine.config import EngineConfig, PreemptionMode
from preempt_engine.counters import Counters
from preempt_engine.observer import EngineObserver
from preempt_engine.sequence import Request, RequestStatus, Sequence
from preempt_engine.step import SchedulerOutput, SequenceKey
from preempt_engine.swapping import Swapper

_precedence = attrgetter("precedence")


class Residency:
    """Requests and their blocks.

    Args:
        config: of the engine.
        num_blocks: size of the pool.
        num_host_blocks: size of the swap space.

    Attributes:
        requests: all that have not ended, by id.
        waiting: those without blocks of the pool, swapped ones among them.
        running: the others, in order of precedence.
        num_watermark_blocks: to be left free when somebody is let in beside others.
        observer: is told what changes, if there is one.
        next_step_id: number of the next step to be decided.
        step_in_flight: the latest step that may touch blocks and is not done, or None.
        forks, dropped: what the workers hear of with the next step.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int) -> None:
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
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.counters = Counters()
        self.observer: EngineObserver | None = None
        self.next_step_id = 0
        self.step_in_flight: int | None = None
        self.forks: list[tuple[SequenceKey, SequenceKey]] = []
        self.dropped: list[SequenceKey] = []

    def sequences(self) -> Iterable[Sequence]:
        """Every sequence of every request."""
        for request in self.requests.values():
            yield from request.sequences.values()

    # Coming -------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """The request joins the queue."""
        self.requests[request.request_id] = request
        self.waiting.push(request)
        self.report_arrival(request)

    def report_arrival(self, request: Request) -> None:
        if self.observer is not None:
            self.observer.arrived(
                self.next_step_id,
                request.request_id,
                request.sequence.token_ids,
                request.params.max_tokens,
                request.priority,
            )

    def set_priority(self, request: Request, priority: int) -> None:
        """Give the request another place, in the queue or among those that run."""
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

    def run(self, request: Request) -> None:
        """The head of the queue has its blocks, and runs."""
        self.waiting.pop()
        insort(self.running, request, key=_precedence)
        request.status = RequestStatus.RUNNING
        for sequence in request.sequences.values():
            sequence.num_steps_since_admission = 0

    def find_room(self, step: SchedulerOutput, request: Request, num_available: int) -> bool:
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
            leader.followers = (*leader.followers, (sequence, num_tokens))
            sequence.follows = True
        num_shared = len(sequence.block_table)
        self.blocks.grow(sequence, sequence.num_tokens)
        sequence.num_prefill_tokens = sequence.num_tokens
        sequence.num_chunks = 0
        if self.observer is not None:
            self.observer.blocks_allocated(
                step.step_id, sequence.key, sequence.block_table, num_shared
            )

    def swap_in(self, step: SchedulerOutput, request: Request) -> None:
        """Give a swapped request blocks of the pool again; not in the step that copies it out."""
        pairs, num_shared = self.swapper.swap_in(request, step.step_id)
        assert {host for host, _ in pairs}.isdisjoint(host for _, host in step.swap_out), request
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

    # Staying ------------------------------------------------------------------------------------

    def extend_table(self, step: SchedulerOutput, sequence: Sequence, end: int) -> None:
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

    def tell_workers(self, step: SchedulerOutput) -> None:
        """Put into the step what the workers must hear of."""
        step.forks, self.forks = self.forks, []
        step.dropped, self.dropped = self.dropped, []
        step.poison_block_ids = self.blocks.take_blocks_to_poison()

    def pass_fence(self, step_id: int) -> None:
        """The step is done: what waited for it is free."""
        self.blocks.pass_fence(step_id)
        self.swapper.host.pass_fence(step_id)

    # Going --------------------------------------------------------------------------------------

    def preempt(
        self, step: SchedulerOutput, request: Request, reason: str, mode: PreemptionMode
    ) -> None:
        """Blocks go, tokens stay, the request waits in its old place.

        Args:
            reason: as it is reported.
            mode: where there is no room, or nothing, to swap out, the request is recomputed.
        """
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
            fence = step.step_id if step.swap_out else self.step_in_flight
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

    def leave(self, request: Request) -> None:
        """The request has ended, however it did."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        for sequence in request.sequences.values():
            self._free_blocks(self.next_step_id - 1, sequence, self.step_in_flight)
        self.swapper.discard(request, self.step_in_flight)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def drop(self, request: Request, sequence: Sequence) -> None:
        """One of the request's sequences has ended; the others go on."""
        self._free_blocks(self.next_step_id - 1, sequence, self.step_in_flight)
        del request.sequences[sequence.key.branch]
        request.sequence = next(iter(request.sequences.values()), sequence)

    def _free_blocks(self, step_id: int, sequence: Sequence, step_in_flight: int | None) -> None:
        if sequence.block_table and self.observer is not None:
            self.observer.blocks_freed(step_id, sequence.key, list(sequence.block_table))
        if sequence.known_to_workers:
            self.dropped.append(sequence.key)
        self.counters.num_rejected_tokens += sequence.num_unverified_tokens
        self.blocks.free(sequence, step_in_flight)
        sequence.forget_cache()
