"""The engine's own totals. They are kept where things happen, and only added to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine was built.

    Attributes:
        num_steps: steps that computed something.
        num_preemptions: requests that lost their blocks, counted each time.
        num_computed_tokens: tokens scheduled.
        num_recomputed_tokens: those of them that had been computed before.
        num_cached_tokens: prompt tokens found in the prefix cache at first admissions; what a
            preempted request finds again is not counted.
        num_generated_tokens: tokens given to users; of a beam search, those of its results.
        num_finished_requests: ended by themselves, errors included; aborted ones are not counted.
        num_drafted_tokens: drafts computed; each is accepted or rejected when its step is done.
        num_accepted_tokens: drafts that were equal to the tokens of their positions.
        num_rejected_tokens: the others, and those behind the end of their sequence.
        num_copied_blocks: blocks copied because somebody writes to what others share.
        num_swapped_out_blocks, num_swapped_in_blocks: blocks copied to the host and back.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished_requests: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    num_copied_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
