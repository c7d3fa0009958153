"""Watches vLLM's scheduler and block pool: what they decide becomes events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.listening import wrap
from preempt_harness.adapters.scheduler_log import Log


class SchedulerWatch:
    """Listens to the methods that change block tables; holds blocks back from the pool.

    Args:
        scheduler: vLLM's.
        log: takes the events.

    Attributes:
        reason: why the next preemption happens.
        counted_from: request -> step of its last preemption.
    """

    def __init__(self, scheduler: Any, log: Log) -> None:
        self.reason = "out_of_blocks"
        self.counted_from: dict[str, int] = {}
        self._scheduler = scheduler
        self._kv = scheduler.kv_cache_manager
        self._pool = self._kv.block_pool
        self._log = log
        self._held: list[Any] = []
        self._num_found = 0
        wrap(scheduler, "_preempt_request", self._preempt)
        wrap(self._kv, "allocate_slots", self._allocate)
        wrap(self._kv, "free", self._free)

    @property
    def num_held(self) -> int:
        """Blocks that are kept from the engine, the null block not counted."""
        return len(self._held)

    def hold_blocks(self, num_blocks: int) -> int:
        """Take free blocks from the pool, or give them back; returns how many are held."""
        missing = min(num_blocks - len(self._held), self._pool.get_num_free_blocks())
        if missing > 0:
            self._held += self._pool.get_new_blocks(missing)
        else:
            self._pool.free_blocks(self._held[num_blocks:])
            del self._held[num_blocks:]
        self._log.pool_changed = True
        return len(self._held)

    def record_pool(self) -> None:
        """Sizes every step; everything when somebody lost blocks or ended, and now and then."""
        pool, log, scheduler = self._pool, self._log, self._scheduler
        free = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
        cached = [block.block_id for block in free if block.block_hash is not None]
        held = [pool.null_block.block_id, *(block.block_id for block in self._held)]
        log.add(
            record.PoolCounts(
                step=log.step,
                num_blocks=pool.num_gpu_blocks,
                free=pool.get_num_free_blocks() - len(cached),
                cached=len(cached),
                used=pool.num_gpu_blocks - len(free) - len(held),
                held=len(held),
            )
        )
        if not log.pool_is_due:
            return
        queued = pool.free_block_queue.get_all_free_blocks()
        log.pool(
            num_blocks=pool.num_gpu_blocks,
            free=[block.block_id for block in queued if block.block_hash is None],
            cached=[block.block_id for block in queued if block.block_hash is not None],
            held=held,
            ref_counts={
                block.block_id: block.ref_cnt
                for block in pool.blocks
                if block.ref_cnt and block.block_id not in held
            },
            tables={name: self._table(name) for name in scheduler.requests},
            waiting=[
                request.request_id
                for queue in (scheduler.waiting, scheduler.kv_holding_waiting)
                for request in queue
            ],
            running=[request.request_id for request in scheduler.running],
        )
        num_running, num_waiting = scheduler.get_request_counts()
        num_own = pool.num_gpu_blocks - 1  # without the null block, as the engine counts
        values = {
            # What the engine has told so far, and what it will tell of steps under way.
            "num_cached_tokens": self._num_found + self._kv.prefix_cache_stats.hits,
            "num_running_requests": num_running,
            "num_used_blocks": round(scheduler.get_kv_cache_usage() * num_own),
            "num_waiting_requests": num_waiting,
        }
        log.add(record.Counters(log.step, values))

    def count(self, stats: Any) -> None:
        """Take in what the engine says of a step; its figures of the cache are since the last."""
        if stats is not None:
            self._num_found += stats.prefix_cache_stats.hits

    # Listeners ----------------------------------------------------------------------------------

    def _preempt(
        self, original: Callable[..., Any], request: Any, *rest: Any, **named: Any
    ) -> None:
        computed, total = request.num_computed_tokens, request.num_tokens
        self._log.preempted(request.request_id, self.reason, computed, total)
        self.counted_from[request.request_id] = self._log.step
        original(request, *rest, **named)

    def _allocate(
        self, original: Callable[..., Any], request: Any, *rest: Any, **named: Any
    ) -> Any:
        granted = original(request, *rest, **named)
        if granted is not None:
            hits = named.get("new_computed_blocks")
            num_cached = len(hits.blocks[0]) if hits is not None else 0
            self._log.holds(request.request_id, self._table(request.request_id), num_cached)
        return granted

    def _free(self, original: Callable[..., Any], request: Any) -> None:
        blocks = self._table(request.request_id)
        original(request)
        self._log.freed(request.request_id, blocks[::-1])

    def _table(self, name: str) -> list[int]:
        return list(self._kv.get_block_ids(name)[0])
