"""A running request of several branches evicts nobody in vain."""

from __future__ import annotations

from preempt_engine import LLM, SamplingParams


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
