"""The pool is too small for all requests together, and the engine must make room by itself."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, require_chunks, together

WHOLE = 64  # blocks; no prompt has as many


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("chunk_blocks", [1, 3, WHOLE], ids=["chunk-1", "chunk-3", "whole"])
def test_tight_pool(preempt: PreemptHarness, chunk_blocks: int, prefix_caching: bool) -> None:
    if chunk_blocks < WHOLE:
        require_chunks(preempt)
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 5 * block, 6 * block),
        request(preempt, "r1", 3 * block + 1, 7 * block),
        request(preempt, "r2", 4 * block - 1, 6 * block),
        request(preempt, "r3", block, 7 * block),
    )
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        max_num_batched_tokens=max(chunk_blocks * block, 4),
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_block_size(preempt: PreemptHarness, size: int) -> None:
    if preempt.adapter.block_sizes and size not in preempt.adapter.block_sizes:
        pytest.skip(f"engine {preempt.adapter.name} has no blocks of {size}")
    workload = together([request(preempt, f"r{index}", 11 + 7 * index, 24) for index in range(3)])
    result = preempt.run(workload, "tight", block_size=size)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


def test_unequal_lengths_do_not_preempt_each_other_for_ever(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "short", block + 1, 8 * block),
        request(preempt, "long", 7 * block, 3 * block),
        request(preempt, "middle", 4 * block, 5 * block),
    )
    result = preempt.run(workload, "tight", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("stepped")
def test_late_arrivals(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 4 * block, 8 * block),
        request(preempt, "r1", 2 * block + 1, 7 * block, arrival_step=3),
        request(preempt, "r2", 3 * block, 6 * block, arrival_step=9),
    )
    result = preempt.run(workload, "tight", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("hold_blocks", "stepped")
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_squeezed_pool(preempt: PreemptHarness, prefix_caching: bool) -> None:
    """Free blocks are withheld for a while: the engine's own way out of an empty pool runs."""
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 5 * block) for i in range(3)])
    result = preempt.run(
        workload,
        plan=f"squeeze:all@{block}..{3 * block}",
        block_size=block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("block_reuse_order", "poison")
@pytest.mark.parametrize("order", ["fifo", "lifo", "random"])
def test_reuse_order_of_freed_blocks(preempt: PreemptHarness, order: str) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 3 * block + i, 6 * block) for i in range(3)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        options={"block_reuse_order": order, "poison": True},
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
