"""Limits of admission and length, met by requests that are preempted."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, companions, request, together


@pytest.mark.preempt_requires("watermark")
@pytest.mark.parametrize("watermark", [0.1, 0.3])
def test_newcomers_leave_the_watermark_free(preempt: PreemptHarness, watermark: float) -> None:
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{index}", 2 * block + index, 5 * block, arrival_step=2 * index)
            for index in range(5)
        ]
    )
    result = preempt.run(workload, 16, block_size=block, watermark=watermark)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("watermark", "preempt", "stepped")
def test_who_is_alone_may_use_the_watermark(preempt: PreemptHarness) -> None:
    """The request fills the pool; were blocks kept for nobody, it would wait for ever."""
    block = block_size(preempt)
    workload = together(request(preempt, "victim", 8 * block, block))
    result = preempt.run(
        workload, "minimal", plan="preempt:victim@out=1", block_size=block, watermark=0.3
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("watermark", "preempt", "stepped")
def test_the_waiting_keep_nothing_free(preempt: PreemptHarness) -> None:
    """Nobody runs beside the first, which fills the pool, although others wait: all return."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "large", 8 * block, block),
        [request(preempt, f"small{i}", block + i, 2 * block) for i in range(2)],
    )
    result = preempt.run(workload, 10, plan="preempt-all@step=2", block_size=block, watermark=0.3)
    result.assert_preempted(request="large")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("max_model_len", "preempt", "stepped")
@pytest.mark.parametrize("before", [1, 2])
def test_preempted_shortly_before_the_models_length(preempt: PreemptHarness, before: int) -> None:
    block = block_size(preempt)
    limit = 4 * block
    workload = together(
        request(preempt, "victim", 2 * block, 4 * block), companions(preempt, block, count=1)
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@out={2 * block - before}",
        block_size=block,
        max_model_len=limit,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("eos", "preempt", "stepped")
@pytest.mark.parametrize("phase", ["first", "second"])
def test_end_of_sequence_after_a_preemption(preempt: PreemptHarness, phase: str) -> None:
    """Every request loses its blocks, once early and once late; some end by themselves later on."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, 12 * block, ignore_eos=False) for i in range(4)]
    )
    step = 2 * block if phase == "first" else 5 * block
    result = preempt.run(workload, plan=f"preempt-all@step={step}", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("queue_limit", "preempt", "stepped", "hold_blocks")
def test_a_preempted_request_is_never_refused_by_the_queue_limit(preempt: PreemptHarness) -> None:
    """Three come back into a queue for one; who arrives meanwhile may be refused, later ones not.

    sglang refused a retracted request that met the limit (sgl-project/sglang, issue 37260).
    """
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, 6 * block, arrival_step=2 * i) for i in range(3)],
        request(preempt, "meanwhile", 2 * block, 2 * block, arrival_step=2 * block + 2),
        request(preempt, "late", 2 * block, 2 * block, arrival_step=4 * block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@step={2 * block}/squeeze:all@{2 * block + 1}..{2 * block + 4}",
        block_size=block,
        max_waiting_requests=1,
    )
    result.assert_preempted(at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("queue_limit", "preempt", "stepped")
def test_a_victim_takes_one_place_in_the_queue(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block, 4 * block),
        request(preempt, "newcomer", 2 * block, 2 * block, arrival_step=2 * block + 1),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={2 * block}/squeeze:all@{2 * block + 1}..{2 * block + 3}",
        block_size=block,
        max_waiting_requests=2,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("queue_limit", "abort", "preempt", "stepped", "hold_blocks")
@pytest.mark.parametrize("aborted", ["victim", "newcomer"])
def test_an_abort_gives_a_place_in_the_queue_back(preempt: PreemptHarness, aborted: str) -> None:
    """Two wait where two may; one of them is aborted, and the next to arrive has its place."""
    block = block_size(preempt)
    step = 2 * block
    workload = together(
        request(preempt, "victim", 2 * block, 4 * block),
        request(preempt, "newcomer", 2 * block, 2 * block, arrival_step=step + 1),
        request(preempt, "next", 2 * block, 2 * block, arrival_step=step + 3),
        request(preempt, "late", 2 * block, 2 * block, arrival_step=step + 8),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={step}/squeeze:all@{step + 1}..{step + 5}"
        f"/abort:{aborted}@step={step + 2}",
        block_size=block,
        max_waiting_requests=2,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()
