"""The block manager as it would be with neither sharing nor cache: the reference implementation.

Every block has one owner. A fork copies all blocks of its parent at once; nothing is found again,
nothing is copied on write, nothing is counted. Whatever `BlockManager` shares, a sequence must read
through its table what it reads through this one's.
"""

from __future__ import annotations

from collections.abc import Hashable


class TrivialBlockManager:
    """Blocks without references.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.tables: dict[Hashable, list[int]] = {}

    def grow(self, owner: Hashable, num_tokens: int) -> None:
        """Extend the owner's table to hold so many tokens."""
        table = self.tables.setdefault(owner, [])
        while len(table) * self.block_size < num_tokens:
            table.append(self.free_blocks.pop())

    def fork(self, parent: Hashable, child: Hashable) -> list[tuple[int, int]]:
        """Give the child a copy of every block; returns (source, destination) pairs to copy."""
        table = self.tables[child] = [self.free_blocks.pop() for _ in self.tables[parent]]
        return list(zip(self.tables[parent], table, strict=True))

    def free(self, owner: Hashable) -> None:
        """Take all blocks of the owner back."""
        self.free_blocks += self.tables.pop(owner)
