"""Preemptions of a batch processor: what its offloading manager drops, swaps out and swaps in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from preempt_harness import record
from preempt_harness.adapters.listening import wrap
from preempt_harness.adapters.transformers_cb_log import BatchLog
from preempt_harness.adapters.transformers_cb_names import request_name, sequence_name
from preempt_harness.adapters.transformers_cb_pool import PoolView
from preempt_harness.adapters.transformers_cb_stays import Stays
from preempt_harness.record import AnyEvent


class OffloadView:
    """Wraps the methods by which sequences lose their blocks before they have ended.

    Args:
        processor: transformers' `ContinuousBatchProcessor`.
        log: takes the events.
        pool: reads the processor's blocks.
        stays: makes the preemptions' events.
    """

    def __init__(self, processor: Any, log: BatchLog, pool: PoolView, stays: Stays) -> None:
        self._processor = processor
        self._manager = processor.offloading_manager
        self._log, self._pool, self._stays = log, pool, stays
        self._held_back: list[AnyEvent] = []  # of an offload whose mode is not known yet
        self._swapped: set[str] = set()
        wrap(processor.cache, "free_blocks", self._release)
        wrap(pool.allocator, "free_blocks", self._free)
        wrap(self._manager, "offload_requests", self._offload)
        wrap(self._manager, "_offload_to_cpu", self._swap_out)
        wrap(self._manager, "restore_scheduled_requests", self._swap_in)

    def _release(self, original: Callable[..., Any], engine_id: str, no_cache: bool = False) -> Any:
        """Only an offload gives blocks up uncached: its victim keeps its place in a queue."""
        if no_cache and self._pool.allocator.block_table.get(engine_id):
            state = self._processor.scheduler.active_requests[engine_id]
            self._held_back.append(self._stays.preempted(state))
        return original(engine_id, no_cache)

    def _free(self, original: Callable[..., Any], engine_id: str, no_cache: bool = False) -> None:
        blocks = list(self._pool.allocator.block_table.get(engine_id, ()))
        original(engine_id, no_cache)
        if not blocks:
            return
        step = self._log.step_of_change if no_cache else self._log.step
        freed = record.BlocksFreed(step, sequence_name(engine_id), self._pool.ids(blocks))
        if no_cache:
            self._held_back.append(freed)
        else:
            self._log.emit(freed)

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
                self._log.emit(event)

    def _swap_out(
        self, original: Callable[..., set[str]], victims: list[Any], tables: dict[str, Any]
    ) -> set[str]:
        swapped = original(victims, tables)
        host = self._manager._request_id_to_cpu_blocks
        for engine_id in sorted(swapped):
            (device,), (cpu,) = tables[engine_id].values(), host[engine_id].values()
            self._swapped.add(sequence_name(engine_id))
            pairs = list(zip(device, cpu, strict=True))
            copied = [pair for pair in pairs if self._is_equal(*pair)]
            step = self._log.step_of_change
            self._held_back += [
                record.SwappedOut(step, request_name(engine_id), self._device_first(pairs)),
                record.WorkerSwappedOut(step, 0, self._device_first(copied)),
            ]
        return swapped

    def _swap_in(self, original: Callable[..., None], batch: list[Any]) -> None:
        host = self._manager._request_id_to_cpu_blocks
        back = {
            future.state.request_id: next(iter(host[future.state.request_id].values()))
            for future in batch
            if future.state.is_cpu_offloaded
        }
        original(batch)
        for engine_id, cpu in back.items():
            # Blocks for what is new have nothing to come back.
            table = self._pool.allocator.block_table[engine_id]
            pairs = list(zip(table, cpu, strict=False))
            copied = [pair for pair in pairs if self._is_equal(*pair)]
            step = self._log.step
            swap = [(host, device) for device, host in self._device_first(pairs)]
            self._log.emit(record.SwappedIn(step, request_name(engine_id), swap))
            swap = [(host, device) for device, host in self._device_first(copied)]
            self._log.emit(record.WorkerSwappedIn(step, 0, swap))

    def _is_equal(self, device: int, cpu: int) -> bool:
        """Whether a block was really copied: the bytes on both sides are the same."""
        if self._manager._compute_stream is not None:
            self._manager._compute_stream.synchronize()
        (view,) = self._manager._cpu_views.values()
        return bool((self._pool.allocator._copy_view[device].cpu() == view[cpu]).all())

    def _device_first(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(device - self._pool.first_block, cpu) for device, cpu in pairs]
