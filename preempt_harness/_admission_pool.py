"""The simulated block pool of the admission simulator: free, cached and used blocks, by count.

Knows no requests and no policy. Blocks are interchangeable until the prefix cache names one, so the
free ones are a number, and ids are handed out in order only to tell blocks apart.
"""

from __future__ import annotations

from collections.abc import Hashable


class SimulatedPool:
    """Blocks with reference counts and a prefix cache that evicts the least recently used.

    Args:
        num_blocks: blocks that requests may use.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_resets = 0
        self._num_free = num_blocks
        self._next_id = 0
        self._references: dict[int, int] = {}
        self._evictable: dict[int, None] = {}  # cached and unreferenced, least recent first
        self._block_of: dict[Hashable, int] = {}
        self._content_of: dict[int, Hashable] = {}

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free, or cached and evictable."""
        return self._num_free + len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a table refers to."""
        return self.num_blocks - self.num_available_blocks

    def find(self, content: Hashable) -> int | None:
        """The block with this content, if the cache knows one."""
        return self._block_of.get(content)

    def num_revived(self, blocks: list[int]) -> int:
        """How many of these hits would leave the available blocks when shared."""
        return sum(block in self._evictable for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """Take one more reference to each block."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def take(self, num_blocks: int) -> list[int]:
        """New blocks; evicts when no free ones are left. The caller has checked that they fit."""
        blocks = []
        for _ in range(num_blocks):
            if self._num_free:
                self._num_free -= 1
            else:
                evicted = next(iter(self._evictable))
                del self._evictable[evicted]
                del self._block_of[self._content_of.pop(evicted)]
            self._references[self._next_id] = 1
            blocks.append(self._next_id)
            self._next_id += 1
        return blocks

    def make_findable(self, block: int, content: Hashable) -> None:
        """Offer a full, computed block; the first block with a content is the one found."""
        if content not in self._block_of:
            self._block_of[content] = block
            self._content_of[block] = content

    def release(self, table: list[int]) -> None:
        """Give up a table's references, its last block first, so prefixes lose their ends first."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if block in self._content_of:
                self._evictable[block] = None
            else:
                self._num_free += 1

    def reset_prefix_cache(self) -> None:
        """Forget all content; used blocks stay used, and what builds on them is not offered."""
        self.num_resets += 1
        self._num_free += len(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._content_of.clear()
