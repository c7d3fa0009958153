"""The prefix cache is reset while a preempted request waits: nothing old is found afterwards."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request
from preempt_harness.workload import Operation, Workload

pytestmark = pytest.mark.preempt_requires("prefix_caching", "stepped", "hold_blocks")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "reset_prefix_cache", marks=pytest.mark.preempt_requires("reset_prefix_cache")
        ),
        pytest.param(
            "reset_running_requests", marks=pytest.mark.preempt_requires("reset_running_requests")
        ),
    ],
)
def test_reset_while_a_preempted_request_waits(preempt: PreemptHarness, kind: str) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(4 * block)
    workload = Workload(
        requests=[
            request(preempt, "victim", prompt, 4 * block),
            request(preempt, "sharer", [*prompt, prompt[0]], 2 * block, arrival_step=12),
        ],
        operations=[Operation(kind=kind, step=8)],
    )
    result = preempt.run(workload, plan="preempt:victim@step=6/squeeze:all@6..10", block_size=block)
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("reset_prefix_cache", "swap", "preempt")
@pytest.mark.parametrize("at", [7, 9], ids=["out-before", "out-after"])
def test_reset_about_a_swap(preempt: PreemptHarness, at: int) -> None:
    """What comes back from the host was computed before the reset, and nobody else may find it."""
    block = block_size(preempt)
    prompt = preempt.prompts.take(4 * block)
    workload = Workload(
        requests=[
            request(preempt, "victim", prompt, 5 * block),
            request(preempt, "sharer", [*prompt, prompt[0]], 2 * block, arrival_step=13),
        ],
        operations=[Operation(kind="reset_prefix_cache", step=8)],
    )
    result = preempt.run(workload, plan=f"preempt:victim@step={at}:swap", block_size=block)
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("reset_prefix_cache", "preempt")
def test_what_comes_after_a_reset_is_found_again(preempt: PreemptHarness) -> None:
    """Computed anew, lost, and computed once more: the cache begins afresh, it does not end."""
    block = block_size(preempt)
    prompt = preempt.prompts.take(4 * block)
    workload = Workload(
        requests=[
            request(preempt, "before", prompt, block),
            request(preempt, "first", list(prompt), 4 * block, arrival_step=block + 3),
            request(preempt, "sharer", [*prompt, prompt[0]], 2 * block, arrival_step=2 * block + 4),
        ],
        operations=[Operation(kind="reset_prefix_cache", step=block + 2)],
    )
    result = preempt.run(workload, plan="preempt:sharer@out=3", block_size=block)
    result.assert_preempted(request="sharer")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("reset_prefix_cache", "parallel_sampling", "sampling", "preempt")
@pytest.mark.preempt_requires("recompute")
def test_branches_after_a_reset_find_what_they_wrote(preempt: PreemptHarness) -> None:
    """What was begun after a reset is found again, whoever computed it: branches, too."""
    block = block_size(preempt)
    workload = Workload(
        requests=[
            request(preempt, "old", 2 * block, 8 * block),
            request(
                preempt, "new", block + 1, 6 * block, arrival_step=3, n=2, temperature=1.0, seed=5
            ),
        ],
        operations=[Operation(kind="reset_prefix_cache", step=2)],
    )
    result = preempt.run(workload, plan=f"preempt:new@out={4 * block}:recompute", block_size=block)
    result.assert_preempted(request="new", mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["work"])
