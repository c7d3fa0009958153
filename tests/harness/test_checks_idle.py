"""Idle room: the next in the queue waits although there is room; and what is within its rights."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.faults import Fault, Patch, plant
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    Event,
    Finished,
    PlanApplied,
    PoolCounts,
    Preempted,
    PriorityChanged,
    Scheduled,
    SwappedOut,
    TokensDelivered,
)

replace = msgspec.structs.replace
PROMISES = ("mixed_steps", "evicts_for_urgent", "drafts_last")
CONFIG = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "preemption_mode": "swap"}


def judged(
    part: str, *events: Event, promises: tuple[str, ...] = PROMISES, **config: object
) -> list[Finding]:
    """Findings of one part of a log that consists of these events; blocks of four tokens."""
    record = run_fake(make_workload([6, 9, 7], max_tokens=4))
    record.header = replace(
        record.header,
        capabilities=["recompute", "swap", "strict_order", *promises],
        block_size=4,
        num_blocks=8,
        config={**CONFIG, **config},
        observed=[*record.header.observed, "SwappedOut", "SwappedIn"],
    )
    record.events = list(events)
    report = run_checks(record, ["work"])
    return [
        finding
        for result in report.of("work")
        if result.part == part
        for finding in result.findings
    ]


def arrived(request: str, num_tokens: int = 6) -> Arrived:
    return Arrived(0, request, [1] * num_tokens, 4, 0)


def pool(step: int, free: int, held: int = 0) -> PoolCounts:
    return PoolCounts(step, 8, free, 0, 8 - free - held, held)


def waits(free: int, *more: Event, end: int = 6, **config: Any) -> list[Finding]:
    """r0 runs and r1, of two blocks, waits in step 1, before which so many blocks are free."""
    return judged(
        "idle room",
        arrived("r0"),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        Scheduled(0, "r0.0", 0, 6),
        pool(0, free),
        arrived("r1"),
        *more,
        Scheduled(1, "r0.0", 6, end + 1),
        pool(1, free),
        **config,
    )


def test_who_waits_beside_room_is_found() -> None:
    (found,) = waits(2)
    assert (found.code, found.step, found.request) == (Code.WORK_IDLE, 1, "r1")
    assert "2 blocks are free and it takes 2" in found.message


def test_who_lacks_a_block_a_place_or_a_token_waits_by_right() -> None:
    assert waits(1) == []
    assert waits(2, max_num_seqs=1) == []
    assert waits(2, end=13) == []  # eight tokens, the whole budget
    assert waits(3, watermark=0.25) == []
    assert waits(4, watermark=0.25)
    assert waits(2, num_speculative_tokens=5) == []
    assert waits(3, num_speculative_tokens=5)


def test_room_for_drafts_ends_with_the_output() -> None:
    """r1 ends within its third block; where drafts do not come last, a run is a run."""
    assert waits(2, num_speculative_tokens=20) == []
    assert waits(3, num_speculative_tokens=20)
    assert waits(3, num_speculative_tokens=5, promises=("mixed_steps",)) == []


def test_a_prompt_that_is_not_mixed_in_must_fit_in_the_budget() -> None:
    assert waits(2, promises=(), end=8, max_num_batched_tokens=9)
    assert waits(2, promises=(), end=9, max_num_batched_tokens=9) == []
    assert waits(2, end=9, max_num_batched_tokens=9)


def test_blocks_that_the_engine_keeps_are_not_withheld() -> None:
    log = [
        arrived("r0"),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        pool(0, 5, held=1),
        arrived("r1"),
        Scheduled(1, "r0.0", 6, 7),
        pool(1, 5, held=1),
    ]
    assert judged("idle room", *log) == []
    assert judged("idle room", *log, reserved_blocks=1)


def test_blocks_of_the_step_itself_are_not_room() -> None:
    assert waits(2, BlocksAllocated(1, "r0.0", [2], 0)) == []
    assert waits(3, BlocksAllocated(1, "r0.0", [2], 0))


def drafts(*more: Event, free: int, end: int, **config: Any) -> list[Finding]:
    """r0 knows seven tokens, fills two blocks and computes up to `end`; r1 waits in step 1."""
    return judged(
        "idle room",
        arrived("r0"),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        Scheduled(0, "r0.0", 0, 6),
        TokensDelivered(0, "r0.0", [9], None, ""),
        pool(0, free),
        arrived("r1"),
        *more,
        Scheduled(1, "r0.0", 6, end),
        pool(1, free),
        num_speculative_tokens=4,
        **config,
    )


GRANTED = BlocksAllocated(1, "r0.0", [2], 0)


def test_what_drafts_take_is_room() -> None:
    (found,) = drafts(GRANTED, free=3, end=9)  # r1 takes two blocks, and one for its own drafts
    assert (found.code, found.step, found.request) == (Code.WORK_DRAFTS, 1, "r1")
    assert "2 are free and 1 were taken for drafts" in found.message
    (found,) = drafts(free=3, end=8, max_num_batched_tokens=2)
    assert found.code == Code.WORK_DRAFTS
    assert "1 of the 2 tokens computed (of 2)" in found.message


def test_drafts_that_may_come_first_are_no_room() -> None:
    assert drafts(GRANTED, free=3, end=9, promises=("mixed_steps",)) == []
    assert drafts(free=3, end=10, promises=("mixed_steps",)) == []  # four tokens left: no run
    assert drafts(free=3, end=9, promises=("mixed_steps",))


def test_drafts_may_have_what_the_next_cannot_use() -> None:
    assert drafts(GRANTED, free=2, end=9) == []  # it lacks a block without them, too
    assert drafts(GRANTED, free=3, end=9, max_num_seqs=1) == []
    assert drafts(free=3, end=8, max_num_batched_tokens=1) == []
    assert drafts(GRANTED, free=3, end=9, async_scheduling=1) == []
    come = [arrived("r2"), BlocksAllocated(1, "r1.0", [3, 4], 0), Scheduled(1, "r1.0", 0, 6)]
    assert drafts(GRANTED, *come, free=5, end=9, max_num_seqs=3) == []  # room is kept for one


def test_nobody_is_preempted_for_drafts() -> None:
    victim = Preempted(1, "r1", "recompute", "decode", "out_of_blocks", 6, 7)
    (found,) = drafts(victim, GRANTED, free=0, end=9)
    assert (found.code, found.step, found.request) == (Code.WORK_DRAFTS, 1, "r1")
    assert "1 blocks are taken for drafts" in found.message
    assert drafts(victim, free=0, end=8) == []  # drafts in blocks that it has anyway
    forced = replace(victim, reason="forced")
    assert drafts(forced, GRANTED, free=0, end=9) == []


def granted(*more: Event, prompt: int = 6) -> list[Finding]:
    """r0 is given a block behind its token of step 0; in step 1 r1 is preempted for want of one."""
    return judged(
        "idle room",
        arrived("r0", prompt),
        arrived("r1"),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        Scheduled(0, "r0.0", 0, prompt),
        TokensDelivered(0, "r0.0", [9], None, ""),
        BlocksAllocated(0, "r0.0", [2], 0),
        pool(0, 0),
        *more,
        Preempted(1, "r1", "recompute", "decode", "out_of_blocks", 6, 7),
        Scheduled(1, "r0.0", prompt, prompt + 1),
        pool(1, 0),
        num_speculative_tokens=4,
    )


def test_nobody_is_preempted_for_drafts_to_come() -> None:
    (found,) = granted()
    assert (found.code, found.step, found.request) == (Code.WORK_DRAFTS, 1, "r1")
    assert "1 blocks are taken for drafts" in found.message
    assert granted(prompt=8) == []  # its ninth token needs the third block
    assert granted(PlanApplied(1, "squeeze:all@1..3")) == []


def test_steps_with_reasons_of_their_own_are_excused() -> None:
    assert waits(4, PlanApplied(1, "squeeze:all@1..3")) == []
    assert waits(4, Preempted(1, "r0", "recompute", "decode", "out_of_blocks", 6, 7)) == []
    assert waits(4, async_scheduling=1) == []
    held = [arrived("r0"), pool(0, 4, held=1), pool(1, 4, held=1)]
    assert judged("idle room", *held) == []
    assert judged("idle room", arrived("r0"), pool(0, 4), pool(1, 4))


def test_who_ends_in_the_step_had_its_place_in_it() -> None:
    log = [
        arrived("r0"),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        Scheduled(0, "r0.0", 0, 6),
        pool(0, 6),
        arrived("r1"),
        Scheduled(1, "r0.0", 6, 7),
        BlocksFreed(1, "r0.0", [0, 1]),
        Finished(1, "r0", "length"),
        pool(1, 8),
    ]
    assert judged("idle room", *log, max_num_seqs=1) == []
    assert judged("idle room", *log, pool(2, 8), max_num_seqs=1)


BRANCHES_COUNT_FOR_EVER = Fault(
    name="ended-branches-count",
    mechanism="a branch that has ended still counts for max_num_seqs",
    source="mechanism",
    expected=("WORK",),
    patches=(Patch("preempt_engine.branches:Branches.end", "request.num_seqs -= 1", "pass"),),
)


def test_places_of_branches_that_ended_are_room() -> None:
    harness = PreemptHarness(EmbeddedAdapter(), {"block_size": 4})
    spec = harness.workload(requests=4, prompt_tokens=5, max_tokens=16)
    stops = tuple(range(4, 20))
    first = replace(spec.requests[0].sampling, n=3, temperature=1.0, seed=1, stop_token_ids=stops)
    requests = [replace(spec.requests[0], sampling=first), *spec.requests[1:]]
    workload = replace(spec, requests=requests)

    def idle() -> list[Finding]:
        result = harness.run(workload, 64, max_num_seqs=3, baseline=None, expect_preemption=False)
        return [found for found in result.findings if found.code == Code.WORK_IDLE]

    assert idle() == []
    with plant(BRANCHES_COUNT_FOR_EVER) as planted:
        assert idle()
    assert planted.num_reached


def evicted(*more: Event, mode: str = "recompute", free: int = 0, places: int = 2) -> list[Finding]:
    """r1, urgent and of two blocks, comes while r0 and r2 run, of which one or two have to go."""
    return judged(
        "idle room",
        replace(arrived("r0"), priority=1),
        replace(arrived("r2"), priority=1),
        BlocksAllocated(0, "r0.0", [0, 1, 2], 0),
        BlocksAllocated(0, "r2.0", [3, 4, 5, 6], 0),
        Scheduled(0, "r0.0", 0, 3),
        pool(0, free),
        arrived("r1"),
        Preempted(1, "r2", mode, "decode", "priority", 6, 7),
        BlocksFreed(1, "r2.0", [3, 4, 5, 6]),
        *more,
        pool(1, free),
        max_num_seqs=places,
    )


SECOND = (Preempted(1, "r0", "recompute", "decode", "priority", 6, 7),)


def test_a_second_victim_beside_room_is_found() -> None:
    (found,) = evicted(*SECOND)
    assert (found.code, found.request) == (Code.WORK_VAIN, "r0")
    assert evicted() == []
    assert evicted(*SECOND, places=1) == []
    assert evicted(*SECOND, mode="swap") == []  # the first one's blocks are still to be copied
    assert evicted(*SECOND, mode="swap", free=4)  # its place was enough


def kept_out(
    *more: Event, priority: int = 1, policy: str = "priority", free: int = 0, **promises: Any
) -> list[Finding]:
    """r1, of two blocks, waits for two steps in which r0 runs, which has three."""
    return judged(
        "idle room",
        replace(arrived("r0"), priority=priority),
        BlocksAllocated(0, "r0.0", [0, 1, 2], 0),
        Scheduled(0, "r0.0", 0, 6),
        pool(0, free),
        arrived("r1"),
        Scheduled(1, "r0.0", 6, 7),
        pool(1, free),
        *more,
        Scheduled(2, "r0.0", 7, 8),
        pool(2, free),
        scheduling_policy=policy,
        **promises,
    )


def test_who_waits_for_the_less_urgent_is_found() -> None:
    (found,) = kept_out()
    assert (found.code, found.step, found.request) == (Code.PROG_ORDER, 2, "r1")
    assert kept_out(priority=0) == []
    assert kept_out(promises=("mixed_steps",)) == []
    assert kept_out(policy="fcfs") == []
    assert kept_out(PlanApplied(2, "preempt:r0@2")) == []
    assert kept_out(PriorityChanged(2, "r0", 0)) == []
    assert kept_out(replace(arrived("r2", 20), priority=-1)) == []  # who is next now does not fit


@pytest.mark.parametrize(("watermark", "is_found"), [(0.5, True), (0.375, False), (0, False)])
def test_who_comes_in_beside_others_leaves_the_watermark(watermark: float, is_found: bool) -> None:
    log = [
        arrived("r0"),
        arrived("r1"),
        BlocksAllocated(0, "r0.0", [0, 1], 0),  # alone
        pool(0, 6),
        BlocksAllocated(1, "r1.0", [2, 3, 4], 0),
    ]
    found = judged("idle room", *log, pool(1, 3), watermark=watermark)
    assert [finding.code for finding in found] == [Code.WORK_CROWDED] * is_found
    assert judged("idle room", *log, pool(1, 1, held=2), watermark=watermark) == []


def test_the_first_comes_in_without_the_watermark() -> None:
    log = [pool(0, 8), arrived("r0"), BlocksAllocated(1, "r0.0", [0, 1], 0), pool(1, 6)]
    assert judged("idle room", *log, watermark=0.9) == []


def out(step: int, request: str = "r0", mode: str = "recompute") -> list[Event]:
    """A request of two blocks loses them for want of a block."""
    events: list[Event] = [
        BlocksAllocated(step, f"{request}.0", [0, 1], 0),
        Preempted(step, request, mode, "decode", "out_of_blocks", 6, 7),
        BlocksFreed(step, f"{request}.0", [0, 1]),
    ]
    return events


@pytest.mark.parametrize(("space", "is_found"), [(2, True), (1, False), (0, False)])
def test_who_is_recomputed_beside_room_on_the_host_is_found(space: int, is_found: bool) -> None:
    found = judged("swaps", arrived("r0"), *out(3), swap_space_blocks=space)
    assert [finding.code for finding in found] == [Code.WORK_RECOMPUTE] * is_found


def test_host_blocks_of_others_are_no_room_until_their_step_is_done() -> None:
    swapped = [*out(1, "r1", "swap"), SwappedOut(1, "r1", [(0, 0), (1, 1)])]
    assert judged("swaps", *swapped, *out(3), swap_space_blocks=3) == []
    assert judged("swaps", *swapped, *out(3), swap_space_blocks=4)
    ended = Finished(3, "r1", "stop")
    assert judged("swaps", *swapped, ended, *out(3), swap_space_blocks=3) == []
    assert judged("swaps", *swapped, ended, *out(4), swap_space_blocks=3)


def test_only_an_engine_that_swaps_by_itself_is_judged() -> None:
    assert judged("swaps", *out(3), swap_space_blocks=9, preemption_mode="recompute") == []
    assert judged("swaps", *out(3)) == []  # nobody says how large the swap space is
    forced = [replace(e, reason="forced") if isinstance(e, Preempted) else e for e in out(3)]
    assert judged("swaps", *forced, swap_space_blocks=9) == []


def shares(*more: Event) -> list[Finding]:
    """r1 arrives in step 3: two of its three blocks are r0's, and one is free."""
    return judged(
        "idle room",
        arrived("r0", 8),
        BlocksAllocated(0, "r0.0", [0, 1, 2], 0),
        Scheduled(0, "r0.0", 0, 8),
        pool(0, 1),
        Scheduled(1, "r0.0", 8, 9),
        pool(1, 1),
        Scheduled(2, "r0.0", 9, 10),
        pool(2, 1),
        Arrived(3, "r1", [1] * 9, 4, 0),
        *more,
        Scheduled(3, "r0.0", 10, 11),
        pool(3, 1),
        enable_prefix_caching=True,
    )


def test_blocks_that_would_be_shared_are_room_unless_they_are_forgotten() -> None:
    (found,) = shares()
    assert "takes 3 at most, of which it shares 2" in found.message
    assert shares(CacheReset(3, False)) == []
