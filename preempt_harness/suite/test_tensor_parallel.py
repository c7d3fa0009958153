"""Several ranks, two where `--preempt-tp` asks for none: workers must know what comes back.

nano-vllm lost it here: a sequence preempted in decode returned to prefill, and the workers had no
token ids for it (GeeeekExplorer/nano-vllm, pull requests 103, 144, 145). Sending all ids in every
step was the first remedy, and too slow: the size of every message is judged too.
"""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.result import TrialResult
from preempt_harness.suite.shapes import (
    block_size,
    companions,
    request,
    require_mode,
    together,
)

pytestmark = pytest.mark.preempt_requires("tensor_parallel")


@pytest.fixture
def ranks(preempt: PreemptHarness) -> int:
    """As many as were asked for, else two."""
    settings = preempt.settings()
    if settings.model == "smollm2" and settings.tensor_parallel_size == 1:
        pytest.skip("the heads of smollm2 cannot be divided by 2 ranks; use --preempt-tp 3")
    return max(2, settings.tensor_parallel_size)


def required(result: TrialResult) -> list[str]:
    """Checks that must judge; those of work need the sizes of messages, which few engines show."""
    sees_messages = "StepSent" in result.record.header.observed
    return ["kvsan", "work"] if sees_messages else ["kvsan"]


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_preempted_in_decode(preempt: PreemptHarness, ranks: int, prefix_caching: bool) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 6 * block) for i in range(3)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        tensor_parallel_size=ranks,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(phase="decode")
    result.assert_matches_baseline()
    result.assert_clean(require=required(result))


@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_long_context(preempt: PreemptHarness, ranks: int, mode: str) -> None:
    """A decode step's message has the same size at any context."""
    if mode not in preempt.adapter.capabilities:
        pytest.skip(f"engine {preempt.adapter.name} lacks {mode}")
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 60 * block, 6 * block), companions(preempt, block)
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@out=4:{mode}/preempt:victim@out=12:{mode}",
        block_size=block,
        tensor_parallel_size=ranks,
    )
    result.assert_preempted(request="victim", mode=mode, at_least=2)
    result.assert_matches_baseline()
    result.assert_clean(require=required(result))


@pytest.mark.parametrize("size", [1, 8])
def test_block_size_reaches_every_rank(preempt: PreemptHarness, ranks: int, size: int) -> None:
    if preempt.adapter.block_sizes and size not in preempt.adapter.block_sizes:
        pytest.skip(f"engine {preempt.adapter.name} has no blocks of {size}")
    workload = together([request(preempt, f"r{i}", 9 + 5 * i, 20) for i in range(3)])
    result = preempt.run(workload, "tight", block_size=size, tensor_parallel_size=ranks)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill")
def test_preempted_within_prefill(preempt: PreemptHarness, ranks: int) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 8 * block, 3 * block), companions(preempt, block)
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@chunk=2/preempt:victim@out=1/preempt:victim@resume=2",
        block_size=block,
        max_num_batched_tokens=2 * block,
        tensor_parallel_size=ranks,
    )
    result.assert_preempted(request="victim", at_least=3)
    result.assert_matches_baseline()
    result.assert_clean(require=required(result))


@pytest.mark.preempt_requires("preempt", "stepped", "swap", "parallel_sampling", "sampling")
def test_branches_that_come_back_and_part(preempt: PreemptHarness, ranks: int) -> None:
    """Every rank has the shared block back before it copies it for the branch that writes."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 2 * block, n=3, temperature=1.0, seed=4),
        companions(preempt, block, count=1),
    )
    result = preempt.run(
        workload, plan="preempt:victim@step=1:swap", block_size=block, tensor_parallel_size=ranks
    )
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean(require=required(result))


@pytest.mark.preempt_requires("preempt", "stepped", "parallel_sampling", "sampling")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_branches_that_part_and_are_lost(preempt: PreemptHarness, ranks: int, mode: str) -> None:
    """Workers hear in one message that branches have split off, and that all are to be dropped."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 2 * block, n=3, temperature=1.0, seed=4),
        companions(preempt, block, count=1),
    )
    result = preempt.run(
        workload, plan=f"preempt:victim@out=1:{mode}", block_size=block, tensor_parallel_size=ranks
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean(require=required(result))


@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill")
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_chunks_of_a_token_or_two(preempt: PreemptHarness, ranks: int, budget: int) -> None:
    """The smallest message there is, and nobody wants logits of it."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "first", 1, 2 * block), request(preempt, "victim", 2 * block, block)
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@computed=5",
        block_size=block,
        max_num_batched_tokens=budget,
        tensor_parallel_size=ranks,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean(require=required(result))


@pytest.mark.preempt_requires("pool_limit")
def test_a_request_ends_with_the_pool(preempt: PreemptHarness, ranks: int) -> None:
    """Workers may have been started for a larger pool; the pool of this trial is what counts."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "grows", 2 * block, 30 * block),
        [request(preempt, f"r{i}", 2 * block, 3 * block) for i in range(2)],
    )
    result = preempt.run(workload, 10, block_size=block, tensor_parallel_size=ranks)
    result.assert_preempted()
    result.assert_clean()
    output = result.record.results["grows"].outputs[0]
    if output.finish_reason != "length":
        pytest.fail(f"a request that outgrows the pool ended by {output.finish_reason!r}")


@pytest.mark.preempt_requires("swap", "recompute")
def test_no_swap_space(preempt: PreemptHarness, ranks: int) -> None:
    """Who has none is computed anew, whatever the workers were started with."""
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 6 * block) for i in range(3)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        tensor_parallel_size=ranks,
        options={"preemption_mode": "swap", "swap_space_blocks": 0},
    )
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()
