"""Watches transformers' continuous batching from inside: wraps its methods, changes none of them.

Every wrapper calls the original and reports what it saw. The scheduler's view comes from scheduler,
cache and offloading manager; the worker's from the keyword arguments of the model's forward call,
which are what the attention layers write and read by (`transformers_cb_forward`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from preempt_harness import record
from preempt_harness.adapters.listening import wrap
from preempt_harness.adapters.transformers_cb_delivery import DeliveryView
from preempt_harness.adapters.transformers_cb_forward import ForwardView
from preempt_harness.adapters.transformers_cb_log import BatchLog
from preempt_harness.adapters.transformers_cb_names import sequence_name
from preempt_harness.adapters.transformers_cb_offloads import OffloadView
from preempt_harness.adapters.transformers_cb_pool import PoolView
from preempt_harness.adapters.transformers_cb_stays import Stays

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


class BatchObserver:
    """Events of one batch processor; what is scheduled and allocated is watched here.

    Args:
        processor: transformers' `ContinuousBatchProcessor`, with one full-attention cache.
        model: whose forward calls it makes.

    Attributes:
        log: the events.
        pool: reads the pool.
        stays: knows who is admitted.
        delivery: knows what users have got.
    """

    def __init__(self, processor: Any, model: nn.Module) -> None:
        self.log = BatchLog()
        self.pool = PoolView(processor, self.log)
        self.stays = Stays(self.log, processor.max_batch_tokens)
        self._allocator = self.pool.allocator
        OffloadView(processor, self.log, self.pool, self.stays)  # lives on in what it wraps
        self._forward = ForwardView(self.log, processor, model, self.pool.first_block)
        self.delivery = DeliveryView(processor, self.log, self._forward.best)
        wrap(processor.scheduler, "schedule_batch", self._schedule_batch)
        wrap(processor.scheduler, "add_waiting_request", self._take_in)
        wrap(processor.cache, "perform_cache_copy", self._copy)
        wrap(self._allocator, "allocate_cache_to_request", self._allocate)
        wrap(self._allocator, "acquire_prefix_blocks", self._share)
        wrap(self._allocator, "mark_complete_blocks", self._deduplicate)
        wrap(self._allocator, "fork_blocks", self._fork)

    def detach(self) -> None:
        """Leave the model alone; it is used by the next session."""
        self._forward.detach()

    def end_step(self) -> None:
        """The step is over."""
        if self.log.has_changed:
            self.pool.record()
        self.log.step += 1
        self.log.is_scheduled = False

    # Scheduler ----------------------------------------------------------------------------------

    def _schedule_batch(self, original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        for future in result[0] or ():
            self.stays.scheduled(future.state, future.query_length)
        self.log.is_scheduled = bool(result[0])
        return result

    def _take_in(self, original: Callable[..., None], state: Any) -> None:
        original(state)
        self.log.entered(state.request_id)

    # Blocks -------------------------------------------------------------------------------------

    def _allocate(
        self, original: Callable[..., Any], engine_id: str, past: int, length: int
    ) -> None:
        before = len(self._allocator.block_table.get(engine_id, ()))
        if not before:
            self.stays.admitted(engine_id, 0)
        original(engine_id, past, length)
        new = self._allocator.block_table[engine_id][before:]
        if new:
            seq = sequence_name(engine_id)
            self.log.emit(record.BlocksAllocated(self.log.step, seq, self.pool.ids(new)))

    def _share(
        self, original: Callable[..., Any], engine_id: str, prefix: int, blocks: list[int]
    ) -> None:
        self.stays.admitted(engine_id, prefix)
        original(engine_id, prefix, blocks)
        shared = self.pool.ids(self._allocator.block_table[engine_id])
        seq = sequence_name(engine_id)
        self.log.emit(record.BlocksAllocated(self.log.step, seq, shared, num_cached=len(shared)))

    def _deduplicate(self, original: Callable[..., Any], engine_id: str, *args: Any) -> None:
        """A block whose content is in the cache already is given up for the one there."""
        before = list(self._allocator.block_table[engine_id])
        original(engine_id, *args)
        after = self._allocator.block_table[engine_id]
        changed = [index for index, block in enumerate(before) if after[index] != block]
        if changed:
            self.log.emit(
                record.BlocksReplaced(
                    step=self.log.step,
                    seq=sequence_name(engine_id),
                    indices=changed,
                    blocks=self.pool.ids([after[index] for index in changed]),
                )
            )

    def _fork(self, original: Callable[..., Any], source: str, target: str, past: int) -> Any:
        copied, fresh = original(source, target, past)
        parent, child = sequence_name(source), sequence_name(target)
        step, ids = self.log.step, self.pool.ids
        self.stays.forked(target)
        self.log.emit(record.Forked(step, parent, child))
        if fresh:
            self.log.emit(record.BlocksAllocated(step, child, ids(fresh)))
            self.log.emit(record.BlocksFreed(step, child, ids(copied)))
        return copied, fresh

    def _copy(self, original: Callable[..., Any], pairs_of: dict[str, Any]) -> None:
        """Copies are made after the step that forked, and belong to the next."""
        for sources, targets in pairs_of.values():
            pairs = list(zip(self.pool.ids(sources), self.pool.ids(targets), strict=True))
            if pairs:
                self.log.emit(record.BlocksCopied(self.log.step + 1, pairs))
                self.log.emit(record.WorkerCopied(self.log.step + 1, 0, pairs))
        original(pairs_of)
