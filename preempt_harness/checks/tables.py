"""The scheduler's block tables, rebuilt by the harness from what the scheduler announced.

Owns the model that KVSan, Accounting and Work judge by. Knows neither workers nor contents.

A *lease* is one stay of a sequence in the pool, from its first block to the return of its last. A
step is judged by the lease it was scheduled with: with asynchronous scheduling a sequence may have
returned its blocks before the step that was in flight is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from preempt_harness.checks.trace import ScheduledRows
from preempt_harness.record import BlocksAllocated, BlocksFreed, BlocksReplaced, Forked

TableEvent = BlocksAllocated | BlocksFreed | BlocksReplaced | Forked

TABLE_EVENTS = (BlocksAllocated, BlocksFreed, BlocksReplaced, Forked)
"""What changes block tables by the scheduler's account."""

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
    """All leases, and how often each block is referenced.

    Attributes:
        leases: sequence -> its present lease. Replaced when one begins or ends and never changed,
            so that a step remembers those of its time by remembering this dictionary.
        refs: block -> references, for referenced blocks only.
        num_references: of all blocks together.
    """

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.refs: dict[int, int] = {}
        self.num_references = 0
        self._scheduled: dict[int, list[tuple[Sequence[str], dict[str, Lease]]]] = {}
        self._granted: dict[int, int] = {}  # block -> step, when it was last handed out as fresh

    def follow(self, event: TableEvent) -> None:
        """Take in any of `TABLE_EVENTS`, where nothing needs to be known of it."""
        if isinstance(event, BlocksAllocated):
            self.allocate(event)
        elif isinstance(event, BlocksFreed):
            self.free(event)
        elif isinstance(event, BlocksReplaced):
            self.replace(event)
        else:
            self.fork(event)

    def allocate(self, event: BlocksAllocated, tick: int = 0) -> list[int]:
        """Append blocks to a table.

        Returns:
            Blocks handed out as fresh although somebody, perhaps the same sequence, holds them.
        """
        lease = self.leases.get(event.seq)
        if lease is None:
            lease = Lease(event.seq, event.step, num_cached=event.num_cached)
            self.leases = {**self.leases, event.seq: lease}
        taken = []
        for index, block in enumerate(event.blocks):
            fresh = index >= event.num_cached
            if fresh and self.refs.get(block, 0):
                taken.append(block)
            lease.blocks.append(block)
            lease.born[block] = tick if fresh else SHARED
            if fresh:
                self._granted[block] = event.step
            self.refs[block] = self.refs.get(block, 0) + 1
        self.num_references += len(event.blocks)
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
            self.leases = {seq: other for seq, other in self.leases.items() if other is not lease}
        elif len(left) != len(lease.blocks):
            born = {block: lease.born[block] for block in left}
            changed = Lease(lease.seq, lease.step, left, born, lease.num_cached)
            self.leases = {**self.leases, event.seq: changed}
            step = self._scheduled.get(event.step, [])
            if any(event.seq in seqs and event.seq in leases for seqs, leases in step):
                step.append(((event.seq,), self.leases))  # a block replaced in its step
        return foreign

    def replace(self, event: BlocksReplaced) -> list[int]:
        """Entries name other blocks, which somebody else filled.

        Returns:
            Blocks that they named before.
        """
        lease = self.leases.get(event.seq)
        if lease is None:
            return []
        blocks, born = list(lease.blocks), dict(lease.born)
        replaced = []
        for index, block in zip(event.indices, event.blocks, strict=True):
            old, blocks[index] = blocks[index], block
            replaced.append(old)
            born.pop(old, None)
            born[block] = SHARED
            self.refs[block] = self.refs.get(block, 0) + 1
            self.num_references += 1
            self._drop(old)
        changed = Lease(lease.seq, lease.step, blocks, born, lease.num_cached)
        self.leases = {**self.leases, event.seq: changed}
        return replaced

    def fork(self, event: Forked) -> None:
        """The child shares the parent's blocks; from now on neither may write to them."""
        parent = self.leases.get(event.parent)
        if parent is None:
            return
        born = dict.fromkeys(parent.blocks, SHARED)
        parent.born = dict(born)
        child = Lease(event.child, event.step, list(parent.blocks), born, parent.num_cached)
        self.leases = {**self.leases, event.child: child}
        for block in parent.blocks:
            self.refs[block] += 1
        self.num_references += len(parent.blocks)

    def schedule(self, rows: ScheduledRows) -> None:
        """Remember the leases that the rows were scheduled with."""
        step = self._scheduled.get(rows.step)
        if step is None:
            step = self._scheduled[rows.step] = []
            if len(self._scheduled) > _STEPS_REMEMBERED:
                del self._scheduled[next(iter(self._scheduled))]
        step.append((rows.seqs, self.leases))

    def leases_at(self, step: int, seqs: Sequence[str]) -> list[Lease | None]:
        """The leases with which the step was scheduled, else those held now."""
        scheduled, held = self._scheduled.get(step, []), self.leases
        if all(leases is held for _, leases in scheduled):
            return list(map(held.get, seqs))
        found = {seq: leases[seq] for names, leases in scheduled for seq in names if seq in leases}
        return [found.get(seq) or held.get(seq) for seq in seqs]

    def holders(self, block: int) -> list[str]:
        """Sequences whose table names the block."""
        return [seq for seq, lease in self.leases.items() if block in lease.born]

    def has_held(self, seq: str, block: int, step: int) -> bool:
        """Whether the sequence holds the block, which was granted before the step."""
        lease = self.leases.get(seq)
        return lease is not None and block in lease.born and self._granted.get(block, -1) < step

    def _drop(self, block: int) -> None:
        self.num_references -= 1
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index of the first difference, None when equal; a prefix differs at its length."""
    if left == right:
        return None
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _remove_last(blocks: list[int], block: int) -> None:
    del blocks[len(blocks) - 1 - blocks[::-1].index(block)]
