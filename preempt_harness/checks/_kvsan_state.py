"""What KVSan remembers: of all ranks, of one sequence, and who reads which block.

Data and its upkeep; the judgement is in `sanitizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from preempt_harness.checks.chain import POISONED, UNWRITTEN
from preempt_harness.checks.finding import Code, Listing
from preempt_harness.checks.own_tokens import OwnTokens
from preempt_harness.checks.shadow import Write
from preempt_harness.checks.tables import SHARED, Lease, SchedulerTables


@dataclass(slots=True, eq=False)
class Context:
    """What all ranks share.

    Attributes:
        block_size, num_blocks, vocab_size: of the engine; vocab_size 0 if unknown.
        tables: the scheduler's leases, None when its allocations are not observed.
        listing: where findings go.
        known: sequence -> prompt and delivered tokens.
        spoiled: blocks damaged by a mistake that was reported; bad reads of them follow from it.
        full: read everything every step.
    """

    block_size: int
    num_blocks: int
    vocab_size: int
    tables: SchedulerTables | None
    listing: Listing
    known: dict[str, list[int]] = field(default_factory=dict)
    spoiled: set[int] = field(default_factory=set)
    full: bool = False


@dataclass(slots=True, eq=False)
class Reader:
    """One sequence as one rank knows it.

    Attributes:
        tokens: its own tokens and the chain values they lead to.
        table: the worker's block table.
        indices: block -> how many entries of the table name it.
        verified: positions [0, verified) were right when last read, but for `dirty`.
        dirty: table indices to read again.
        owned: entries [0, owned) agree with `lease`.
        lease: the scheduler's lease that they agree with.
        computed: positions [0, computed) were computed, or came as prefix hits, in this
            incarnation; None before its first step.
        indexed: the table stands in the rank's block -> readers index.
        incarnation: counts the times the sequence lost its blocks.
        corrupt: a finding of this incarnation explains further bad reads.
        bad: table indices that were read and found bad in this incarnation.
    """

    seq: str
    tokens: OwnTokens
    table: list[int] = field(default_factory=list)
    indices: dict[int, int] = field(default_factory=dict)
    verified: int = 0
    dirty: set[int] = field(default_factory=set)
    owned: int = 0
    lease: Lease | None = None
    computed: int | None = None
    indexed: bool = False
    incarnation: int = 0
    corrupt: bool = False
    bad: set[int] = field(default_factory=set)

    def forget(self, keeps_contents: bool) -> None:
        """The sequence lost its blocks: a new incarnation starts, and trusts nothing."""
        self.tokens.forget_provisional()
        self.indexed = False
        self.verified = self.owned = 0
        self.dirty.clear()
        self.bad.clear()
        self.lease = None
        self.corrupt = False
        self.incarnation += 1
        if keeps_contents and self.computed is not None:
            self.computed = min(self.computed, self.tokens.num_known)
        else:
            self.computed = None

    def extend_computed(self, start: int, end: int) -> None:
        """Positions [start, end) were computed; after a gap only what follows counts."""
        before = self.computed or 0
        self.computed = max(before, end) if start <= before else end


class BlockIndex:
    """Block -> the table entries that name it, of all readers of one rank.

    Attributes:
        entries: block -> (sequence, table index) -> its reader.
        num_operations: entries put in, taken out and marked.
    """

    def __init__(self) -> None:
        self.num_operations = 0
        self.entries: dict[int, dict[tuple[str, int], Reader]] = {}

    def add(self, reader: Reader, index: int) -> bool:
        """Index one entry of the reader's table.

        Returns:
            False when another entry of the same table names the block already.
        """
        self.num_operations += 1
        block = reader.table[index]
        before = reader.indices.get(block, 0)
        reader.indices[block] = before + 1
        self.entries.setdefault(block, {})[reader.seq, index] = reader
        return not before

    def remove(self, reader: Reader, start: int) -> None:
        """Take out the reader's entries from `start` on."""
        if not reader.indexed:
            return
        for index in range(start, len(reader.table)):
            self.num_operations += 1
            block = reader.table[index]
            del self.entries[block][reader.seq, index]
            reader.indices[block] -= 1

    def mark(self, blocks: Iterable[int], but: Reader | None = None) -> None:
        """Whoever reads these blocks reads them again, `but` excepted.

        It reads what it wrote itself anyway, unless its table names the block twice.
        """
        for block in blocks:
            for (_, index), reader in self.entries.get(block, {}).items():
                if reader is not but or reader.indices[block] > 1:
                    self.num_operations += 1
                    reader.dirty.add(index)


def classify_bad_read(
    start: int, reader: Reader, position: int, block: int, value: int, write: Write | None
) -> tuple[Code, str]:
    """Names what is wrong with a slot that does not hold the reader's history."""
    computed = reader.computed or 0
    born = SHARED if reader.lease is None else reader.lease.born.get(block, SHARED)
    content = _describe(value, write)
    if reader.computed is not None and computed <= position < start:
        return Code.KVSAN_GAP, (
            f"only [0, {computed}) was computed since it got its blocks, and this step computes "
            f"from {start}; the slot {content}"
        )
    if write is None:
        return Code.KVSAN_USE_BEFORE_WRITE, "the slot was never written"
    fresh = born != SHARED
    if fresh and (write.tick < born or (value == POISONED and position >= computed)):
        return Code.KVSAN_USE_BEFORE_WRITE, (
            f"the slot was not written since the block was handed to it: it {content}"
        )
    return Code.KVSAN_STALE_READ, (
        f"the slot holds another history than the sequence's own: it {content}"
    )


def _describe(value: int, write: Write | None) -> str:
    if write is None or value == UNWRITTEN:
        return "was never written"
    if value == POISONED:
        return f"was freed and poisoned in step {write.step}"
    return f"was last written by {write.seq} in step {write.step}"
