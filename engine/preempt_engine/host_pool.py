"""The pool of host blocks: swap space. Bookkeeping over ids; knows no tensors and no requests.

    free + fenced + used = num_blocks

fenced  released while a step that may still read or write it is in flight
used    holds content of a request that is swapped out
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class HostPool:
    """Which host blocks can be taken.

    Args:
        num_blocks: size of the pool, 0 for no swap space.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = deque(range(num_blocks))
        self.fenced_blocks: dict[int, int] = {}  # block id -> step in flight at its release

    def take(self, num_blocks: int) -> list[int]:
        """Hand out so many blocks; there must be as many."""
        return [self.free_blocks.popleft() for _ in range(num_blocks)]

    def release(self, block_ids: Iterable[int], step_in_flight: int | None) -> None:
        """Take blocks back; they are free after `pass_fence` of the step, or at once for None."""
        for block_id in block_ids:
            if step_in_flight is None:
                self.free_blocks.append(block_id)
            else:
                self.fenced_blocks[block_id] = step_in_flight

    def pass_fence(self, step_id: int) -> None:
        """The step is done: what waited for it, or for one before it, is free."""
        if not self.fenced_blocks:
            return
        passed = [block for block, step in self.fenced_blocks.items() if step <= step_id]
        for block_id in passed:
            del self.fenced_blocks[block_id]
        self.free_blocks.extend(passed)

    def check_integrity(self, used: list[int]) -> None:
        """Assert the conservation equation.

        Args:
            used: the blocks of all swapped requests.
        """
        places = [*self.free_blocks, *self.fenced_blocks, *used]
        assert sorted(places) == list(range(self.num_blocks)), (
            f"host: free {len(self.free_blocks)} + fenced {len(self.fenced_blocks)} "
            f"+ used {len(used)} is not each of {self.num_blocks} blocks once"
        )
