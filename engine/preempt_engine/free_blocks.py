"""Which free block is handed out first: one small container per reuse order, all O(1)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from preempt_engine.config import BlockReuseOrder


class FreeBlocks(Protocol):
    """A container of block ids with its own idea of which to give out next."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def push(self, block_id: int) -> None: ...

    def pop(self) -> int: ...


class FifoBlocks:
    """The block that was free for longest comes first."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._blocks = deque(block_ids)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def push(self, block_id: int) -> None:
        self._blocks.append(block_id)

    def pop(self) -> int:
        return self._blocks.popleft()


class LifoBlocks:
    """The block that was freed last comes first, so that stale content is met soon."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._blocks = list(reversed(list(block_ids)))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def push(self, block_id: int) -> None:
        self._blocks.append(block_id)

    def pop(self) -> int:
        return self._blocks.pop()


class RandomBlocks:
    """Any block may come next; repeatable for a seed."""

    def __init__(self, block_ids: Iterable[int], seed: int) -> None:
        self._blocks = list(block_ids)
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def push(self, block_id: int) -> None:
        self._blocks.append(block_id)

    def pop(self) -> int:
        index = self._random.randrange(len(self._blocks))
        self._blocks[index], self._blocks[-1] = self._blocks[-1], self._blocks[index]
        return self._blocks.pop()


def make_free_blocks(order: BlockReuseOrder, block_ids: Iterable[int], seed: int) -> FreeBlocks:
    """The container for a reuse order; `seed` matters to "random" alone."""
    if order == "fifo":
        return FifoBlocks(block_ids)
    if order == "lifo":
        return LifoBlocks(block_ids)
    return RandomBlocks(block_ids, seed)
