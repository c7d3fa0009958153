"""What it takes to let a waiting request in, and what drafts may have beside it. Only looks.

Beside others a newcomer leaves the watermark free, and finds room for a first run of drafts; were
it alone, that would only starve it.
"""

from __future__ import annotations

from itertools import repeat

from preempt_engine.admission import num_blocks_to_admit, place
from preempt_engine.residency import Residency
from preempt_engine.sequence import Request
from preempt_engine.spec_decode.allowance import Claim, cut_drafts, num_lookahead_blocks
from preempt_engine.victims import victims_for


def num_blocks_beside(residency: Residency, request: Request) -> int:
    """Blocks to be left free when a request is let in beside others."""
    num_drafts = residency.config.num_speculative_tokens
    if not num_drafts:
        return residency.num_watermark_blocks
    num_lookahead = num_lookahead_blocks(request, residency.blocks, num_drafts)
    return residency.num_watermark_blocks + num_lookahead


def blocks_to_admit(residency: Residency, request: Request) -> tuple[int, list[list[int]]]:
    """Blocks that a waiting request takes from the pool to run, and what each sequence finds."""
    if request.host_blocks is not None:
        return residency.swapper.num_blocks_to_return(request), []
    placements = place(request, residency.blocks)
    prefixes = [placement.hits for placement in placements]
    return num_blocks_to_admit(placements, residency.blocks), prefixes


def victims_of(residency: Residency, request: Request) -> list[Request] | None:
    """Who must go so that the head of the queue can run; None if nobody would help.

    Blocks that are copied to the host are free when the step is done: the head comes in the next
    one, and the others go on meanwhile.
    """
    num_blocks, prefixes = blocks_to_admit(residency, request)
    config = residency.config
    swaps = config.preemption_mode == "swap"
    candidates = reversed(residency.running)
    return victims_for(
        request,
        residency.running,
        residency.blocks,
        num_blocks=num_blocks,
        prefixes=prefixes,
        max_num_seqs=config.max_num_seqs,
        num_watermark_blocks=num_blocks_beside(residency, request),
        copied=residency.swapper.can_swap_out_in_turn(candidates) if swaps else repeat(False),
        num_tokens_to_come=1 + config.num_speculative_tokens,
    )


def cut_drafts_to_fit(residency: Residency) -> None:
    """Keep the drafts for which this step has room.

    They come last: after the known tokens of those who run, and after the head of the queue if it
    can be let in.
    """
    budget = residency.config.max_num_batched_tokens
    cut_drafts(residency.running, residency.blocks, budget, head=_claim_of_head(residency))


def _claim_of_head(residency: Residency) -> Claim | None:
    """What the head of the queue would take; None when it is not to be let in."""
    if not len(residency.waiting):
        return None
    head = residency.waiting.peek()
    num_seqs = sum(request.num_seqs for request in residency.running)
    if num_seqs + head.num_seqs > residency.config.max_num_seqs:
        return None
    num_blocks, prefixes = blocks_to_admit(residency, head)
    hits = set().union(*prefixes)
    num_tokens = sum(
        sequence.num_tokens - sequence.num_computed_tokens for sequence in head.sequences.values()
    )
    num_tokens -= len(hits) * residency.config.block_size
    return Claim(max(1, num_tokens), num_blocks + num_blocks_beside(residency, head))
