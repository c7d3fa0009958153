"""What holds whether or not anybody is preempted: isolation, waiting, reuse, refusal, giving up.

These run on engines that never preempt as well. Outputs are compared with each request alone.
"""

from __future__ import annotations

import pytest

from preempt_harness.budget import KVBudget
from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, drawn, request, together
from preempt_harness.workload import Operation, Workload


def test_company_changes_no_output(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", (1 + i) * block + i, 2 * block, logprobs=1) for i in range(4)]
        if "logprobs" in preempt.adapter.capabilities
        else [request(preempt, f"r{i}", (1 + i) * block + i, 2 * block) for i in range(4)]
    )
    result = preempt.run(
        workload, "roomy", block_size=block, baseline="solo", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean(require=["tokens", "delivery"])


def test_late_arrivals_change_no_output(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 2 * block, 3 * block),
        request(preempt, "r1", 3 * block + 1, 2 * block, arrival_step=3),
        request(preempt, "r2", block - 1, 2 * block, arrival_step=7),
    )
    result = preempt.run(
        workload, "roomy", block_size=block, baseline="solo", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()


def test_more_requests_than_places(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", block + i, 2 * block) for i in range(6)])
    result = preempt.run(
        workload,
        "roomy",
        block_size=block,
        max_num_seqs=2,
        baseline="solo",
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


def test_more_requests_than_the_pool_holds(preempt: PreemptHarness) -> None:
    """The pool has room for half of them: the others wait, or take turns."""
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 2 * block) for i in range(4)])
    admission = preempt.adapter.admission_model(preempt.settings(block_size=block))
    roomy = KVBudget.roomy(workload, admission).num_blocks
    result = preempt.run(
        workload, roomy // 2, block_size=block, baseline="solo", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching")
@pytest.mark.parametrize("extra", [0, 1, 5], ids=["whole", "one-more", "some-more"])
def test_a_prefix_that_is_asked_for_again(preempt: PreemptHarness, extra: int) -> None:
    """Whole, and followed by something else, while its first owner runs and after its end."""
    block = block_size(preempt)
    prefix = preempt.prompts.take(3 * block)
    more = [prefix + preempt.prompts.take(extra) for _ in range(2)]
    workload = together(
        request(preempt, "r0", prefix, 2 * block),
        request(preempt, "r1", more[0], 2 * block, arrival_step=block),
        request(preempt, "r2", more[1], 2 * block, arrival_step=5 * block),
    )
    result = preempt.run(
        workload, "roomy", block_size=block, baseline="solo", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("parallel_sampling")
@pytest.mark.parametrize("found", [False, True], ids=["short-prompt", "prefix-found"])
def test_several_outputs_with_one_token_to_compute(preempt: PreemptHarness, found: bool) -> None:
    """The prompt has one token, or all but one are found: what is there to be shared?"""
    block = block_size(preempt)
    prompt = preempt.prompts.take(block + 1 if found else 1)
    workload = together(
        request(preempt, "r0", prompt, block),
        request(preempt, "r1", prompt, block, arrival_step=2 * block, n=2, **drawn(preempt, 3)),
    )
    result = preempt.run(
        workload, "roomy", block_size=block, baseline="solo", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()


def test_a_request_too_large_is_refused_alone(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 2 * block, 2 * block),
        request(preempt, "giant", 40 * block, 2),
        request(preempt, "r1", block + 1, 2 * block),
    )
    result = preempt.run(workload, 16, block_size=block, baseline="solo", expect_preemption=False)
    result.assert_clean()
    for name in ("r0", "r1"):
        if len(result.record.results[name].outputs[0].token_ids) != 2 * block:
            pytest.fail(f"{name} did not run to its end beside a request that cannot fit")


@pytest.mark.preempt_requires("abort")
def test_giving_up_one_leaves_the_others(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    requests = [request(preempt, f"r{i}", 2 * block + i, 3 * block) for i in range(3)]
    workload = Workload(
        requests=requests, operations=[Operation(kind="abort", step=block, request="r1")]
    )
    result = preempt.run(
        workload, "roomy", block_size=block, baseline="solo", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()
