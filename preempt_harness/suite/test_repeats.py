"""The same request more than once, all requests at once, and a request that is alone."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, chunks, companions, request, together

CACHE = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])


@CACHE
@pytest.mark.preempt_requires("preempt")
def test_twice_in_a_row(preempt: PreemptHarness, prefix_caching: bool) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 3 * block + 1, 4 * block), companions(preempt, block)
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@out=3/preempt:victim@out=6",
        block_size=block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@CACHE
@pytest.mark.preempt_requires("preempt", "stepped")
def test_again_before_the_lost_tokens_are_recomputed(
    preempt: PreemptHarness, prefix_caching: bool
) -> None:
    block = block_size(preempt)
    workload = together(request(preempt, "victim", 6 * block, 3 * block))
    result = preempt.run(
        workload,
        plan="preempt:victim@out=4/preempt:victim@resume=1/preempt:victim@resume=2",
        block_size=block,
        enable_prefix_caching=prefix_caching,
        **chunks(preempt, 2 * block),
    )
    result.assert_preempted(request="victim", at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@CACHE
@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("at", ["chunk=1", "out=1", "out=5"], ids=["prefill", "first", "decode"])
def test_all_at_once(preempt: PreemptHarness, at: str, prefix_caching: bool) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 3 * block + index, 3 * block) for index in range(4)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@{at}",
        block_size=block,
        max_num_batched_tokens=8 * block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@CACHE
@pytest.mark.preempt_requires("preempt")
def test_alone_in_a_pool_that_just_fits(preempt: PreemptHarness, prefix_caching: bool) -> None:
    block = block_size(preempt)
    workload = together(request(preempt, "victim", 2 * block + 1, 3 * block))
    result = preempt.run(
        workload,
        "minimal",
        plan="preempt:victim@out=1/preempt:victim@out=7",
        block_size=block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("seed", range(4))
def test_at_random(preempt: PreemptHarness, seed: int) -> None:
    """Artificial preemption in the old way: with a probability, so many times at most."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 2 * block + 3 * index, 4 * block) for index in range(4)]
    )
    result = preempt.run(workload, plan=f"random:p=0.15,max=12,seed={seed}", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped")
def test_every_few_steps(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 4 * block) for i in range(3)])
    result = preempt.run(workload, plan="every:5,max=4", block_size=block)
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


# A victim of 8 blocks arrives at step 3 and computes 2 blocks a step, beside three that decode.
VICTIM_STEPS = {"prefill_first": 4, "prefill_middle": 5, "prefill_last": 6, "first_decode": 7}


@CACHE
@pytest.mark.preempt_requires("preempt", "stepped", "mixed_steps")
@pytest.mark.parametrize("phase", VICTIM_STEPS)
def test_two_of_several_at_once(preempt: PreemptHarness, phase: str, prefix_caching: bool) -> None:
    block = block_size(preempt)
    step = VICTIM_STEPS[phase]
    workload = together(
        companions(preempt, block, count=3),
        request(preempt, "victim", 8 * block, 2 * block, arrival_step=3),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:c1@step={step}/preempt:victim@step={step}",
        block_size=block,
        max_num_batched_tokens=2 * block + 3,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", phase=phase)
    result.assert_preempted(request="c1", phase="decode")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "prefix_caching")
def test_two_of_several_with_a_later_sharer(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    prefix = preempt.prompts.take(2 * block)
    workload = together(
        request(preempt, "victim", prefix + preempt.prompts.take(3), 3 * block),
        companions(preempt, block, count=2),
        request(preempt, "sharer", prefix + preempt.prompts.take(5), 2 * block, arrival_step=6),
    )
    result = preempt.run(workload, plan="preempt:victim@step=4/preempt:c0@step=4", block_size=block)
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()
