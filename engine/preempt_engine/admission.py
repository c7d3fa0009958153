"""The queues' order, and when its head may run.

Admission reserves blocks for all tokens a request is known to have, not for its next chunk only: a
request that is let in never gives up again for want of blocks for its own prompt.

A preempted request may come back with several sequences. They have a prompt in common, and beams
also what came after it; full blocks of such tokens are computed once and shared again:

    first sequence     [ a b c d | e f g h | i j . . ]     computes all of it
    second sequence    [ a b c d | e f g h | k . . . ]     shares two blocks, then computes k
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from preempt_engine.block_manager import BlockManager
from preempt_engine.sequence import Request, Sequence


class WaitingQueue:
    """Requests in order of precedence; a preempted request returns to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.precedence, request))

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        """All of it, the next one first."""
        return [request for _, request in sorted(self._heap, key=lambda entry: entry[0])]


@dataclass(slots=True, frozen=True)
class Placement:
    """Where the first blocks of a sequence's table come from; the others are new.

    Attributes:
        sequence: whose table it is.
        hits: cached blocks it shares.
        leader: a sequence placed before it whose first blocks it shares instead, or None.
        num_leader_blocks: how many; the leader computes them, if they are not hits of its own.
    """

    sequence: Sequence
    hits: list[int]
    leader: Sequence | None = None
    num_leader_blocks: int = 0


def place(request: Request, blocks: BlockManager) -> list[Placement]:
    """Find the blocks that the sequences of a request can share, the cache's or each other's.

    A hit never covers a token whose logits are still wanted: a step must compute that one.
    """
    placements: list[Placement] = []
    for sequence in request.sequences.values():
        hits = blocks.find_prefix(sequence, max_tokens=sequence.first_wanted_logits)
        leader, num_shared = None, len(hits)
        for other in placements:
            common = _num_common_blocks(sequence, other.sequence, blocks.block_size)
            if common > num_shared:
                leader, num_shared = other.sequence, common
        if leader is None:
            placements.append(Placement(sequence, hits))
        else:
            placements.append(Placement(sequence, [], leader, num_shared))
    return placements


def num_blocks_to_admit(placements: list[Placement], blocks: BlockManager) -> int:
    """Blocks that the sequences take from the pool, for all their known tokens."""
    revived: set[int] = set()
    num_new = 0
    for placement in placements:
        revived.update(block_id for block_id in placement.hits if block_id in blocks.cached_blocks)
        num_new += blocks.blocks_for(placement.sequence.num_tokens)
        num_new -= len(placement.hits) + placement.num_leader_blocks
    return num_new + len(revived)


def _num_common_blocks(sequence: Sequence, leader: Sequence, block_size: int) -> int:
    """Full blocks at the beginning that hold the same tokens and need no logits of `sequence`."""
    limit = min(sequence.first_wanted_logits, leader.num_tokens) // block_size
    ours, theirs = sequence.token_ids, leader.token_ids
    for index in range(limit):
        first = index * block_size
        if ours[first : first + block_size] != theirs[first : first + block_size]:
            return index
    return limit
