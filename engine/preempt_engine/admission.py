"""The queues' order, and when its head may run.

Admission reserves blocks for all tokens a request is known to have, not for its next chunk only: a
request that is let in never gives up again for want of blocks for its own prompt.
"""

from __future__ import annotations

import heapq

from preempt_engine.block_manager import BlockManager
from preempt_engine.sequence import Request


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


def find_hits(request: Request, blocks: BlockManager) -> list[int]:
    """Cached blocks that the request may share.

    A hit never covers a token whose logits are still wanted: the step must compute that one.
    """
    return blocks.find_prefix(request.sequence, max_tokens=request.first_wanted_logits)


def fits(
    request: Request, hits: list[int], blocks: BlockManager, num_watermark_blocks: int
) -> bool:
    """Whether all known tokens of the request fit, leaving the watermark free."""
    return blocks.can_admit(hits, request.sequence.num_tokens, num_watermark_blocks)
