"""Watches transformers' continuous batching from inside: wraps its methods, changes none of them.

Every wrapper calls the original and reports what it saw. The scheduler's view comes from scheduler,
cache and offloading manager; the worker's from the keyword arguments of the model's forward call,
which are what the attention layers write and read by (`transformers_cb_forward.py`).

Block ids of the record start at 0: the engine's first two sectors are trash that no request gets.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from preempt_harness import record
from preempt_harness.adapters.transformers_cb_forward import ForwardView
from preempt_harness.adapters.transformers_cb_names import finish_reason, sequence_name
from preempt_harness.record import AnyEvent
from preempt_harness.workload import RequestSpec

if TYPE_CHECKING:
    from torch import nn

EVENT_NAMES = (
    "Arrived",
    "Scheduled",
    "BlocksAllocated",
    "BlocksReplaced",
    "BlocksFreed",
    "BlocksCopied",
    "Forked",
    "SwappedOut",
    "SwappedIn",
    "Preempted",
    "Resumed",
    "Finished",
    "Aborted",
    "PoolCounts",
    "PoolState",
    "StepLaunched",
    "StepDone",
    "Computed",
    "WorkerCopied",
    "WorkerSwappedOut",
    "WorkerSwappedIn",
    "TokensDelivered",
)


@dataclass(slots=True)
class _Stay:
    """One sequence since it was last admitted."""

    num_steps: int = 0
    num_chunks: int = 0
    is_return: bool = False


class BatchObserver:
    """Events of one batch processor.

    Args:
        processor: transformers' `ContinuousBatchProcessor`, with one full-attention cache.
        model: whose forward calls it makes.

    Attributes:
        step: number of the step that runs, or runs next.
        forcing: a preemption comes from the harness.
        requests: what was submitted, by name.
        aborted: what the engine had generated for those that it cancelled.
        sink: takes the events before each forward pass, if set.
    """

    def __init__(self, processor: Any, model: nn.Module) -> None:
        self.step = 0
        self.forcing = False
        self.requests: dict[str, RequestSpec] = {}
        self.aborted: dict[str, Any] = {}
        self.sink: Callable[[Sequence[AnyEvent]], None] | None = None
        self._processor = processor
        (self._allocator,) = processor.cache.cache_allocators.values()
        pool = processor.cache.pool
        self._first_block: int = pool.num_reserved_sectors * self._allocator.blocks_per_sector
        self._events: deque[AnyEvent] = deque()
        self._stays: dict[str, _Stay] = {}
        self._entering: list[str] = []  # on their way to the scheduler
        self._lock = threading.Lock()
        self._away: set[str] = set()
        self._num_delivered: Counter[str] = Counter()
        self._num_ended: Counter[str] = Counter()
        self._held_back: list[AnyEvent] = []  # of an offload whose mode is not known yet
        self._swapped: set[str] = set()
        self._is_scheduled = False
        self._has_changed = False
        self._wrap_all()
        self._forward = ForwardView(self, processor, model, self._first_block)

    def enter(self, request: RequestSpec) -> None:
        """A request is about to be handed to the engine, perhaps by another thread than its own."""
        with self._lock:
            self.requests[request.id] = request
            self._entering.append(request.id)
            self.emit(
                record.Arrived(
                    self.step, request.id, request.prompt_token_ids, request.sampling.max_tokens
                )
            )

    def emit(self, event: AnyEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._has_changed = True

    def take_events(self) -> list[AnyEvent]:
        """Everything since the last call; another thread may go on adding."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def detach(self) -> None:
        """Leave the model alone; it is used by the next session."""
        self._forward.detach()

    def hand_over(self) -> None:
        """A step is about to be launched, which may kill this process."""
        if self.sink is not None:
            self.sink(self.take_events())

    def end_step(self) -> None:
        """The step is over."""
        if self._has_changed:
            self.record_pool()
        self.step += 1
        self._is_scheduled = False

    # Wrapping -----------------------------------------------------------------------------------

    def _wrap_all(self) -> None:
        processor = self._processor
        cache, scheduler = processor.cache, processor.scheduler
        self._wrap(scheduler, "schedule_batch", self._schedule_batch)
        self._wrap(scheduler, "add_waiting_request", self._take_in)
        self._wrap(scheduler, "clear_cancelled_requests", self._cancel)
        self._wrap(processor.output_router, "deliver", self._deliver)
        self._wrap(processor.output_router, "deliver_batch", self._deliver_batch)
        self._wrap(cache, "free_blocks", self._release)
        self._wrap(processor.offloading_manager, "offload_requests", self._offload)
        self._wrap(processor.offloading_manager, "_offload_to_cpu", self._swap_out)
        self._wrap(processor.offloading_manager, "restore_scheduled_requests", self._swap_in)
        self._wrap(cache, "perform_cache_copy", self._copy)
        self._wrap(self._allocator, "allocate_cache_to_request", self._allocate)
        self._wrap(self._allocator, "acquire_prefix_blocks", self._share)
        self._wrap(self._allocator, "mark_complete_blocks", self._deduplicate)
        self._wrap(self._allocator, "fork_blocks", self._fork)
        self._wrap(self._allocator, "free_blocks", self._free)

    @staticmethod
    def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    # Scheduler ----------------------------------------------------------------------------------

    def _schedule_batch(self, original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        for future in result[0] or ():
            state = future.state
            start = state.position_offset
            stay = self._stays.setdefault(state.request_id, _Stay())
            stay.num_steps += 1
            stay.num_chunks += start < len(state.initial_tokens)
            self.emit(
                record.Scheduled(
                    step=self.step,
                    seq=sequence_name(state.request_id),
                    start=start,
                    end=start + future.query_length,
                )
            )
        self._is_scheduled = bool(result[0])
        return result

    def _take_in(self, original: Callable[..., None], state: Any) -> None:
        original(state)
        if state.request_id in self._entering:
            with self._lock:
                self._entering.remove(state.request_id)

    def _release(self, original: Callable[..., Any], engine_id: str, no_cache: bool = False) -> Any:
        """Only an offload gives blocks up uncached: its victim keeps its place in a queue."""
        table = self._allocator.block_table.get(engine_id)
        if no_cache and table:
            state = self._processor.scheduler.active_requests[engine_id]
            self._held_back.append(self._preempted(state))
            self._away.add(engine_id)
        return original(engine_id, no_cache)

    def _offload(self, original: Callable[..., bool]) -> bool:
        """Which of the victims were swapped out is known when all have given up their blocks."""
        self._swapped.clear()
        try:
            return original()
        finally:
            events, self._held_back = self._held_back, []
            for event in events:
                if isinstance(event, record.Preempted) and event.seq in self._swapped:
                    event = msgspec.structs.replace(event, mode="swap")
                self.emit(event)

    def _swap_out(
        self, original: Callable[..., set[str]], victims: list[Any], tables: dict[str, Any]
    ) -> set[str]:
        swapped = original(victims, tables)
        host = self._processor.offloading_manager._request_id_to_cpu_blocks
        for engine_id in sorted(swapped):
            (device,), (cpu,) = tables[engine_id].values(), host[engine_id].values()
            seq, step = sequence_name(engine_id), self._step_of_change()
            self._swapped.add(seq)
            pairs = list(zip(device, cpu, strict=True))
            copied = [pair for pair in pairs if self._is_equal(*pair)]
            request = seq.rpartition(".")[0]
            self._held_back += [
                record.SwappedOut(step, request, self._device_first(pairs)),
                record.WorkerSwappedOut(step, 0, self._device_first(copied)),
            ]
        return swapped

    def _swap_in(self, original: Callable[..., None], batch: list[Any]) -> None:
        host = self._processor.offloading_manager._request_id_to_cpu_blocks
        back = {
            future.state.request_id: next(iter(host[future.state.request_id].values()))
            for future in batch
            if future.state.is_cpu_offloaded
        }
        original(batch)
        for engine_id, cpu in back.items():
            # Blocks for what is new have nothing to come back.
            pairs = list(zip(self._allocator.block_table[engine_id], cpu, strict=False))
            copied = [pair for pair in pairs if self._is_equal(*pair)]
            request = sequence_name(engine_id).rpartition(".")[0]
            swap = [(host, device) for device, host in self._device_first(pairs)]
            self.emit(record.SwappedIn(self.step, request, swap))
            swap = [(host, device) for device, host in self._device_first(copied)]
            self.emit(record.WorkerSwappedIn(self.step, 0, swap))

    def _is_equal(self, device: int, cpu: int) -> bool:
        """Whether a block was really copied: the bytes on both sides are the same."""
        manager = self._processor.offloading_manager
        if manager._compute_stream is not None:
            manager._compute_stream.synchronize()
        (view,) = manager._cpu_views.values()
        return bool((self._allocator._copy_view[device].cpu() == view[cpu]).all())

    def _device_first(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(device - self._first_block, cpu) for device, cpu in pairs]

    def _preempted(self, state: Any) -> AnyEvent:
        seq = sequence_name(state.request_id)
        return record.Preempted(
            step=self._step_of_change(),
            request=seq.rpartition(".")[0],
            mode="recompute",
            phase=self._phase(state),
            reason="forced" if self.forcing else "out_of_blocks",
            num_computed_tokens=state.position_offset,
            num_tokens=len(state.initial_tokens) + len(state.generated_tokens),
            seq=seq,
        )

    def _step_of_change(self) -> int:
        """Once a batch is scheduled, victims are taken for the sake of the next one."""
        return self.step + self._is_scheduled

    def _phase(self, state: Any) -> str:
        stay = self._stays.get(state.request_id, _Stay())
        if stay.is_return and stay.num_steps <= 1:
            return "just_resumed"
        num_left = len(state.initial_tokens) - state.position_offset
        if num_left > self._processor.max_batch_tokens:
            return "prefill_first" if stay.num_chunks <= 1 else "prefill_middle"
        if num_left > 0:
            return "prefill_last"
        num_prompt = state._true_initial_tokens or len(state.initial_tokens)
        num_outputs = len(state.initial_tokens) - num_prompt + len(state.generated_tokens)
        return "first_decode" if num_outputs == 1 else "decode"

    # Blocks -------------------------------------------------------------------------------------

    def _ids(self, blocks: Sequence[int]) -> list[int]:
        return [block - self._first_block for block in blocks]

    def _admit(self, engine_id: str, num_cached_tokens: int) -> None:
        """A sequence gets its first blocks."""
        self._stays[engine_id] = _Stay(is_return=engine_id in self._away)
        if engine_id in self._away:
            self._away.discard(engine_id)
            seq = sequence_name(engine_id)
            request = seq.rpartition(".")[0]
            self.emit(record.Resumed(self.step, request, num_cached_tokens, seq))

    def _allocate(
        self, original: Callable[..., Any], engine_id: str, past: int, length: int
    ) -> None:
        before = len(self._allocator.block_table.get(engine_id, ()))
        if not before:
            self._admit(engine_id, 0)
        original(engine_id, past, length)
        new = self._allocator.block_table[engine_id][before:]
        if new:
            seq = sequence_name(engine_id)
            self.emit(record.BlocksAllocated(self.step, seq, self._ids(new)))

    def _share(
        self, original: Callable[..., Any], engine_id: str, prefix: int, blocks: list[int]
    ) -> None:
        self._admit(engine_id, prefix)
        original(engine_id, prefix, blocks)
        shared = self._ids(self._allocator.block_table[engine_id])
        seq = sequence_name(engine_id)
        self.emit(record.BlocksAllocated(self.step, seq, shared, num_cached=len(shared)))

    def _deduplicate(self, original: Callable[..., Any], engine_id: str, *args: Any) -> None:
        """A block whose content is in the cache already is given up for the one there."""
        before = list(self._allocator.block_table[engine_id])
        original(engine_id, *args)
        after = self._allocator.block_table[engine_id]
        changed = [index for index, block in enumerate(before) if after[index] != block]
        if changed:
            self.emit(
                record.BlocksReplaced(
                    step=self.step,
                    seq=sequence_name(engine_id),
                    indices=changed,
                    blocks=self._ids([after[index] for index in changed]),
                )
            )

    def _fork(self, original: Callable[..., Any], source: str, target: str, past: int) -> Any:
        copied, fresh = original(source, target, past)
        parent, child = sequence_name(source), sequence_name(target)
        self._stays[target] = _Stay()
        self.emit(record.Forked(self.step, parent, child))
        if fresh:
            self.emit(record.BlocksAllocated(self.step, child, self._ids(fresh)))
            self.emit(record.BlocksFreed(self.step, child, self._ids(copied)))
        return copied, fresh

    def _copy(self, original: Callable[..., Any], pairs_of: dict[str, Any]) -> None:
        """Copies are made after the step that forked, and belong to the next."""
        for sources, targets in pairs_of.values():
            pairs = list(zip(self._ids(sources), self._ids(targets), strict=True))
            if pairs:
                self.emit(record.BlocksCopied(self.step + 1, pairs))
                self.emit(record.WorkerCopied(self.step + 1, 0, pairs))
        original(pairs_of)

    def _free(self, original: Callable[..., Any], engine_id: str, no_cache: bool = False) -> None:
        blocks = list(self._allocator.block_table.get(engine_id, ()))
        original(engine_id, no_cache)
        if blocks:
            step = self._step_of_change() if no_cache else self.step
            freed = record.BlocksFreed(step, sequence_name(engine_id), self._ids(blocks))
            if no_cache:
                self._held_back.append(freed)
            else:
                self.emit(freed)

    def record_pool(self) -> None:
        """Sizes and raw content of the pool and the queues."""
        with self._lock:
            self._record_pool()

    def _record_pool(self) -> None:
        pool, allocator = self._processor.cache.pool, self._allocator
        scheduler = self._processor.scheduler
        free = _free_blocks(pool, allocator.blocks_per_sector)
        cached = list(allocator.ledger.cached_blocks)
        tables = {sequence_name(key): self._ids(t) for key, t in allocator.block_table.items() if t}
        used = {block for table in allocator.block_table.values() for block in table}
        shared, first = allocator.ledger.shared_ref_counts, self._first_block
        waiting = [*self._entering, *_requests(scheduler.waiting_requests)]
        running = _requests(scheduler.active_requests)
        self.emit(
            record.PoolCounts(
                self.step, allocator.num_blocks, len(free), len(cached), used=len(used)
            )
        )
        self.emit(
            record.PoolState(
                step=self.step,
                num_blocks=allocator.num_blocks,
                free=self._ids(free),
                cached=self._ids(cached),
                held=[],
                fenced=[],
                ref_counts=[
                    shared.get(block, 1) if block in used else 0
                    for block in range(first, first + allocator.num_blocks)
                ],
                tables=tables,
                waiting=[name for name in waiting if name not in running],
                running=running,
                **self._host_state(),
            )
        )
        self._has_changed = False

    def _host_state(self) -> dict[str, Any]:
        """Raw content of the swap space."""
        manager = self._processor.offloading_manager
        pool = manager._cpu_pool
        if pool is None:
            return {}
        per_sector = self._allocator.blocks_per_sector
        host_blocks: dict[str, list[int]] = {}
        for engine_id, blocks in manager._request_id_to_cpu_blocks.items():
            request = sequence_name(engine_id).rpartition(".")[0]
            host_blocks.setdefault(request, []).extend(*blocks.values())
        return {
            "num_host_blocks": pool.num_sectors * per_sector,
            "host_free": _free_blocks(pool, per_sector),
            "host_blocks": host_blocks,
        }

    # Delivery -----------------------------------------------------------------------------------

    def _deliver(self, original: Callable[..., None], output: Any) -> None:
        self._report(output)
        original(output)

    def _deliver_batch(self, original: Callable[..., None], outputs: list[Any]) -> None:
        for output in outputs:
            self._report(output)
        original(outputs)

    def _report(self, output: Any) -> None:
        """Every output has all tokens of its sequence: what is new is what reaches the user."""
        seq = sequence_name(output.request_id)
        request = seq.rpartition(".")[0]
        seen = self._num_delivered[seq]
        new = output.generated_tokens[seen:]
        spec = self.requests[request]
        if new:
            self._num_delivered[seq] += len(new)
            logprobs = self.logprobs_of(output, spec)
            self.emit(
                record.TokensDelivered(
                    self.step, seq, list(new), None if logprobs is None else logprobs[seen:]
                )
            )
        if output.is_finished():
            self._num_ended[request] += 1
            if self._num_ended[request] == spec.sampling.n:
                self.emit(record.Finished(self.step, request, finish_reason(output, spec)))

    def logprobs_of(self, output: Any, spec: RequestSpec) -> list[dict[int, float]] | None:
        """Log probabilities of an output so far, None if none were asked for.

        The engine hands over those of the chosen tokens. Where more are asked for, the others are
        read from what the model gave in the same step.
        """
        wanted = spec.sampling.logprobs
        if wanted is None:
            return None
        own: list[dict[int, float]] = [
            {token_id: logprob}
            for token_id, logprob in zip(output.generated_tokens, output.logprobs, strict=False)
        ]
        if wanted > 1:
            best = self._forward.best.get(output.request_id, [])
            own = [seen | entry for seen, entry in zip(best, own, strict=False)]
        return own

    def _cancel(self, original: Callable[..., list[Any]]) -> list[Any]:
        """The engine hands nothing over for a request that it cancels."""
        states = original()
        for state in states:
            request = sequence_name(state.request_id).rpartition(".")[0]
            if request not in self.aborted:
                self.emit(record.Aborted(self.step, request))
            self.aborted.setdefault(request, []).append(state.to_generation_output())
        return states


def _free_blocks(pool: Any, per_sector: int) -> list[int]:
    """Blocks of a pool that nobody has: of free sectors, and free ones of others."""
    sectors = [
        range(sector * per_sector, (sector + 1) * per_sector) for sector in pool.free_sectors
    ]
    single = pool._free_blocks[0].trees.values()
    return [block for blocks in (*sectors, *single) for block in blocks]


def _requests(engine_ids_: Any) -> list[str]:
    """Requests of a queue, each once: the engine queues every output for itself."""
    return list(dict.fromkeys(sequence_name(key).rpartition(".")[0] for key in engine_ids_))
