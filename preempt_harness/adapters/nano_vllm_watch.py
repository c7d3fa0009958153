"""Watches nano-vllm's scheduler and block manager: what they decide becomes events."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.listening import wrap
from preempt_harness.adapters.scheduler_log import Log


class SchedulerWatch:
    """Listens to the methods that change block tables; holds blocks back from the pool.

    Args:
        scheduler: the engine's.
        log: takes the events.
        block_size: tokens per block.
        name_of: the engine's sequence -> request.
        is_running: whether the engine says that a sequence decodes.
        deliver: called with a sequence that has ended, before it gives up its blocks.

    Attributes:
        reason: why the next preemption happens.
    """

    def __init__(
        self,
        scheduler: Any,
        log: Log,
        block_size: int,
        *,
        name_of: Callable[[Any], str],
        is_running: Callable[[Any], bool],
        deliver: Callable[[Any], None],
    ) -> None:
        self.reason = "out_of_blocks"
        self._scheduler = scheduler
        self._pool = scheduler.block_manager
        self._log = log
        self._block_size = block_size
        self._name = name_of
        self._is_running = is_running
        self._deliver = deliver
        self._held: list[int] = []
        self._deciding = ""  # the request that the engine's method at work is about
        self._listen(scheduler, "preempt", self._preempt)
        self._listen(self._pool, "allocate", self._allocate)
        self._listen(self._pool, "may_append", self._append)
        self._listen(self._pool, "deallocate", self._deallocate)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are kept from the engine."""
        return bool(self._held)

    def hold_blocks(self, num_blocks: int) -> int:
        """Take free blocks as a sequence would, or give them back; returns how many are held."""
        pool = self._pool
        while len(self._held) < num_blocks and pool.free_block_ids:
            block = pool.free_block_ids[0]
            takes_id = bool(inspect.signature(pool._allocate_block).parameters)
            pool._allocate_block(*([block] if takes_id else []))
            self._held.append(block)
        while len(self._held) > num_blocks:
            block = self._held.pop()
            pool.blocks[block].ref_count = 0
            pool._deallocate_block(block)
        self._log.pool_changed = True
        return len(self._held)

    def explain(self, error: Exception, place: traceback.FrameSummary) -> None:
        """Name where the engine's scheduler failed, on whom, and with what left."""
        on = f" of {self._deciding}" if self._deciding else ""
        queues = {
            name: ", ".join(map(self._name, getattr(self._scheduler, name))) or "nobody"
            for name in ("waiting", "running")
        }
        error.args = (
            f"{error}: at `{place.line}` in {place.name}{on}; waiting: {queues['waiting']}; "
            f"running: {queues['running']}; free blocks: {len(self._pool.free_block_ids)} of "
            f"{len(self._pool.blocks)}",
        )

    def record_pool(self, sequences: Mapping[str, Any]) -> None:
        """Sizes every step; everything when somebody lost blocks or ended, and now and then."""
        pool, log = self._pool, self._log
        blocks, by_hash = pool.blocks, pool.hash_to_block_id
        findable = (
            {
                block
                for block in pool.free_block_ids
                if (found := blocks[block].hash) != -1 and by_hash.get(found) == block
            }
            if by_hash
            else set()
        )
        num_held = len(self._held)
        log.add(
            record.PoolCounts(
                log.step,
                num_blocks=len(blocks),
                free=len(pool.free_block_ids) - len(findable),
                cached=len(findable),
                used=len(pool.used_block_ids) - num_held,
                held=num_held,
            )
        )
        if not log.pool_is_due:
            return
        held = set(self._held)
        log.pool(
            num_blocks=len(blocks),
            free=[block for block in pool.free_block_ids if block not in findable],
            cached=sorted(findable),
            held=list(self._held),
            ref_counts={
                block.block_id: block.ref_count
                for block in blocks
                if block.ref_count and block.block_id not in held
            },
            tables={name: sequence.block_table for name, sequence in sequences.items()},
            waiting=[self._name(sequence) for sequence in self._scheduler.waiting],
            running=[self._name(sequence) for sequence in self._scheduler.running],
        )

    # Listeners ----------------------------------------------------------------------------------

    def _listen(self, owner: Any, name: str, listener: Callable[..., None]) -> None:
        def knowing_whom(original: Callable[..., Any], sequence: Any, *rest: Any) -> None:
            self._deciding = self._name(sequence)
            listener(original, sequence, *rest)
            self._deciding = ""  # stays after an error, which it explains

        wrap(owner, name, knowing_whom)

    def _preempt(self, original: Callable[..., Any], sequence: Any) -> None:
        decodes = self._is_running(sequence)
        end = sequence.num_tokens - 1 if decodes else sequence.num_cached_tokens
        self._log.preempted(self._name(sequence), self.reason, end, sequence.num_tokens)
        original(sequence)

    def _allocate(self, original: Callable[..., Any], sequence: Any, *rest: Any) -> None:
        original(sequence, *rest)
        cached = sequence.num_cached_tokens // self._block_size
        self._log.holds(self._name(sequence), sequence.block_table, cached)

    def _append(self, original: Callable[..., Any], sequence: Any) -> None:
        original(sequence)
        self._log.holds(self._name(sequence), sequence.block_table)

    def _deallocate(self, original: Callable[..., Any], sequence: Any) -> None:
        if sequence.is_finished:
            self._deliver(sequence)
        blocks = list(reversed(sequence.block_table))
        original(sequence)
        self._log.freed(self._name(sequence), blocks)
