"""The scheduler's block tables, rebuilt by the harness from what the scheduler announced.

Owns the model that KVSan, Accounting and Work judge by. Knows neither workers nor contents.

A *lease* is one stay of a sequence in the pool, from its first block to the return of its last. A
step is judged by the lease it was scheduled with: with asynchronous scheduling a sequence may have
returned its blocks before the step that was in flight is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from preempt_harness.record import (
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    Forked,
    Scheduled,
)

SHARED = -1
"""In `Lease.born`: the sequence did not get the block fresh, it shares somebody's content."""

_STEPS_REMEMBERED = 64  # more than any pipeline of steps in flight is deep


@dataclass(slots=True, eq=False)
class Lease:
    """One stay of a sequence in the pool.

    Attributes:
        seq: who holds the blocks.
        step: when it began.
        blocks: its block table.
        born: block -> tick at which it was handed out fresh, or `SHARED`.
        num_cached: blocks of the table's beginning that were prefix hits.
    """

    seq: str
    step: int
    blocks: list[int] = field(default_factory=list)
    born: dict[int, int] = field(default_factory=dict)
    num_cached: int = 0


class SchedulerTables:
    """All leases, and how often each block is referenced."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.refs: dict[int, int] = {}
        self._scheduled: dict[int, dict[str, Lease]] = {}

    def allocate(self, event: BlocksAllocated, tick: int = 0) -> list[int]:
        """Append blocks to a table.

        Returns:
            Blocks handed out as fresh although somebody, perhaps the same sequence, holds them.
        """
        lease = self.leases.get(event.seq)
        if lease is None:
            lease = self.leases[event.seq] = Lease(event.seq, event.step)
            lease.num_cached = event.num_cached
        taken = []
        for index, block in enumerate(event.blocks):
            fresh = index >= event.num_cached
            if fresh and self.refs.get(block, 0):
                taken.append(block)
            lease.blocks.append(block)
            lease.born[block] = tick if fresh else SHARED
            self.refs[block] = self.refs.get(block, 0) + 1
        return taken

    def free(self, event: BlocksFreed) -> list[int]:
        """Take back one reference to each block.

        Returns:
            Blocks that the sequence did not hold.
        """
        lease = self.leases.get(event.seq)
        if lease is None:
            return list(event.blocks)
        left = list(lease.blocks)
        foreign = []
        if sorted(left) == sorted(event.blocks):
            left = []
            for block in event.blocks:
                self._drop(block)
        else:
            for block in event.blocks:
                if block in left:
                    _remove_last(left, block)
                    self._drop(block)
                else:
                    foreign.append(block)
        if not left:
            del self.leases[event.seq]
        elif len(left) != len(lease.blocks):
            born = {block: lease.born[block] for block in left}
            changed = Lease(lease.seq, lease.step, left, born, lease.num_cached)
            self.leases[event.seq] = changed
            if event.seq in self._scheduled.get(event.step, ()):
                self._scheduled[event.step][event.seq] = changed  # a block replaced in its step
        return foreign

    def replace(self, event: BlocksReplaced) -> None:
        """Entries name other blocks, which somebody else filled."""
        lease = self.leases.get(event.seq)
        if lease is None:
            return
        blocks, born = list(lease.blocks), dict(lease.born)
        for index, block in zip(event.indices, event.blocks, strict=True):
            old, blocks[index] = blocks[index], block
            born.pop(old, None)
            born[block] = SHARED
            self.refs[block] = self.refs.get(block, 0) + 1
            self._drop(old)
        self.leases[event.seq] = Lease(lease.seq, lease.step, blocks, born, lease.num_cached)

    def fork(self, event: Forked) -> None:
        """The child shares the parent's blocks; from now on neither may write to them."""
        parent = self.leases.get(event.parent)
        if parent is None:
            return
        born = dict.fromkeys(parent.blocks, SHARED)
        parent.born = dict(born)
        self.leases[event.child] = Lease(
            event.child, event.step, list(parent.blocks), born, parent.num_cached
        )
        for block in parent.blocks:
            self.refs[block] += 1

    def schedule(self, event: Scheduled) -> None:
        """Remember the lease that the step was scheduled with."""
        step = self._scheduled.get(event.step)
        if step is None:
            step = self._scheduled[event.step] = {}
            if len(self._scheduled) > _STEPS_REMEMBERED:
                del self._scheduled[next(iter(self._scheduled))]
        lease = self.leases.get(event.seq)
        if lease is not None:
            step[event.seq] = lease

    def lease_at(self, step: int, seq: str) -> Lease | None:
        """The lease with which the step was scheduled, else the one held now."""
        return self._scheduled.get(step, {}).get(seq) or self.leases.get(seq)

    def holders(self, block: int) -> list[str]:
        """Sequences whose table names the block."""
        return [seq for seq, lease in self.leases.items() if block in lease.born]

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index of the first difference, None when equal; a prefix differs at its length."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _remove_last(blocks: list[int], block: int) -> None:
    del blocks[len(blocks) - 1 - blocks[::-1].index(block)]
