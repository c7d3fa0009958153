"""Moves requests between the device's blocks and the host's. Owns the swap space.

Decides neither who is swapped nor when. A request goes with all its sequences; a block that several
of them share is copied once each way, and is shared again afterwards:

    block_table          [7, 3, 9]  [7, 3, 4]    two branches, one prompt; 9 and 4 are their own
      swap out           9 -> h2, 4 -> h3, 7 -> h0, 3 -> h1
    swapped_table        [7, 3, 9]  [7, 3, 4]    names of blocks now, not places
      swap in            h0 -> 5, h1 -> 6, h2 -> 1, h3 -> 8
    block_table          [5, 6, 1]  [5, 6, 8]

Both ends of a copy are withheld until its step is done, so that a worker may copy while it
computes: sources because they are still read, destinations because they are owned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from preempt_engine.block_manager import BlockManager, num_private_copies
from preempt_engine.host_pool import HostPool
from preempt_engine.sequence import Request

Pairs = list[tuple[int, int]]


class Swapper:
    """Takes requests out and brings them back.

    Args:
        blocks: the device's pool.
        num_host_blocks: size of the swap space.
    """

    def __init__(self, blocks: BlockManager, num_host_blocks: int) -> None:
        self.blocks = blocks
        self.host = HostPool(num_host_blocks)

    def can_swap_out(self, request: Request) -> bool:
        """Whether there is something to keep, and room for it."""
        return 0 < len(self._computed_blocks(request)) <= len(self.host.free_blocks)

    def can_swap_out_in_turn(self, requests: Iterable[Request]) -> Iterator[bool]:
        """The same of each of several, were those before it swapped out as far as there is room."""
        num_free = len(self.host.free_blocks)
        for request in requests:
            num_computed = len(self._computed_blocks(request))
            can = 0 < num_computed <= num_free
            num_free -= num_computed if can else 0
            yield can

    def swap_out(self, request: Request, step_id: int) -> Pairs:
        """Exchange the request's blocks for host blocks.

        Returns:
            (device block, host block) to copy in the step.
        """
        computed = self._computed_blocks(request)
        pairs = list(zip(computed, self.host.take(len(computed)), strict=True))
        request.host_blocks = dict(pairs)
        for sequence in request.sequences.values():
            sequence.swapped_table = sequence.block_table
            sequence.num_findable_blocks = 0
            sequence.draft_token_ids = []
            self.blocks.free(sequence, step_id)
        return pairs

    def num_blocks_to_return(self, request: Request) -> int:
        """Device blocks with which the swapped request can compute all its known tokens."""
        size = self.blocks.block_size
        references: Counter[int] = Counter()
        written: list[int] = []
        growth = 0
        for sequence in request.sequences.values():
            table = sequence.swapped_table
            references.update(table)
            growth += max(0, self.blocks.blocks_for(sequence.num_tokens) - len(table))
            index = sequence.num_computed_tokens // size
            if index < len(table) and not (sequence.followers or sequence.follows):
                written.append(table[index])
        return len(references) + growth + num_private_copies(written, references)

    def swap_in(self, request: Request, step_id: int) -> tuple[Pairs, dict[int, int]]:
        """Give the request device blocks for its host blocks, shared as they were.

        Returns:
            (host block, device block) to copy in the step; and branch -> how many leading
            blocks of its table it shares with branches before it.
        """
        assert request.host_blocks is not None
        device_of: dict[int, int] = {}
        num_shared = {}
        for branch, sequence in request.sequences.items():
            num_shared[branch] = self.blocks.rebuild(sequence, device_of)
            sequence.swapped_table = []
            sequence.send_blocks_again(0)
        pairs = [
            (host, device_of[name])
            for name, host in request.host_blocks.items()
            if name in device_of
        ]
        self.discard(request, step_id)
        return pairs, num_shared

    def discard(self, request: Request, step_in_flight: int | None) -> None:
        """Release the request's host blocks, if it has any."""
        if request.host_blocks is not None:
            self.host.release(request.host_blocks.values(), step_in_flight)
            request.host_blocks = None

    def _computed_blocks(self, request: Request) -> list[int]:
        """Blocks that hold computed tokens of the request, each once."""
        computed: dict[int, None] = {}
        for sequence in request.sequences.values():
            num_blocks = self.blocks.blocks_for(sequence.num_computed_tokens)
            computed.update(dict.fromkeys(sequence.block_table[:num_blocks]))
        return list(computed)
