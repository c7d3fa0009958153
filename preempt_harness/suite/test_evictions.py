"""A victim comes back when a part of its prefix is still cached and a part was evicted.

Free blocks are withheld right after the preemption, and the cached ones are taken with them, the
ends of prefixes first, until `left` are left; then all are given back.
"""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, together

pytestmark = pytest.mark.preempt_requires("preempt", "hold_blocks", "stepped", "prefix_caching")

POOL = 40


def evict(step: int, used: int, left: int) -> str:
    """Before `step`, take every block that is not in use but for `left` cached ones."""
    return f"squeeze:{POOL - used - left}@{step}..{step + 1}"


# A prompt of 8 blocks, 2 a step: after so many steps the victim is in this phase.
STEPS = {"prefill_first": 1, "prefill_middle": 2, "prefill_last": 3}


@pytest.mark.preempt_requires("chunked_prefill")
@pytest.mark.parametrize("phase", STEPS)
def test_during_prefill(preempt: PreemptHarness, phase: str) -> None:
    block = block_size(preempt)
    step = STEPS[phase]
    result = preempt.run(
        together(request(preempt, "victim", 8 * block, 2 * block)),
        POOL,
        f"preempt:victim@step={step}/{evict(step + 1, used=0, left=1)}",
        block_size=block,
        max_num_batched_tokens=2 * block,
    )
    result.assert_preempted(request="victim", phase=phase)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("extra", [0, 1], ids=["boundary", "inside"])
def test_during_decode(preempt: PreemptHarness, extra: int) -> None:
    block = block_size(preempt)
    result = preempt.run(
        together(request(preempt, "victim", 4 * block + extra, 3 * block)),
        POOL,
        f"preempt:victim@step={block}/{evict(block + 1, used=0, left=2)}",
        block_size=block,
    )
    result.assert_preempted(request="victim", phase="decode")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.parametrize("others", [0, 1], ids=["all", "several"])
def test_two_victims(preempt: PreemptHarness, others: int) -> None:
    """Both lose their blocks in one step; the first keeps one block of its prefix, or none."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 4 * block, 3 * block),
        request(preempt, "r1", 4 * block, 3 * block),
        [request(preempt, "other", block, 4 * block)] * others,
    )
    step = 2
    # The other request holds 2 blocks by then; 4 full blocks of r1 and 1 of r0 stay cached.
    result = preempt.run(
        workload,
        POOL,
        f"preempt:r0@step={step}/preempt:r1@step={step}/"
        + evict(step + 1, used=2 * others, left=5),
        block_size=block,
    )
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


def test_with_a_later_sharer(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    prefix = preempt.prompts.take(3 * block)
    workload = together(
        request(preempt, "victim", prefix + preempt.prompts.take(block + 1), 3 * block),
        request(preempt, "sharer", prefix + preempt.prompts.take(2), 2 * block, arrival_step=6),
    )
    result = preempt.run(
        workload,
        POOL,
        f"preempt:victim@step=3/{evict(4, used=0, left=2)}",
        block_size=block,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("abort")
def test_an_abort_leaves_what_others_share(preempt: PreemptHarness) -> None:
    """One of two with the same text is aborted; who comes later finds the text with the other."""
    block = block_size(preempt)
    text = preempt.prompts.take(3 * block)
    workload = together(
        request(preempt, "aborted", [*text, text[0]], 4 * block),
        request(preempt, "stays", [*text, text[1]], 5 * block, arrival_step=2),
        request(preempt, "later", [*text, text[2]], 3 * block, arrival_step=block + 4),
    )
    result = preempt.run(
        workload,
        POOL,
        f"abort:aborted@step={block + 2}/preempt:later@out=3",
        block_size=block,
        enable_prefix_caching=True,
    )
    result.assert_preempted(request="later")
    result.assert_matches_baseline()
    result.assert_clean()
