"""Drafts wherever a victim stands, at each place of a block and a little beyond."""

from __future__ import annotations

import pytest

from preempt_harness.checks.drafts import ACCEPTED
from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, companions, options, request, together
from preempt_harness.suite.test_speculation import (
    FORCED,
    assert_drafted,
    same_model,
)

pytestmark = [pytest.mark.preempt_requires("speculation"), FORCED]


@pytest.mark.preempt_requires("swap")
@pytest.mark.parametrize("at", range(2, 8))
@pytest.mark.parametrize("count", [1, 3])
def test_swapped_out_with_blocks_for_drafts(preempt: PreemptHarness, count: int, at: int) -> None:
    """Blocks that it has for drafts to come go too, and the draft model's cache with the rest."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block, 6 * block), companions(preempt, block, count=1)
    )
    again = f"preempt:victim@out={at}:swap/preempt:victim@out={at + 2 * block + 1}:swap"
    result = preempt.run(
        workload,
        plan=again,
        block_size=block,
        speculative_config=same_model(preempt, count),
        options=options(preempt, preemption_mode="swap", block_reuse_order="lifo", poison=True),
    )
    result.assert_preempted(request="victim", mode="swap", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, ACCEPTED)
