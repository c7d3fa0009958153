"""Requests that come while others wait for their return, or when all have long ended."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, together

pytestmark = pytest.mark.preempt_requires("stepped")

LONG_AFTER = 200
"""Steps; no first batch of these scenarios takes as many."""


def unseeded(preempt: PreemptHarness) -> dict[str, Any]:
    """Sampling whose noise hangs on the engine's own numbering, where the engine samples."""
    return {"temperature": 1.0} if "sampling" in preempt.adapter.capabilities else {}


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_a_second_batch_after_a_tight_one(preempt: PreemptHarness, prefix_caching: bool) -> None:
    """The engine is as good as new when everything has ended: places, blocks, seeds."""
    block = block_size(preempt)
    prompts = [preempt.prompts.take(2 * block + index) for index in range(4)]
    workload = together(
        [
            request(
                preempt,
                f"{batch}{index}",
                list(prompt),
                6 * block,
                arrival_step=arrival_step,
                **unseeded(preempt),
            )
            for batch, arrival_step in (("first", 0), ("second", LONG_AFTER))
            for index, prompt in enumerate(prompts)
        ]
    )
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        max_num_seqs=4,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt")
def test_a_second_batch_after_all_were_preempted(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [
            request(
                preempt,
                f"{batch}{index}",
                2 * block + index,
                3 * block,
                arrival_step=arrival_step,
                **unseeded(preempt),
            )
            for batch, arrival_step in (("first", 0), ("second", LONG_AFTER))
            for index in range(3)
        ]
    )
    result = preempt.run(
        workload,
        plan="preempt-all@out=3/preempt:second1@out=2",
        block_size=block,
        max_num_seqs=3,
    )
    result.assert_preempted(at_least=4)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "hold_blocks")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_it_arrives_while_all_wait_for_their_return(preempt: PreemptHarness, mode: str) -> None:
    if mode not in preempt.adapter.capabilities:
        pytest.skip(f"engine {preempt.adapter.name} lacks {mode}")
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 2 * block + index, 4 * block) for index in range(3)],
        request(preempt, "late", 2 * block, 2 * block, arrival_step=8, **unseeded(preempt)),
    )
    result = preempt.run(
        workload, plan=f"preempt-all@step=6:{mode}/squeeze:all@7..11", block_size=block
    )
    result.assert_preempted(mode=mode, at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("blocks", [12, 14])
def test_newcomers_queue_behind_those_who_were_preempted(
    preempt: PreemptHarness, blocks: int
) -> None:
    """Small ones, at every other step while the larger take turns in the pool."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 6 * block) for index in range(3)],
        [
            request(preempt, f"n{step}", block - 1, block, arrival_step=step, **unseeded(preempt))
            for step in range(2 * block, 6 * block, 2)
        ],
    )
    result = preempt.run(workload, blocks, block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
