"""Batches of every size, with preemptions between: what is prepared once for a size and used again.

Engines capture decode steps for a few numbers of rows and pad a batch to the next of them. What a
batch of another size left behind must not be read, and padding must write to nobody's block.
"""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, require_mode, together
from preempt_harness.workload import Workload

MOST = 10  # requests together; beyond 8, where many engines stop to prepare every number


def _one_ends_after_another(preempt: PreemptHarness, block: int) -> Workload:
    """Requests that arrive together, of which one ends every other step."""
    return together([request(preempt, f"r{i}", block - 1 + i % 3, 2 * i + 3) for i in range(MOST)])


@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_batches_shrink_between_preemptions(preempt: PreemptHarness, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    plan = "/".join(f"preempt:r{i}@out={i}:{mode}" for i in range(2, MOST, 2))
    result = preempt.run(
        _one_ends_after_another(preempt, block), plan=plan, block_size=block, max_num_seqs=MOST
    )
    result.assert_preempted(at_least=MOST // 2 - 1, mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped")
def test_all_return_into_batches_that_grow_again(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    result = preempt.run(
        _one_ends_after_another(preempt, block),
        plan="preempt-all@step=6/preempt-all@step=14",
        block_size=block,
        max_num_seqs=MOST,
        max_num_batched_tokens=4 * block,
    )
    result.assert_preempted(at_least=MOST, mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


def test_batches_of_changing_size_in_a_tight_pool(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", block + i, (2 + i % 4) * block) for i in range(MOST)]
    )
    result = preempt.run(workload, "tight", block_size=block, max_num_seqs=MOST)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
