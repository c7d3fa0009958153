"""How many drafts a step has room for. Decides nothing else; knows no proposer.

Drafts are a gamble, known tokens are not: a step computes the known tokens of those who run first,
and drafts have what is left of the token budget and of the blocks. So a draft never takes a token
of the budget from another running request, and never costs anybody its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from preempt_engine.block_manager import BlockManager
from preempt_engine.sequence import Request, Sequence


def cut_drafts(running: Seq[Request], blocks: BlockManager, budget: int) -> None:
    """Drop the drafts that the step has no room for; earlier requests come first.

    Args:
        running: in the order in which they will be scheduled.
        blocks: the pool.
        budget: tokens of the step.
    """
    work = [_known_work(request) for request in running]
    budget -= sum(end - sequence.num_computed_tokens for known in work for sequence, end in known)
    num_spare = blocks.num_available_blocks - sum(map(blocks.num_to_write, work))
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
    most = request.sequence.num_prompt_tokens + request.max_output_tokens - 1
    total = 0
    for sequence in request.sequences.values():
        end = max(sequence.num_tokens, min(sequence.num_tokens + num_speculative_tokens, most))
        total += blocks.blocks_for(end) - blocks.blocks_for(sequence.num_tokens)
    return total


def _known_work(request: Request) -> list[tuple[Sequence, int]]:
    return [(sequence, sequence.num_tokens) for sequence in _to_compute(request)]


def _to_compute(request: Request) -> Iterable[Sequence]:
    for sequence in request.sequences.values():
        if sequence.num_computed_tokens < sequence.num_tokens and not sequence.follows:
            yield sequence
