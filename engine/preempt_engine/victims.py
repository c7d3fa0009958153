"""Who loses its blocks: by the engine's own need, or because a controller says so.

Running requests stand in order of precedence, so the least urgent is the last. A step schedules
them from the first on, which gives the rule that matters most for nothing: a request that was
scheduled in this step is never its victim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from preempt_engine.block_manager import BlockManager
from preempt_engine.sequence import Request


def choose_victim(running: Sequence[Request]) -> Request:
    """The least urgent, of equals the latest: the first always keeps going, so the engine does."""
    return running[-1]


def victims_for(
    newcomer: Request,
    hits: list[int],
    running: Sequence[Request],
    blocks: BlockManager,
    *,
    max_num_seqs: int,
    num_watermark_blocks: int,
) -> list[Request] | None:
    """The fewest of the least urgent that must go so that a more urgent request can run.

    Only requests with a strictly higher priority value may go: equals never evict each other.

    Args:
        newcomer: head of the waiting queue.
        hits: cached blocks it may share.
        running: in order of precedence.
        blocks: the pool, with no step in flight.
        max_num_seqs: most requests that run at once.
        num_watermark_blocks: to be left free unless nobody else runs.

    Returns:
        Victims, the least urgent first; empty when it fits as it is. None when it would not fit
        even without all of them: then nobody is evicted, since it would be in vain.
    """
    victims: list[Request] = []
    freed = _FreedBlocks(blocks)
    # What the others need to go on in this very step: were it not left to them, the newcomer would
    # be evicted at once.
    num_growth_blocks = sum(_num_missing_blocks(request, blocks) for request in running)
    while True:
        survivors = len(running) - len(victims)
        spare = num_growth_blocks + (num_watermark_blocks if survivors else 0)
        if survivors < max_num_seqs and freed.can_admit(hits, newcomer.sequence.num_tokens, spare):
            return victims
        if not survivors or running[survivors - 1].priority <= newcomer.priority:
            return None
        victim = running[survivors - 1]
        victims.append(victim)
        freed.add(victim)
        num_growth_blocks -= _num_missing_blocks(victim, blocks)


class _FreedBlocks:
    """Blocks that nobody would refer to any more if some requests were evicted.

    Args:
        blocks: the pool; it is only looked at.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._references: Counter[int] = Counter()
        self._freed: set[int] = set()

    def add(self, request: Request) -> None:
        """Suppose that the request is evicted too."""
        for sequence in request.sequences:
            for block_id in sequence.block_table:
                self._references[block_id] += 1
                if self._references[block_id] == self._blocks.ref_counts[block_id]:
                    self._freed.add(block_id)

    def can_admit(self, hits: list[int], num_tokens: int, num_spare_blocks: int) -> bool:
        """`BlockManager.can_admit`, as it would answer then."""
        blocks = self._blocks
        num_revived = sum(
            block_id in blocks.cached_blocks or block_id in self._freed for block_id in hits
        )
        num_needed = blocks.blocks_for(num_tokens) - len(hits)
        num_available = blocks.num_available_blocks + len(self._freed)
        return num_needed + num_revived + num_spare_blocks <= num_available


def _num_missing_blocks(request: Request, blocks: BlockManager) -> int:
    """Blocks that the request lacks for the tokens it knows."""
    return sum(
        max(0, blocks.blocks_for(sequence.num_tokens) - len(sequence.block_table))
        for sequence in request.sequences
    )


class PreemptionController(Protocol):
    """Forces preemptions; asked before every step is scheduled."""

    def select_victims(self, step_id: int, running: Sequence[Request]) -> Iterable[str]:
        """Ids of running requests to preempt before step `step_id` is scheduled.

        Args:
            step_id: of the step about to be scheduled.
            running: requests in order of precedence; not to be changed.
        """
        ...
