"""Needless victims: the last one of a step that could have kept its blocks; and who could not."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake, work_findings
from fake_trials import make_workload

from preempt_harness.checks import Code, Finding
from preempt_harness.record import (
    BlocksAllocated,
    BlocksFreed,
    Event,
    Forked,
    PlanApplied,
    PoolCounts,
    Preempted,
    Scheduled,
    StepLaunched,
    SwappedOut,
)

replace = msgspec.structs.replace

THREE = [
    BlocksAllocated(0, "r0.0", [0, 1], 0),
    BlocksAllocated(0, "r1.0", [2, 3], 0),
    BlocksAllocated(0, "r2.0", [4, 5, 6], 0),
    Scheduled(0, "r0.0", 0, 4),
    StepLaunched(0),
    PoolCounts(0, 8, 1, 0, 7, 0),
]


def lost(
    request: str, blocks: list[int], reason: str = "out_of_blocks", *, more: int = 0
) -> list[Event]:
    """It knows as many tokens as its blocks hold, and so many more."""
    tokens = 2 * len(blocks) + more
    return [
        Preempted(1, request, "recompute", "decode", reason, tokens - 1, tokens),
        BlocksFreed(1, f"{request}.0", blocks),
    ]


def judged(*events: Event, **config: object) -> list[Finding]:
    """Of a pool of eight blocks of two tokens, of which three requests have seven."""
    record = run_fake(make_workload([4, 4, 6], max_tokens=4))
    record.header = replace(record.header, block_size=2, num_blocks=8, config=config)
    record.events = [*THREE, *events, StepLaunched(1), PoolCounts(1, 8, 0, 0, 8, 0)]
    return work_findings(record, "needless victims")


def test_who_would_have_fit_beside_the_others_is_found() -> None:
    grown = BlocksAllocated(1, "r0.0", [7, 4], 0)
    (found,) = judged(*lost("r2", [4, 5, 6]), *lost("r1", [2, 3]), grown)
    assert (found.code, found.step, found.request) == (Code.WORK_VAIN, 1, "r1")
    assert "gives up 2, and when the step is launched 4 are free" in found.message


def test_whose_blocks_were_needed_is_not() -> None:
    assert judged(*lost("r2", [4, 5, 6]), BlocksAllocated(1, "r0.0", [7, 4], 0)) == []
    # The first of two may be more than the second needed to be: victims have an order.
    grown = BlocksAllocated(1, "r0.0", [7, 4, 5, 6, 2], 0)
    assert judged(*lost("r2", [4, 5, 6]), *lost("r1", [2, 3]), grown) == []


def test_one_victim_more_is_found_though_the_blocks_were_just_enough() -> None:
    grown = BlocksAllocated(1, "r0.0", [7, 4, 5, 6], 0)
    (found,) = judged(*lost("r2", [4, 5, 6]), *lost("r1", [2, 3]), grown)
    assert found.request == "r1"


def test_what_it_needs_itself_to_go_on_counts() -> None:
    assert judged(*lost("r2", [4, 5, 6], more=1), BlocksAllocated(1, "r0.0", [7], 0)) == []
    assert judged(*lost("r2", [4, 5, 6], more=1))  # one is free, and it needs no more
    assert judged(*lost("r2", [4, 5, 6]), BlocksAllocated(1, "r0.0", [7], 0))  # it needs none
    assert judged(*lost("r2", [4, 5, 6]), num_speculative_tokens=2) == []


@pytest.mark.parametrize("reason", ["forced", "priority"])
def test_other_reasons_are_not_judged(reason: str) -> None:
    assert judged(*lost("r2", [4, 5, 6], reason)) == []


def test_steps_in_which_blocks_are_kept_back_are_not_judged() -> None:
    assert judged(*lost("r2", [4, 5, 6]), SwappedOut(1, "r2", [(4, 0)])) == []
    assert judged(*lost("r2", [4, 5, 6]), async_scheduling=1) == []
    record = [PlanApplied(1, "squeeze:all@1..3"), PoolCounts(1, 8, 0, 0, 4, 4)]
    assert judged(*record, *lost("r2", [4, 5, 6])) == []


def test_blocks_that_the_engine_keeps_are_no_room() -> None:
    assert judged(*lost("r2", [4, 5, 6], more=1), reserved_blocks=1) == []


@pytest.mark.parametrize(("grown", "is_found"), [([7], True), ([7, 2], False)])
def test_a_victim_of_several_outputs_needs_a_block_for_each(
    grown: list[int], is_found: bool
) -> None:
    """Both have filled the three blocks that they share; r1 has ended."""
    before = [
        Forked(1, "r2.0", "r2.1"),
        BlocksFreed(1, "r1.0", [2, 3]),
        BlocksAllocated(1, "r0.0", grown, 0),
    ]
    victim = Preempted(1, "r2", "recompute", "decode", "out_of_blocks", 12, 14)
    freed = [BlocksFreed(1, f"r2.{branch}", [4, 5, 6]) for branch in (0, 1)]
    assert bool(judged(*before, victim, *freed)) == is_found
    assert not judged(*before, replace(victim, seq="r2.1"), freed[1])  # alone
