"""Requests that can never run, or outgrow the pool: they end clearly and hurt no neighbour."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, together


@pytest.mark.preempt_requires("preempt")
def test_a_prompt_larger_than_the_pool_ends_alone(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 2 * block, 3 * block),
        request(preempt, "giant", 40 * block, 2),
        request(preempt, "r1", block + 1, 3 * block),
    )
    result = preempt.run(workload, 12, plan="preempt:r0@out=3", block_size=block)
    result.assert_preempted(request="r0")
    result.assert_clean()
    giant = result.record.results["giant"]
    if giant.error == "" or any(output.token_ids for output in giant.outputs):
        pytest.fail(f"the request that cannot fit gave {giant}")
    for name in ("r0", "r1"):
        if len(result.record.results[name].outputs[0].token_ids) != 3 * block:
            pytest.fail(f"{name} did not run to its end beside a request that cannot fit")


@pytest.mark.preempt_requires("stepped")
def test_a_prompt_larger_than_the_pool_is_answered_by_an_idle_engine(
    preempt: PreemptHarness,
) -> None:
    """All others have ended, and nothing is to compute: the refusal is an output all the same."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 2 * block, block),
        request(preempt, "giant", 40 * block, 2, arrival_step=4 * block),
    )
    result = preempt.run(workload, 12, block_size=block, expect_preemption=False)
    result.assert_clean()
    if result.record.results["giant"].error == "":
        pytest.fail("the request that cannot fit did not end with an error")


def test_a_pool_in_which_each_fits_only_alone(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{index}", 2 * block, 4 * block) for index in range(3)])
    result = preempt.run(workload, "minimal", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
