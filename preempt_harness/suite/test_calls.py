"""The engine's own calls run the steps: whole batches, and streams that are read in turns."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import (
    block_size,
    companions,
    drawn,
    options,
    request,
    require_mode,
    together,
)

pytestmark = [
    pytest.mark.preempt_requires("own_loop", "stepped"),
    pytest.mark.parametrize("call", ["generate", "stream"]),
]
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def called(preempt: PreemptHarness, call: str, mode: str = "recompute") -> dict[str, Any]:
    """Options with which the engine's call runs the steps, and preempts in this way by itself."""
    return {**options(preempt, preemption_mode=mode), "call": call}


@MODES
def test_a_batch_in_a_tight_pool(preempt: PreemptHarness, call: str, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 4 * block) for index in range(4)]
    )
    result = preempt.run(workload, "tight", block_size=block, options=called(preempt, call, mode))
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("preempt")
def test_everybody_loses_its_blocks_at_once(preempt: PreemptHarness, call: str, mode: str) -> None:
    """In that step nobody runs, and the call must not take that for the end."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 3 * block) for index in range(3)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@step={block}:{mode}/preempt-all@step={2 * block + 1}:{mode}",
        block_size=block,
        options=called(preempt, call),
    )
    result.assert_preempted(at_least=6, mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("preempt", "hold_blocks")
def test_nobody_can_run_for_some_steps(preempt: PreemptHarness, call: str, mode: str) -> None:
    """All blocks are withheld while everybody waits to come back."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 3 * block) for index in range(2)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@step={block}:{mode}/squeeze:all@{block}..{block + 4}",
        block_size=block,
        options=called(preempt, call),
    )
    result.assert_preempted(at_least=2, mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("preempt", "abort")
@pytest.mark.parametrize("state", ["unread", "running", "waiting", "back"])
def test_one_is_given_up(preempt: PreemptHarness, call: str, mode: str, state: str) -> None:
    """A stream is closed: before it was ever read, while its request runs, waits for its
    return, or has just returned. The others go on, and nothing is left of it."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    step = block + 1
    plans = {
        "unread": "abort:victim@step=1",
        "running": f"abort:victim@step={step}",
        "waiting": (
            f"preempt:victim@step={step}:{mode}/squeeze:all@{step}..{step + 4}"
            f"/abort:victim@step={step + 2}"
        ),
        "back": f"preempt:victim@step={step}:{mode}/abort:victim@step={step + 3}",
    }
    result = preempt.run(
        together(
            companions(preempt, block, count=1), request(preempt, "victim", block + 1, 6 * block)
        ),
        plan=f"{plans[state]}/preempt:c0@step={3 * block}:{mode}",
        block_size=block,
        options=called(preempt, call),
    )
    result.assert_preempted(request="c0", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("preempt", "parallel_sampling", "sampling")
def test_several_outputs(preempt: PreemptHarness, call: str, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", block + 1, 4 * block, n=3, **drawn(preempt, 2)),
        companions(preempt, block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={block}:{mode}/preempt:victim@step={2 * block + 2}:{mode}",
        block_size=block,
        options=called(preempt, call),
    )
    result.assert_preempted(request="victim", mode=mode, at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "async_scheduling")
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_decided_ahead(preempt: PreemptHarness, call: str, depth: int) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 4 * block) for index in range(3)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt:r1@step={block}/preempt-all@step={2 * block}",
        block_size=block,
        async_scheduling=depth,
        options=called(preempt, call),
    )
    result.assert_preempted(request="r1", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "queue_limit")
def test_a_batch_longer_than_the_queue(preempt: PreemptHarness, call: str) -> None:
    """A batch waits for room in the queue, in which victims stand, too; a stream is refused."""
    if call == "stream":
        pytest.skip("streams are refused by a full queue as any request is")
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 3 * block) for index in range(6)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@step={block}/preempt-all@step={2 * block}",
        block_size=block,
        max_num_seqs=2,
        max_waiting_requests=1,
        options=called(preempt, call),
    )
    result.assert_preempted(at_least=4)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt")
def test_one_that_can_never_run_stands_among_others(preempt: PreemptHarness, call: str) -> None:
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", block + 1, 3 * block),
        request(preempt, "giant", 40 * block, 2),
        request(preempt, "r1", block, 3 * block),
    )
    result = preempt.run(
        workload,
        12,
        plan=f"preempt:r0@step={block}/preempt:r1@step={block + 1}",
        block_size=block,
        baseline="solo",
        options=called(preempt, call),
    )
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt")
def test_a_second_call_when_the_first_has_returned(preempt: PreemptHarness, call: str) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"first{index}", block + index, 2 * block) for index in range(2)],
        [
            request(preempt, f"second{index}", block + index, 2 * block, arrival_step=12 * block)
            for index in range(2)
        ],
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@step={block}/preempt:second1@out=2/preempt:second0@resume=1",
        block_size=block,
        options=called(preempt, call),
    )
    result.assert_preempted(request="second1")
    result.assert_matches_baseline()
    result.assert_clean()
