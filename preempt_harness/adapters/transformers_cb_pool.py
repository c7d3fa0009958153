"""Sizes and raw content of the block pool, the swap space and the queues of a batch processor.

Block ids of the record start at 0: the engine's first two sectors are trash that no request gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.transformers_cb_log import BatchLog
from preempt_harness.adapters.transformers_cb_names import request_name, sequence_name


class PoolView:
    """Reads the pool of a batch processor with one full-attention cache.

    Args:
        processor: transformers' `ContinuousBatchProcessor`.
        log: takes the events.

    Attributes:
        first_block: the engine's id of the first block that a request can get.
        allocator: of the cache.
    """

    def __init__(self, processor: Any, log: BatchLog) -> None:
        self._processor = processor
        self._log = log
        (self.allocator,) = processor.cache.cache_allocators.values()
        pool = processor.cache.pool
        self.first_block: int = pool.num_reserved_sectors * self.allocator.blocks_per_sector

    def ids(self, blocks: Sequence[int]) -> list[int]:
        """The record's ids of the engine's blocks."""
        return [block - self.first_block for block in blocks]

    def record(self) -> None:
        """Sizes and raw content of the pool and the queues."""
        with self._log.lock:
            self._record()

    def _record(self) -> None:
        pool, allocator = self._processor.cache.pool, self.allocator
        scheduler, log = self._processor.scheduler, self._log
        free = _free_blocks(pool, allocator.blocks_per_sector)
        cached = list(allocator.ledger.cached_blocks)
        tables = {sequence_name(key): self.ids(t) for key, t in allocator.block_table.items() if t}
        used = {block for table in allocator.block_table.values() for block in table}
        shared, first = allocator.ledger.shared_ref_counts, self.first_block
        waiting = [*log.entering, *_requests(scheduler.waiting_requests)]
        running = _requests(scheduler.active_requests)
        log.emit(
            record.PoolCounts(
                log.step, allocator.num_blocks, len(free), len(cached), used=len(used)
            )
        )
        log.emit(
            record.PoolState(
                step=log.step,
                num_blocks=allocator.num_blocks,
                free=self.ids(free),
                cached=self.ids(cached),
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
        log.has_changed = False

    def _host_state(self) -> dict[str, Any]:
        """Raw content of the swap space."""
        manager = self._processor.offloading_manager
        pool = manager._cpu_pool
        if pool is None:
            return {}
        per_sector = self.allocator.blocks_per_sector
        host_blocks: dict[str, list[int]] = {}
        for engine_id, blocks in manager._request_id_to_cpu_blocks.items():
            host_blocks.setdefault(request_name(engine_id), []).extend(*blocks.values())
        return {
            "num_host_blocks": pool.num_sectors * per_sector,
            "host_free": _free_blocks(pool, per_sector),
            "host_blocks": host_blocks,
        }


def _free_blocks(pool: Any, per_sector: int) -> list[int]:
    """Blocks of a pool that nobody has: of free sectors, and free ones of others."""
    sectors = [
        range(sector * per_sector, (sector + 1) * per_sector) for sector in pool.free_sectors
    ]
    single = pool._free_blocks[0].trees.values()
    return [block for blocks in (*sectors, *single) for block in blocks]


def _requests(engine_ids: Iterable[str]) -> list[str]:
    """Requests of a queue, each once: the engine queues every output for itself."""
    return list(dict.fromkeys(map(request_name, engine_ids)))
