"""How many drafts a step has room for. Decides nothing else; knows no proposer.

Drafts are a gamble, known tokens are not: a step computes the known tokens of those who run first,
lets the head of the queue in if it can, and drafts have what is left of the token budget and of the
blocks. So a draft never takes a token of the budget from another request that can go on, and never
costs anybody its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from preempt_engine.block_manager import BlockManager
from preempt_engine.sequence import Request, Sequence


class Claim(NamedTuple):
    """What a waiting request would take if it were let in."""

    num_tokens: int
    num_blocks: int


def cut_drafts(
    running: Seq[Request], blocks: BlockManager, budget: int, head: Claim | None = None
) -> None:
    """Drop the drafts that the step has no room for; earlier requests come first.

    Args:
        running: in the order in which they will be scheduled.
        blocks: the pool.
        budget: tokens of the step.
        head: of the queue; it goes first if there are blocks for it.
    """
    work = [_known_work(request) for request in running]
    budget -= sum(end - sequence.num_computed_tokens for known in work for sequence, end in known)
    num_spare = _num_spare_blocks(work, blocks)
    if head is not None and head.num_blocks <= num_spare:
        budget -= head.num_tokens
        num_spare -= head.num_blocks
    for known in work:
        for sequence, end in known:
            if not sequence.draft_token_ids:
                continue
            num_held = max(blocks.blocks_for(end), len(sequence.block_table))
            room = (num_held + num_spare) * blocks.block_size - end
            keep = max(0, min(len(sequence.draft_token_ids), budget, room))
            del sequence.draft_token_ids[keep:]
            budget -= keep
            num_spare -= max(0, blocks.blocks_for(end + keep) - num_held)


def num_lookahead_blocks(
    request: Request, blocks: BlockManager, num_speculative_tokens: int
) -> int:
    """Blocks, beyond those of its known tokens, for the drafts of a request's next step.

    A request that is let in beside others should find room for them.
    """
    total = 0
    for sequence in request.sequences.values():
        most = max(sequence.num_tokens, request.last_position)
        end = min(sequence.num_tokens + num_speculative_tokens, most)
        total += blocks.blocks_for(end) - blocks.blocks_for(sequence.num_tokens)
    return total


def grant_blocks(
    running: Seq[Request], blocks: BlockManager, wanted: Iterable[tuple[Sequence, int]]
) -> list[int]:
    """Give sequences the blocks of their drafts now, which they would get with the next step.

    Args:
        running: who needs blocks for known tokens, and goes first.
        blocks: the pool.
        wanted: (sequence, drafts), one known token of each not being computed yet.

    Returns:
        How many tokens from there on, at most as many as its drafts, each has blocks for. None of
        one that would have to copy a block first.
    """
    num_spare = _num_spare_blocks([_known_work(request) for request in running], blocks)
    size = blocks.block_size
    granted = []
    for sequence, count in wanted:
        table, first = sequence.block_table, sequence.num_computed_tokens
        index = first // size
        if index < len(table) and blocks.ref_counts[table[index]] > 1:
            granted.append(0)
            continue
        num_held = max(blocks.blocks_for(sequence.num_tokens), len(table))
        end = min(first + count, (num_held + max(0, num_spare)) * size)
        num_spare -= max(0, blocks.blocks_for(end) - num_held)
        if blocks.blocks_for(end) - len(table) <= blocks.num_available_blocks:
            blocks.grow(sequence, end)
        granted.append(max(0, min(end, len(table) * size) - first))
    return granted


def _num_spare_blocks(work: list[list[tuple[Sequence, int]]], blocks: BlockManager) -> int:
    """Blocks that the known tokens of those who run do not need; below 0 where they lack some."""
    return blocks.num_available_blocks - sum(map(blocks.num_to_write, work))


def _known_work(request: Request) -> list[tuple[Sequence, int]]:
    return [(sequence, sequence.num_tokens) for sequence in _to_compute(request)]


def _to_compute(request: Request) -> Iterable[Sequence]:
    for sequence in request.sequences.values():
        if sequence.num_computed_tokens < sequence.num_tokens and not sequence.follows:
            yield sequence
