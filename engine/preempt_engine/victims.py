"""Who loses its blocks: by the engine's own need, or because a controller says so.

Running requests stand in order of precedence, so the least urgent is the last. A step schedules
them from the first on, which gives the rule that matters most for nothing: a request that was
scheduled in this step is never its victim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from preempt_engine.block_manager import BlockManager
from preempt_engine.config import PreemptionMode
from preempt_engine.sequence import Request


def choose_victim(running: Sequence[Request]) -> Request:
    """The least urgent, of equals the latest: the first always keeps going, so the engine does."""
    return running[-1]


def evictions_suffice(
    request: Request, running: Sequence[Request], blocks: BlockManager, num_blocks: int
) -> bool:
    """Whether evicting all that are less urgent leaves so many blocks for a running request.

    A request of several sequences may need more than they can give up; to evict them, and it after
    them, would be in vain. Blocks that are withheld for this step do not count: with them, fewer
    may have to go.

    Args:
        request: one of `running`.
        running: in order of precedence.
        blocks: the pool.
        num_blocks: what the request needs.
    """
    freed = _FreedBlocks(blocks)
    for other in reversed(running):
        if other is request:
            break
        freed.add(other)
    return num_blocks <= freed.num_available_blocks


class ForcedPreemption(NamedTuple):
    """A victim and how it is to lose its blocks; None is the engine's `preemption_mode`."""

    request_id: str
    mode: PreemptionMode | None = None


def victims_for(
    newcomer: Request,
    running: Sequence[Request],
    blocks: BlockManager,
    *,
    num_blocks: int,
    prefixes: Sequence[Sequence[int]],
    max_num_seqs: int,
    num_watermark_blocks: int,
    copied: Iterator[bool],
    num_tokens_to_come: int,
) -> list[Request] | None:
    """The fewest of the least urgent that must go so that a more urgent request can run.

    Only requests with a strictly higher priority value may go: equals never evict each other. A
    victim gives up the same blocks in either mode of preemption; if one is copied to the host, all
    come free a step later.

    Args:
        newcomer: head of the waiting queue.
        running: in order of precedence.
        blocks: the pool, with no step in flight.
        num_blocks: what it would take from the pool as it is, cached blocks that it would share
            included.
        prefixes: blocks that each of its sequences would share, in order, cached or in use.
        max_num_seqs: most sequences that run at once.
        num_watermark_blocks: to be left free unless nobody else runs.
        copied: whether victims are copied to the host, from the end of `running` on.
        num_tokens_to_come: by so many a sequence may have got longer when that is done.

    Returns:
        Victims, the least urgent first; empty when it fits as it is. None when it would not fit
        even without all of them: then nobody is evicted, since it would be in vain.
    """
    victims: list[Request] = []
    hits = frozenset[int]().union(*prefixes)
    freed = _FreedBlocks(blocks)
    # What the others need to go on, until the newcomer has come: were it not left to them, the
    # newcomer would be evicted at once, or would not fit when the victims' blocks are free.
    now = [_num_growth_blocks(request, blocks, 0) for request in running]
    later = [_num_growth_blocks(request, blocks, num_tokens_to_come) for request in running]
    num_seqs = newcomer.num_seqs + sum(request.num_seqs for request in running)
    num_free = blocks.num_available_blocks
    is_later = False
    while True:
        survivors = len(running) - len(victims)
        num_wanted = num_blocks + freed.num_of(hits) + (num_watermark_blocks if survivors else 0)
        # It needs no block of the victims', only their places; or it waits for their blocks.
        fits = num_wanted + sum(now[:survivors]) <= num_free
        if victims and not fits:
            growth = now[:survivors]
            if is_later:
                growth = _growth_meanwhile(growth, later, num_free)
                num_wanted += freed.num_in_use_of(blocks.hits_at_risk(prefixes, sum(growth)))
            fits = num_wanted + sum(growth) <= freed.num_available_blocks
        if fits and num_seqs <= max_num_seqs:
            return victims
        if not survivors or running[survivors - 1].priority <= newcomer.priority:
            return None
        victim = running[survivors - 1]
        victims.append(victim)
        freed.add(victim)
        is_later |= next(copied)
        num_seqs -= victim.num_seqs


class _FreedBlocks:
    """Blocks that nobody would refer to any more if some requests were evicted.

    Args:
        blocks: the pool; it is only looked at.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._references: Counter[int] = Counter()
        self._freed: set[int] = set()

    @property
    def num_available_blocks(self) -> int:
        """What the pool could hand out then."""
        return self._blocks.num_available_blocks + len(self._freed)

    def num_of(self, block_ids: AbstractSet[int]) -> int:
        """How many of these blocks would be free, and are in use now."""
        return len(self._freed & block_ids)

    def num_in_use_of(self, block_ids: AbstractSet[int]) -> int:
        """How many of these blocks would be in use still."""
        return sum(self._blocks.ref_counts[block_id] > 0 for block_id in block_ids - self._freed)

    def add(self, request: Request) -> None:
        """Suppose that the request is evicted too."""
        for sequence in request.sequences.values():
            for block_id in sequence.block_table:
                self._references[block_id] += 1
                if self._references[block_id] == self._blocks.ref_counts[block_id]:
                    self._freed.add(block_id)


def _growth_meanwhile(now: list[int], later: list[int], num_free: int) -> list[int]:
    """Blocks that each takes until victims' blocks are copied, and in the step after that.

    Who finds none among the free ones does not get on meanwhile.
    """
    growth = []
    for num_now, num_later in zip(now, later, strict=False):
        goes_on = num_now <= num_free
        num_free -= num_now if goes_on else 0
        growth.append(num_later if goes_on else num_now)
    return growth


def _num_growth_blocks(request: Request, blocks: BlockManager, num_tokens_to_come: int) -> int:
    """Blocks that the request lacks, copies included, to compute the tokens it knows, and more.

    Args:
        request: that runs.
        blocks: the pool.
        num_tokens_to_come: of each sequence. Several may have to copy a block each as well.
    """
    last = request.last_position
    num_blocks = blocks.num_to_write(
        (sequence, max(sequence.num_tokens, min(sequence.num_tokens + num_tokens_to_come, last)))
        for sequence in request.sequences.values()
        if sequence.num_computed_tokens < sequence.num_tokens and not sequence.follows
    )
    if num_tokens_to_come and request.num_seqs > 1:
        num_blocks += request.num_seqs
    return num_blocks


class PreemptionController(Protocol):
    """Forces preemptions; asked before every step is scheduled."""

    def select_victims(
        self, step_id: int, running: Sequence[Request]
    ) -> Iterable[str | ForcedPreemption]:
        """Running requests to preempt before step `step_id` is scheduled, by id or with a mode.

        Args:
            step_id: of the step about to be scheduled.
            running: requests in order of precedence; not to be changed.
        """
        ...
