"""The cases of vLLM's artificial preemption tests, under the names they have there.

They came with the fix for `assert num_new_tokens == 1` (vllm-project/vllm#4422): a seeded random
preemption with a cap, a proof that it happened, greedy or beam outputs equal to an undisturbed run,
and requests that can never fit.
"""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, together
from preempt_harness.workload import BeamSpec

pytestmark = pytest.mark.preempt_requires("preempt", "stepped")
HALF = "random:p=0.5,max=20,seed=0"


@pytest.mark.preempt_requires("chunked_prefill")
def test_chunked_prefill_recompute(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 5 * block, 4 * block) for i in range(4)])
    result = preempt.run(
        workload, plan=HALF, block_size=block, max_num_batched_tokens=2 * block, max_num_seqs=4
    )
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


def test_preemption(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 3 * block, 6 * block) for i in range(4)])
    result = preempt.run(workload, plan=HALF, block_size=block)
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("swap", "beam_search")
def test_swap(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{i}", 2 * block, 4 * block, beam=BeamSpec(num_beams=2))
            for i in range(3)
        ]
    )
    result = preempt.run(workload, plan=f"{HALF}:swap", block_size=block)
    result.assert_preempted(mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("swap", "parallel_sampling")
def test_swap_of_several_outputs(preempt: PreemptHarness) -> None:
    """The assertion fell over here: a group of n > 1 comes back with n new tokens, not one."""
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{i}", 2 * block, 4 * block, n=3, temperature=1.0, seed=i)
            for i in range(3)
        ]
    )
    result = preempt.run(workload, plan=f"{HALF}:swap", block_size=block)
    result.assert_preempted(mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("swap", "beam_search")
def test_swap_infeasible(preempt: PreemptHarness) -> None:
    """A request too large for the pool, in swap mode with hardly any host blocks."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "giant", 40 * block, 4, beam=BeamSpec(num_beams=2)),
        [request(preempt, f"r{i}", 2 * block, 3 * block) for i in range(2)],
    )
    result = preempt.run(
        workload,
        14,
        plan="preempt:r0@out=2:swap",
        block_size=block,
        options={"preemption_mode": "swap", "swap_space_blocks": 2},
    )
    result.assert_preempted(request="r0")
    result.assert_clean()
    if not result.record.results["giant"].error:
        pytest.fail("the request that can never fit did not end with an error")


def test_preemption_infeasible(preempt: PreemptHarness) -> None:
    """A request whose output outgrows the pool ends by length; its neighbours run to their end."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "grows", 2 * block, 30 * block),
        [request(preempt, f"r{i}", 2 * block, 3 * block) for i in range(2)],
    )
    result = preempt.run(workload, 10, block_size=block)
    result.assert_preempted()
    result.assert_clean()
    output = result.record.results["grows"].outputs[0]
    if output.finish_reason != "length":
        pytest.fail(f"a request that outgrows the pool ended by {output.finish_reason!r}")
    for name in ("r0", "r1"):
        if len(result.record.results[name].outputs[0].token_ids) != 3 * block:
            pytest.fail(f"{name} did not run to its end")


@pytest.mark.preempt_requires("pool_limit", "parallel_sampling", "sampling")
def test_several_outputs_that_outgrow_the_pool(preempt: PreemptHarness) -> None:
    """They end by length, each with its share of the pool; their neighbour runs to its end."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "grow", 2 * block, 30 * block, n=3, temperature=1.0, seed=1),
        request(preempt, "other", 2 * block, 3 * block),
    )
    result = preempt.run(workload, 10, block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
    reasons = [output.finish_reason for output in result.record.results["grow"].outputs]
    if reasons != ["length"] * 3:
        pytest.fail(f"outputs that outgrow the pool ended by {reasons}")
    if len(result.record.results["other"].outputs[0].token_ids) != 3 * block:
        pytest.fail("their neighbour did not run to its end")
