"""Preemption by swap: blocks go to host memory and come back, or cannot, and nobody is hurt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, companions, request, together
from preempt_harness.suite.test_phases import PHASES

pytestmark = pytest.mark.preempt_requires("swap")

FORCED = pytest.mark.preempt_requires("preempt", "stepped")


def swapped(plan: str) -> str:
    """The same plan with every preemption by swap."""
    return "/".join(f"{action}:swap" for action in plan.split("/"))


def space(blocks: int | None = None) -> dict[str, object]:
    """Options that make swap the engine's own mode, with so many host blocks."""
    sized = {} if blocks is None else {"swap_space_blocks": blocks}
    return {"preemption_mode": "swap", **sized}


@FORCED
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("phase", PHASES)
def test_swapped_out_in(preempt: PreemptHarness, phase: str, prefix_caching: bool) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 8 * block, 3 * block), companions(preempt, block)
    )
    result = preempt.run(
        workload,
        plan=swapped(PHASES[phase]),
        block_size=block,
        max_num_batched_tokens=2 * block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", mode="swap", phase=phase)
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["minus-1", "exact", "plus-1"])
def test_swapped_out_at_a_boundary(preempt: PreemptHarness, offset: int) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 4 * block), companions(preempt, block)
    )
    result = preempt.run(
        workload, plan=f"preempt:victim@computed={4 * block + offset}:swap", block_size=block
    )
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("chunk_blocks", [1, 64], ids=["chunk-1", "whole"])
def test_tight_pool(preempt: PreemptHarness, chunk_blocks: int) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", (index + 1) * block, 6 * block) for index in range(4)]
    )
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        max_num_batched_tokens=chunk_blocks * block + 4,
        options=space(),
    )
    result.assert_preempted(mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("blocks", [0, 1, 4], ids=["none", "one-block", "some"])
def test_too_little_swap_space(preempt: PreemptHarness, blocks: int) -> None:
    """What cannot be swapped out is recomputed; the engine lives."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 2 * block + index, 6 * block) for index in range(4)]
    )
    result = preempt.run(workload, "tight", block_size=block, options=space(blocks))
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
def test_swap_and_recompute_in_one_run(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 3 * block + index, 4 * block) for index in range(4)]
    )
    result = preempt.run(
        workload,
        plan="preempt:r0@out=3:swap/preempt:r1@out=3/preempt:r2@out=5:swap/preempt:r0@out=9",
        block_size=block,
    )
    result.assert_preempted(mode="swap", at_least=2)
    result.assert_preempted(mode="recompute", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
def test_back_into_a_pool_that_it_fills(preempt: PreemptHarness) -> None:
    """Every block is needed for the return; were one to be left over, it would wait for ever."""
    block = block_size(preempt)
    result = preempt.run(
        together(request(preempt, "victim", 8 * block, block)),
        "minimal",
        plan="preempt:victim@out=3:swap",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
def test_swapped_out_twice(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 3 * block + 1, 4 * block), companions(preempt, block)
    )
    result = preempt.run(
        workload, plan="preempt:victim@out=2:swap/preempt:victim@resume=1:swap", block_size=block
    )
    result.assert_preempted(request="victim", mode="swap", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
def test_all_at_once(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 3 * block + index, 3 * block) for index in range(4)]
    )
    result = preempt.run(workload, plan="preempt-all@out=3:swap", block_size=block)
    result.assert_preempted(mode="swap", at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@pytest.mark.preempt_requires("abort")
def test_aborted_while_swapped_out(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block)
    workload = together(
        request(preempt, "victim", prompt, 4 * block),
        companions(preempt, block),
        request(preempt, "sharer", list(prompt), 2 * block, arrival_step=9),
    )
    result = preempt.run(
        workload, plan="preempt:victim@step=4:swap/abort:victim@step=5", block_size=block
    )
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
def test_a_used_swap_space_too_small_for_the_next(preempt: PreemptHarness) -> None:
    """One was there and has come back; what it left is less than another one needs, by one."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "small", block, 6 * block),
        request(preempt, "brief", block, block),  # some engines admit when somebody has finished
        request(preempt, "large", 5 * block, 3 * block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:small@out=2:swap/preempt:large@out={2 * block}:swap",
        block_size=block,
        options=space(6),
    )
    result.assert_preempted(request="small", mode="swap")
    result.assert_preempted(request="large")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@pytest.mark.preempt_requires("hold_blocks")
def test_one_that_would_fit_waits_behind_a_larger_one_that_is_swapped_out(
    preempt: PreemptHarness,
) -> None:
    """All are preempted: the large one has the swap space, the small ones have to be recomputed."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "large", 8 * block, 3 * block),
        [request(preempt, f"small{i}", block + i, 3 * block) for i in range(2)],
    )
    result = preempt.run(
        workload,
        20,
        plan="preempt-all@step=5:swap/squeeze:14@5..12",
        block_size=block,
        options=space(10),
    )
    result.assert_preempted(request="large", mode="swap")
    result.assert_preempted(request="small0")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@pytest.mark.preempt_requires("priority")
def test_one_goes_out_in_the_step_in_which_another_comes_back(preempt: PreemptHarness) -> None:
    """Its host blocks are free when that step is done, not before: the other is recomputed."""
    block = block_size(preempt)
    workload = together(
        replace(request(preempt, "first", 4 * block, 4 * block), priority=0),
        [
            replace(request(preempt, f"calm{i}", 2 * block + i, 4 * block), priority=2)
            for i in range(2)
        ],
        replace(request(preempt, "second", 4 * block, 2 * block, arrival_step=7), priority=1),
    )
    result = preempt.run(
        workload,
        16,
        plan="preempt:first@step=6:swap",
        block_size=block,
        scheduling_policy="priority",
        options=space(6),
    )
    result.assert_preempted(request="first", mode="swap")
    result.assert_preempted(request="calm1")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@pytest.mark.preempt_requires("parallel_sampling", "sampling")
def test_branches_that_fit_on_the_host_as_they_share(preempt: PreemptHarness) -> None:
    """Shared blocks are kept once: three branches of a long prompt need little more than one."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "first", 4 * block, 4 * block),
        request(preempt, "victim", 4 * block, 3 * block, n=3, temperature=1.0, seed=5),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={block}:swap",
        block_size=block,
        options=space(4 + 3),
    )
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@pytest.mark.preempt_requires("recompute", "prefix_caching", "parallel_sampling", "sampling")
@pytest.mark.parametrize("after", [3, 4, 5], ids=["before", "at-boundary", "behind"])
def test_two_that_share_blocks_go_in_one_step(preempt: PreemptHarness, after: int) -> None:
    """One is copied to the host, the other gives up the same blocks, and others need some now.

    The branches of the first reach a boundary together; beside the victims' the pool has no block
    for them.
    """
    block = block_size(preempt)
    text = preempt.prompts.take(2 * block)
    workload = together(
        request(preempt, "first", block + 1, 3 * block, n=3, temperature=1.0, seed=3),
        request(preempt, "recomputed", [*text, text[0]], 4 * block),
        request(preempt, "swapped", [*text, text[1]], 4 * block, arrival_step=1),
    )
    step = block + after
    result = preempt.run(
        workload,
        13,
        plan=f"preempt:swapped@step={step}:swap/preempt:recomputed@step={step}",
        block_size=block,
        enable_prefix_caching=True,
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("priority", "prefix_caching", "stepped")
def test_what_came_back_is_found_by_others(preempt: PreemptHarness) -> None:
    """While it was out, everything it had left on the device was overwritten."""
    block = block_size(preempt)
    text = preempt.prompts.take(3 * block)
    workload = together(
        replace(request(preempt, "victim", [*text, text[0]], 5 * block), priority=2),
        replace(request(preempt, "urgent", 11 * block, block, arrival_step=3), priority=0),
        replace(
            request(preempt, "later", [*text, text[1]], block, arrival_step=3 * block), priority=2
        ),
    )
    result = preempt.run(
        workload,
        12,
        block_size=block,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        max_num_batched_tokens=16 * block,
        options=space(),
    )
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()
