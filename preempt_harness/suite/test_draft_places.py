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


@pytest.mark.parametrize("count", [1, 3, 5])
def test_no_room_is_kept_for_drafts_behind_the_end(preempt: PreemptHarness, count: int) -> None:
    """Nobody drafts for an output of one token: its request needs the blocks of its prompt."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "first", 2 * block + 1, block - 2),
        request(preempt, "short", 2 * block, 1, arrival_step=1),
    )
    result = preempt.run(
        workload,
        5,
        block_size=block,
        speculative_config=same_model(preempt, count),
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("longest", ["first", "last"])
def test_drafts_take_no_block_that_another_needs_next(
    preempt: PreemptHarness, longest: str
) -> None:
    """Who drafts is given blocks beforehand; one that has a boundary to cross lacks them then."""
    block = block_size(preempt)
    if longest == "first":
        lengths = [3 * block, block - 1, block]
    else:
        lengths = [block + 1, block - 1, 2 * block]
    workload = together(
        [request(preempt, f"r{index}", length, 6 * block) for index, length in enumerate(lengths)]
    )
    result = preempt.run(
        workload,
        7,
        block_size=block,
        speculative_config=same_model(preempt, block + 1),
        enable_prefix_caching=False,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
