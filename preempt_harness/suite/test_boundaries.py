"""Preemption around block boundaries, where one block too few or too many goes unnoticed."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite._state import assert_stopped, find_stop
from preempt_harness.suite.shapes import block_size, companions, request, require_mode, together

OFFSETS = pytest.mark.parametrize("offset", [-1, 0, 1], ids=["minus-1", "exact", "plus-1"])


@OFFSETS
@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_preempted_at_a_boundary(
    preempt: PreemptHarness, offset: int, prefix_caching: bool
) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 4 * block), companions(preempt, block)
    )
    computed = 4 * block + offset
    result = preempt.run(
        workload,
        plan=f"preempt:victim@computed={computed}",
        block_size=block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", phase="decode")
    result.assert_matches_baseline()
    result.assert_clean()


@OFFSETS
@pytest.mark.parametrize("blocks", [1, 3])
def test_prompt_length_in_a_tight_pool(preempt: PreemptHarness, blocks: int, offset: int) -> None:
    block = block_size(preempt)
    length = blocks * block + offset
    workload = together(
        [request(preempt, f"r{index}", length, 5 * block + index) for index in range(3)]
    )
    result = preempt.run(workload, "tight", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@OFFSETS
@pytest.mark.preempt_requires("preempt", "stepped")
def test_resumed_prefill_ends_at_a_boundary(preempt: PreemptHarness, offset: int) -> None:
    """Prompt and outputs together fill blocks exactly, or miss by one, when the victim returns."""
    block = block_size(preempt)
    outputs = block + 1
    prompt = 3 * block + offset - outputs
    workload = together(
        request(preempt, "victim", max(prompt, 1), 3 * block), companions(preempt, block)
    )
    result = preempt.run(workload, plan=f"preempt:victim@out={outputs}", block_size=block)
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt")
@pytest.mark.parametrize("left", [1, 2])
def test_preempted_near_max_tokens(preempt: PreemptHarness, left: int) -> None:
    block = block_size(preempt)
    max_tokens = 2 * block
    workload = together(
        request(preempt, "victim", 2 * block, max_tokens), companions(preempt, block)
    )
    result = preempt.run(workload, plan=f"preempt:victim@out={max_tokens - left}", block_size=block)
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@OFFSETS
@pytest.mark.preempt_requires("preempt", "stepped", "stop_tokens")
def test_stopped_at_a_boundary(preempt: PreemptHarness, offset: int) -> None:
    """The stop token, two after the return, fills a block or misses its end by one."""
    block = block_size(preempt)
    stop = find_stop(preempt, 2 * block + 1, 2 * block, offset=offset)
    workload = together(
        request(preempt, "victim", stop.prompt, 6 * block, stop_token_ids=(stop.token_id,)),
        companions(preempt, block),
        request(preempt, "next", 3 * block, 2 * block, arrival_step=5 * block),
    )
    result = preempt.run(workload, plan=f"preempt:victim@out={stop.index - 1}", block_size=block)
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()
    assert_stopped(result, "victim", stop.index + 1)


@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "max_tokens", [pytest.param(0, marks=pytest.mark.preempt_requires("prompt_only")), 1]
)
def test_preempted_before_the_only_token_or_none(
    preempt: PreemptHarness, max_tokens: int, mode: str
) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        companions(preempt, block, count=1), request(preempt, "victim", 8 * block, max_tokens)
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@chunk=1:{mode}/preempt:victim@resume=1:{mode}",
        block_size=block,
        max_num_batched_tokens=2 * block,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
