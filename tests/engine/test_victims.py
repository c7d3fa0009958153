"""A running request of several branches evicts nobody in vain."""

from __future__ import annotations

import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.victims import _growth_meanwhile


def test_who_needs_more_than_others_can_give_up_waits_with_its_blocks() -> None:
    """Five branches share a block that each must copy; the request after them has one block."""
    given = SamplingParams(max_tokens=3, ignore_eos=True)
    several = SamplingParams(n=5, seed=3, max_tokens=2, ignore_eos=True)
    with LLM("exact", num_kv_blocks=6, block_size=4, enable_prefix_caching=False) as llm:
        outputs = llm.generate(
            [[5, 6], [7, 8, 9, 10, 11, 12], [13, 14]], [given, several, given], use_tqdm=False
        )
        llm.scheduler.check_integrity()
    assert [output.num_preemptions for output in outputs] == [0, 0, 0]
    assert [len(branch.token_ids) for output in outputs for branch in output.outputs] == [
        *(3,),
        *(2,) * 5,
        *(3,),
    ]


@pytest.mark.parametrize(
    ("num_others", "num_free", "victims"),
    [(1, 0, 0), (1, 1, 1), (1, 2, 1), (2, 0, 2), (2, 1, 1), (3, 0, 2)],
)
def test_as_many_go_as_are_needed_and_nobody_if_all_are_too_few(
    num_others: int, num_free: int, victims: int
) -> None:
    """Three branches need a block each, at once; few are free, and the others have two each."""
    given = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    several = SamplingParams(n=3, seed=3, max_tokens=5, ignore_eos=True)
    with LLM("exact", num_kv_blocks=20, block_size=4, enable_prefix_caching=False) as llm:
        llm.add_request([5, 6, 7, 8], several)
        for index in range(num_others):
            llm.add_request([10 + index] * 6, given)
        llm.step()
        llm.hold_blocks(llm.scheduler.blocks.num_available_blocks - num_free)
        assert llm.scheduler.blocks.num_available_blocks == num_free
        llm.step()
        assert llm.counters.num_preemptions == victims
        assert len(llm.scheduler.running) == 1 + num_others - victims
        llm.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("num_free", "growth"),
    [(0, [2, 1, 1, 1]), (1, [2, 2, 1, 1]), (2, [3, 1, 1, 1]), (4, [3, 2, 1, 2])],
)
def test_who_finds_no_block_does_not_get_on_and_leaves_what_there_is(
    num_free: int, growth: list[int]
) -> None:
    """Until a victim's blocks are copied; of four that need 2, 1, 0 and 1 blocks now."""
    assert _growth_meanwhile([2, 1, 0, 1], [3, 2, 1, 2], num_free) == growth
