"""A running request of several branches evicts nobody in vain."""

from __future__ import annotations

import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.admission import place
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


def test_nobody_is_evicted_for_a_request_whose_cached_beginning_goes_meanwhile() -> None:
    """A prefix that begins with blocks nobody uses, and goes on with blocks of one that runs.

    While a victim is copied, the one that runs takes a block; were it one of the beginning, all
    that is behind it would have to be computed, for which the victim gave up too little.
    """
    prompt = list(range(4, 14))
    with LLM(
        "exact",
        num_kv_blocks=11,
        block_size=2,
        preemption_mode="swap",
        swap_space_blocks=20,
        scheduling_policy="priority",
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        llm.add_request(prompt, params, request_id="running", priority=0)
        llm.step()
        llm.preempt_request("running", "swap")
        llm.step()  # its blocks are cached, and it comes back into others
        llm.add_request(range(20, 25), params, request_id="calm", priority=1)
        llm.step()  # evicts the last three of them
        llm.step()
        llm.add_request(prompt, params, request_id="urgent", priority=0)
        placements = place(llm.scheduler.waiting.peek(), llm.scheduler.blocks)
        in_use = [llm.scheduler.blocks.ref_counts[block] > 0 for block in placements[0].hits]
        assert in_use == [False, False, True, True]
        llm.step()
        assert [request.request_id for request in llm.scheduler.running] == ["running", "calm"]
        assert llm.counters.num_preemptions == 1
