"""Work: tokens computed twice, needless preemptions, bytes to workers."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.checks import CheckOptions, Code, Finding, run_checks
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    Event,
    PlanApplied,
    Preempted,
    Scheduled,
    StepSent,
    SwappedOut,
    TrialRecord,
)

replace = msgspec.structs.replace


def work(record: TrialRecord, expected: int | None = None) -> list[Finding]:
    options = CheckOptions(expected_preemptions=expected)
    return list(run_checks(record, ["work"], options).findings)


@pytest.fixture
def record() -> TrialRecord:
    made = run_fake(make_workload([6, 9, 7], max_tokens=12), num_blocks=8)
    assert any(isinstance(event, Preempted) for event in made.events)
    assert work(made) == []
    return made


def place_of(record: TrialRecord, kind: type[Event]) -> int:
    return next(index for index, event in enumerate(record.events) if isinstance(event, kind))


# Recompute and preemptions ------------------------------------------------------------------------


def test_figures_are_reported(record: TrialRecord) -> None:
    counted = run_checks(record, ["work"]).counted
    assert counted["work/recompute: num_generated_tokens"] == 36
    assert counted["work/preemptions: natural preemptions"] >= 1


def test_tokens_computed_again_without_a_loss_are_found(record: TrialRecord) -> None:
    last = max(
        index
        for index, event in enumerate(record.events)
        if isinstance(event, Scheduled) and event.seq == "r0.0"
    )
    event = record.events[last]
    assert isinstance(event, Scheduled)
    record.events[last] = replace(event, start=0)
    found = work(record)
    assert Code.WORK_RECOMPUTE in {finding.code for finding in found}
    assert found[0].request == "r0"


def test_more_preemptions_than_the_clean_engine_are_found(record: TrialRecord) -> None:
    clean = sum(isinstance(event, Preempted) for event in record.events)
    assert work(record, expected=clean) == []
    (finding,) = work(record, expected=clean - 1)
    assert finding.code == Code.WORK_PREEMPTIONS


def test_thrash_beyond_the_formula_is_found(record: TrialRecord) -> None:
    place = place_of(record, Preempted)
    event = record.events[place]
    assert isinstance(event, Preempted)
    record.events[place:place] = [event] * 40
    found = [finding for finding in work(record) if finding.code == Code.WORK_PREEMPTIONS]
    assert [finding.request for finding in found] == [event.request]
    assert "blocks of the others" in found[0].message


# Victims ------------------------------------------------------------------------------------------


def eviction(*, newcomer_gets_blocks: bool, num_tokens: int) -> TrialRecord:
    """r0 holds two blocks of four and is evicted for want of blocks."""
    record = run_fake(make_workload([6, 30], max_tokens=12), num_blocks=20)
    record.events = [
        BlocksAllocated(0, "r0.0", [0, 1]),
        Preempted(1, "r0", "recompute", "decode", "out_of_blocks", num_tokens - 1, num_tokens),
        BlocksFreed(1, "r0.0", [0, 1]),
    ]
    if newcomer_gets_blocks:
        record.events.append(BlocksAllocated(1, "r1.0", [0, 1, 2]))
    return record


def test_victim_evicted_in_vain_is_found() -> None:
    (finding,) = work(eviction(newcomer_gets_blocks=False, num_tokens=7))
    assert (finding.code, finding.step, finding.request) == (Code.WORK_VAIN, 1, "r0")


def test_victim_that_makes_room_or_needs_it_itself_is_no_finding() -> None:
    assert work(eviction(newcomer_gets_blocks=True, num_tokens=7)) == []
    assert work(eviction(newcomer_gets_blocks=False, num_tokens=9)) == []


def test_a_victim_may_need_slots_for_its_drafts_or_for_what_is_on_its_way() -> None:
    record = eviction(newcomer_gets_blocks=False, num_tokens=7)
    record.header = msgspec.structs.replace(
        record.header, config={**record.header.config, "num_speculative_tokens": 2}
    )
    assert work(record) == []
    in_flight = eviction(newcomer_gets_blocks=False, num_tokens=8)
    assert [finding.code for finding in work(in_flight)] == [Code.WORK_VAIN]
    in_flight.events[1] = msgspec.structs.replace(in_flight.events[1], num_computed_tokens=8)
    assert work(in_flight) == []


@pytest.mark.parametrize("swapped", [True, False])
def test_blocks_that_a_swap_withholds_may_be_had_in_the_next_step(swapped: bool) -> None:
    """And whoever was to get them there may be taken away by the plan."""
    for later in (
        BlocksAllocated(2, "r1.0", [0, 1, 2]),
        Preempted(2, "r1", "recompute", "decode", "forced", 8, 9),
        PlanApplied(2, "squeeze:all@2..3"),
    ):
        record = eviction(newcomer_gets_blocks=False, num_tokens=7)
        if swapped:
            record.events.insert(1, SwappedOut(1, "r2", [(9, 0)]))
        record.events.append(later)
        expected = [] if swapped else [Code.WORK_VAIN]
        assert [finding.code for finding in work(record)] == expected


@pytest.mark.parametrize("grown_or_let_in", ["grown", "let in"])
def test_a_victim_of_a_more_urgent_request_must_let_somebody_in(grown_or_let_in: str) -> None:
    """Blocks for one that runs already are no reason to evict anybody for one that waits."""
    record = eviction(newcomer_gets_blocks=False, num_tokens=7)
    record.events[1] = replace(record.events[1], reason="priority")
    record.events.append(BlocksAllocated(1, "r1.0", [0]))
    if grown_or_let_in == "grown":
        record.events.insert(0, BlocksAllocated(0, "r1.0", [3]))
    expected = [Code.WORK_VAIN] if grown_or_let_in == "grown" else []
    assert [finding.code for finding in work(record)] == expected


@pytest.mark.parametrize("urgent", [True, False])
def test_somebody_more_urgent_may_wait_for_more_than_a_swap_withheld(urgent: bool) -> None:
    record = eviction(newcomer_gets_blocks=False, num_tokens=7)
    record.events[1] = replace(record.events[1], reason="priority")
    record.events.insert(1, SwappedOut(1, "r0", [(9, 0)]))
    priority = -1 if urgent else 0
    record.events.append(Arrived(2, "r1", [5] * 30, max_tokens=12, priority=priority))
    expected = [] if urgent else [Code.WORK_VAIN]
    assert [finding.code for finding in work(record)] == expected


# Bytes --------------------------------------------------------------------------------------------


def test_ids_sent_on_every_decode_step_are_found() -> None:
    workload = make_workload([60, 60], max_tokens=30)
    config = {"num_blocks": 60, "max_num_batched_tokens": 64, "num_ranks": 2}
    assert work(run_fake(workload, **config)) == []
    found = work(run_fake(workload, faults=frozenset({"resend_ids"}), **config))
    assert [(finding.code, finding.rank) for finding in found] == [
        (Code.WORK_BYTES, 0),
        (Code.WORK_BYTES, 1),
    ]


def test_slow_growth_that_hides_in_the_bound_is_found() -> None:
    record = run_fake(make_workload([6], max_tokens=60), num_blocks=20)
    assert work(record) == []
    for index, event in enumerate(record.events):
        if isinstance(event, StepSent):
            record.events[index] = replace(event, num_bytes=30 + event.step)
    found = work(record)
    assert [finding.code for finding in found] == [Code.WORK_BYTES]
    assert "grows with the context" in found[0].message


def test_ids_of_a_prefill_may_be_sent_once() -> None:
    record = run_fake(make_workload([200], max_tokens=3), num_blocks=60, max_num_batched_tokens=256)
    assert max(event.num_bytes for event in record.events if isinstance(event, StepSent)) > 400
    assert work(record) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_messages_that_are_not_shown_are_missed_where_there_are_workers(
    record: TrialRecord, num_ranks: int
) -> None:
    observed = [name for name in record.header.observed if name != "StepSent"]
    record.header = replace(record.header, observed=observed, num_ranks=num_ranks)
    report = run_checks(record, ["work"])
    missed = {"work/bytes": "fake does not show StepSent"}
    assert report.not_observable == (missed if num_ranks > 1 else {})
