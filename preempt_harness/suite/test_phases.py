"""A request is preempted in each phase of its life, and comes back."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import (
    block_size,
    chunks,
    companions,
    request,
    require_chunks,
    together,
)

pytestmark = pytest.mark.preempt_requires("preempt", "stepped")

# The victim's prompt has 8 blocks and a step computes 2, so its prefill takes 4 chunks.
PHASES = {
    "prefill_first": "preempt:victim@chunk=1",
    "prefill_middle": "preempt:victim@chunk=2",
    "prefill_last": "preempt:victim@chunk=3",
    "first_decode": "preempt:victim@out=1",
    "decode": "preempt:victim@out=5",
    "just_resumed": "preempt:victim@out=2/preempt:victim@resume=1",
}


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("company", [0, 2], ids=["alone", "in-company"])
@pytest.mark.parametrize("phase", PHASES)
def test_preempted_in(
    preempt: PreemptHarness, phase: str, company: int, prefix_caching: bool
) -> None:
    if phase.startswith("prefill"):
        require_chunks(preempt)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 8 * block, 3 * block),
        companions(preempt, block, count=company),
    )
    result = preempt.run(
        workload,
        plan=PHASES[phase],
        block_size=block,
        **chunks(preempt, 2 * block),
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", phase=phase)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("chunked_prefill")
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunks_that_are_no_multiple_of_a_block(preempt: PreemptHarness, chunk: int) -> None:
    block = block_size(preempt)
    budget = max(chunk, 1)
    workload = together(request(preempt, "victim", 4 * block + 2, 2 * block))
    result = preempt.run(
        workload,
        plan="preempt:victim@chunk=3/preempt:victim@out=2",
        block_size=block,
        max_num_batched_tokens=budget,
    )
    result.assert_preempted(request="victim", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("chunked_prefill")
@pytest.mark.parametrize("offset", [1, 2, -1])
@pytest.mark.parametrize("phase", ["prefill_first", "prefill_middle", "prefill_last"])
def test_chunks_that_end_beside_a_block_boundary(
    preempt: PreemptHarness, phase: str, offset: int
) -> None:
    """The victim holds some tokens more, or one fewer, than its full blocks."""
    block = block_size(preempt)
    budget = 2 * block + offset
    workload = together(request(preempt, "victim", 3 * budget + 2, 2 * block))
    result = preempt.run(
        workload, plan=PHASES[phase], block_size=block, max_num_batched_tokens=budget
    )
    result.assert_preempted(request="victim", phase=phase)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("chunked_prefill", "mixed_steps")
def test_all_while_one_is_in_its_prefill_and_again(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "other", block, 4 * block), request(preempt, "victim", 8 * block, block)
    )
    result = preempt.run(
        workload,
        plan="preempt-all@step=3/preempt-all@step=6",
        block_size=block,
        max_num_batched_tokens=2 * block,
        enable_prefix_caching=False,
    )
    result.assert_preempted(request="victim", phase="prefill_middle", at_least=2)
    result.assert_preempted(request="other", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()
