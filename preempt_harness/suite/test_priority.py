"""Priorities: a more urgent arrival may take blocks away, and state of others survives it."""

from __future__ import annotations

import msgspec
import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import (
    block_size,
    drawn,
    options,
    request,
    require_mode,
    together,
)
from preempt_harness.workload import Operation, RequestSpec, Workload

pytestmark = pytest.mark.preempt_requires("priority")


def urgent(spec: RequestSpec, priority: int) -> RequestSpec:
    """The request with another priority; lower is more urgent."""
    return msgspec.structs.replace(spec, priority=priority)


def test_an_urgent_arrival_preempts_the_least_urgent(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        urgent(request(preempt, "calm", 3 * block, 5 * block), 5),
        urgent(request(preempt, "calmer", 3 * block, 5 * block), 9),
        urgent(request(preempt, "urgent", 4 * block, 3 * block, arrival_step=4), 0),
    )
    result = preempt.run(workload, 12, block_size=block, scheduling_policy="priority")
    result.assert_preempted(request="calmer")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped")
def test_nobody_is_evicted_for_one_who_does_not_fit_all_the_same(preempt: PreemptHarness) -> None:
    """The urgent arrival needs more than the one calm request could give up."""
    block = block_size(preempt)
    workload = together(
        urgent(request(preempt, "older", 4 * block, 5 * block), 0),
        urgent(request(preempt, "calm", 2 * block, 5 * block), 9),
        urgent(request(preempt, "urgent", 7 * block, 2 * block, arrival_step=4), 1),
    )
    result = preempt.run(
        workload, 11, plan="preempt:calm@out=1", block_size=block, scheduling_policy="priority"
    )
    result.assert_preempted(request="calm")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("stepped", "swap")
@pytest.mark.parametrize("arrival", [3, 4, 5])
def test_nobody_is_swapped_out_for_one_who_does_not_fit_a_step_later(
    preempt: PreemptHarness, arrival: int
) -> None:
    """A victim's blocks are free when they are copied; by then who stays may have taken one."""
    block = block_size(preempt)
    growing = 3 * block - arrival  # before the arrival it has filled its third block
    workload = together(
        urgent(request(preempt, "older", growing, 5 * block), 0),
        urgent(request(preempt, "calm", 2 * block + 1, 5 * block), 9),
        urgent(request(preempt, "urgent", 5 * block, 2 * block, arrival_step=arrival), 1),
    )
    result = preempt.run(
        workload,
        8,
        block_size=block,
        max_num_batched_tokens=16 * block,
        scheduling_policy="priority",
        options={"preemption_mode": "swap"},
    )
    result.assert_preempted(mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


def test_equal_priorities_keep_arrival_order(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [urgent(request(preempt, f"r{i}", 2 * block + i, 5 * block), 3) for i in range(4)]
    )
    result = preempt.run(workload, 11, block_size=block, scheduling_policy="priority")
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("set_priority")
def test_priorities_that_change(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    requests = [urgent(request(preempt, f"r{i}", 2 * block + i, 5 * block), i) for i in range(4)]
    workload = Workload(
        requests=requests,
        operations=[
            Operation(kind="set_priority", step=4, request="r3", priority=-1),
            Operation(kind="set_priority", step=8, request="r0", priority=9),
        ],
    )
    result = preempt.run(workload, 11, block_size=block, scheduling_policy="priority")
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("chunked_prefill")
def test_a_victim_gives_its_scheduled_tokens_back(preempt: PreemptHarness) -> None:
    """Token budget and priorities: the victim may have been scheduled in this very step."""
    block = block_size(preempt)
    workload = together(
        urgent(request(preempt, "calm", 6 * block, 3 * block), 9),
        urgent(request(preempt, "middle", 2 * block, 6 * block, arrival_step=1), 5),
        urgent(request(preempt, "urgent", 5 * block, 3 * block, arrival_step=3), 0),
    )
    result = preempt.run(
        workload,
        12,
        block_size=block,
        scheduling_policy="priority",
        max_num_batched_tokens=2 * block,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("stepped")
def test_a_victim_keeps_its_priority(preempt: PreemptHarness) -> None:
    """It returns before those of its own priority that came after it, though they would fit."""
    block = block_size(preempt)
    workload = together(
        urgent(request(preempt, "older", 2 * block, 6 * block), 1),
        urgent(request(preempt, "victim", 3 * block, 5 * block), 2),
        urgent(request(preempt, "urgent", 4 * block, 2 * block, arrival_step=4), 0),
        [
            urgent(request(preempt, f"later{i}", block, 3 * block, arrival_step=5), 2)
            for i in range(2)
        ],
    )
    result = preempt.run(workload, 10, block_size=block, scheduling_policy="priority")
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "stepped")
def test_cached_blocks_are_room_for_the_urgent(preempt: PreemptHarness) -> None:
    """Nobody has to go for one that fits, although every block holds something."""
    block = block_size(preempt)
    workload = together(
        urgent(request(preempt, "before", 8 * block, block), 1),
        urgent(request(preempt, "calm", 2 * block, 6 * block, arrival_step=2), 2),
        urgent(request(preempt, "urgent", 4 * block, block, arrival_step=2 * block + 2), 0),
    )
    result = preempt.run(
        workload,
        13,
        block_size=block,
        scheduling_policy="priority",
        enable_prefix_caching=True,
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("set_priority", "stepped")
@pytest.mark.parametrize("step", [2, 6])
def test_who_has_become_the_least_urgent_is_the_next_victim(
    preempt: PreemptHarness, step: int
) -> None:
    block = block_size(preempt)
    requests = [urgent(request(preempt, f"r{i}", block + i, 6 * block), 1) for i in range(3)]
    workload = Workload(
        requests=requests,
        operations=[Operation(kind="set_priority", step=step, request="r0", priority=2)],
    )
    result = preempt.run(workload, "tight", block_size=block, scheduling_policy="priority")
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "hold_blocks")
def test_equals_do_not_evict_each_other(preempt: PreemptHarness) -> None:
    """The first waits for its blocks although it came before those who run."""
    block = block_size(preempt)
    workload = together(
        [urgent(request(preempt, f"r{i}", 3 * block, 4 * block), 1) for i in range(3)]
    )
    result = preempt.run(
        workload,
        13,
        plan="preempt:r0@out=2/squeeze:4@3..8",
        block_size=block,
        scheduling_policy="priority",
    )
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("set_priority", "preempt", "stepped", "hold_blocks")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("priority", [0, 3], ids=["more-urgent", "less-urgent"])
def test_priority_changed_while_all_wait(preempt: PreemptHarness, priority: int, mode: str) -> None:
    """Who is out, on the host or nowhere, returns in the place that the change gives it."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    changed = "r2" if priority == 0 else "r0"
    workload = Workload(
        requests=[urgent(request(preempt, f"r{i}", 2 * block + i, 4 * block), 1) for i in range(3)],
        operations=[
            Operation(kind="set_priority", step=step + 2, request=changed, priority=priority)
            for step in (block, 2 * block + 2)
        ],
    )
    result = preempt.run(
        workload,
        20,
        plan=f"preempt-all@step={block}:{mode}/squeeze:all@{block + 1}..{block + 5}",
        block_size=block,
        scheduling_policy="priority",
        options=options(preempt, preemption_mode=mode),
    )
    result.assert_preempted(mode=mode, at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("parallel_sampling", "stepped")
@pytest.mark.parametrize("n", [2, 3])
def test_a_victim_gives_up_the_places_of_all_its_outputs(preempt: PreemptHarness, n: int) -> None:
    """There are blocks for all; the least urgent alone has the places that the urgent ones want."""
    block = block_size(preempt)
    workload = together(
        urgent(request(preempt, "middle", block + 1, 5 * block), 1),
        urgent(request(preempt, "calm", 2 * block, 5 * block, n=n, **drawn(preempt, n)), 2),
        urgent(
            request(preempt, "urgent", block, 2 * block, n=n, arrival_step=4, **drawn(preempt, 5)),
            0,
        ),
    )
    result = preempt.run(
        workload,
        20 * n,
        block_size=block,
        scheduling_policy="priority",
        max_num_seqs=n + 1,
    )
    result.assert_preempted(request="calm")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "stepped")
@pytest.mark.parametrize("num_blocks", [8, 9, 10])
def test_an_urgent_one_that_begins_as_its_victims_do(
    preempt: PreemptHarness, num_blocks: int
) -> None:
    """What both have in common is shared while the victim runs, and no room when it has gone."""
    block = block_size(preempt)
    text = preempt.prompts.take(2 * block)
    more = preempt.prompts.take(3 * block + 2)
    workload = together(
        urgent(request(preempt, "older", 2 * block + 1, 3 * block), 0),
        urgent(request(preempt, "calm", [*text, more[0]], 2 * block - 2, arrival_step=1), 2),
        urgent(request(preempt, "urgent", [*text, *more[1:]], 2 * block, arrival_step=2), 1),
    )
    result = preempt.run(
        workload,
        num_blocks,
        block_size=block,
        scheduling_policy="priority",
        enable_prefix_caching=True,
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "stepped", "preempt", "swap")
@pytest.mark.parametrize("num_blocks", [11, 12, 14])
def test_an_urgent_one_whose_cached_beginning_may_go_meanwhile(
    preempt: PreemptHarness, num_blocks: int
) -> None:
    """The end of its text is in use, by one that came back from the host and begins a block next.

    The beginning is left of its old blocks; the others of these went to a calm one. In the smallest
    pool that one is not evicted: what it would give up is too little without the beginning.
    """
    block = block_size(preempt)
    text = preempt.prompts.take(6 * block - 2)
    workload = together(
        urgent(request(preempt, "holder", text, 2 * block), 0),
        urgent(request(preempt, "calm", 2 * block + 1, 2 * block, arrival_step=2), 1),
        urgent(request(preempt, "urgent", text, block, arrival_step=4), 0),
    )
    result = preempt.run(
        workload,
        num_blocks,
        plan="preempt:holder@step=1:swap",
        block_size=block,
        scheduling_policy="priority",
        enable_prefix_caching=True,
        options=options(preempt, preemption_mode="swap"),
    )
    result.assert_preempted(mode="swap", request="holder")
    result.assert_matches_baseline()
    result.assert_clean()
