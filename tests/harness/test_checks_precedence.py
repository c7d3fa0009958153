"""Precedence: whoever is let in or evicted out of order is found, whatever made it so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    CacheReset,
    Event,
    Finished,
    Preempted,
    PriorityChanged,
)

replace = msgspec.structs.replace


def judged(*events: Event, promise: str = "strict_order", policy: str = "fcfs") -> list[Finding]:
    """Findings of a log that consists of these events."""
    record = run_fake(make_workload([6, 9, 7], max_tokens=4))
    record.header = replace(
        record.header,
        capabilities=["recompute", "mixed_steps", promise],
        config={"scheduling_policy": policy},
    )
    record.events = list(events)
    report = run_checks(record, ["progress"])
    return [
        finding
        for result in report.of("progress")
        if result.part == "precedence"
        for finding in result.findings
    ]


def arrived(request: str, priority: int = 0) -> Arrived:
    return Arrived(0, request, [1, 2], 4, priority)


def let_in(request: str, step: int) -> BlocksAllocated:
    return BlocksAllocated(step, f"{request}.0", [1], 0)


def lost(request: str, step: int, reason: str = "out_of_blocks") -> Preempted:
    return Preempted(step, request, "recompute", "decode", reason, 2, 3)


THREE = [arrived("r0"), arrived("r1"), arrived("r2")]
ALL_IN = [let_in("r0", 1), let_in("r1", 1), let_in("r2", 1)]


def test_service_in_order_is_clean() -> None:
    log = [*THREE, *ALL_IN, lost("r2", 4), let_in("r0", 5), lost("r1", 6), let_in("r1", 7)]
    assert judged(*log, let_in("r2", 8)) == []


def test_who_is_let_in_before_an_earlier_one_is_found() -> None:
    log = [*THREE, *ALL_IN, lost("r2", 4), lost("r1", 4)]
    (found,) = judged(*log, let_in("r2", 5), let_in("r1", 6))
    assert (found.code, found.step, found.request) == (Code.PROG_ORDER, 5, "r2")
    assert "r1, which precedes it" in found.message


def test_another_victim_than_the_last_is_found() -> None:
    (found,) = judged(*THREE, *ALL_IN, lost("r1", 4))
    assert (found.code, found.step, found.request) == (Code.PROG_ORDER, 4, "r1")
    assert "and r2, which it precedes" in found.message


def test_who_waits_keeps_no_blocks() -> None:
    assert judged(*THREE, let_in("r0", 1), let_in("r1", 1), lost("r1", 2)) == []


def test_the_plan_chooses_its_victims() -> None:
    assert judged(*THREE, *ALL_IN, lost("r0", 4, "forced"), let_in("r0", 5)) == []


@pytest.mark.parametrize("end", [Finished(3, "r1", "length"), Aborted(3, "r1")])
def test_who_has_ended_neither_waits_nor_runs(end: Event) -> None:
    assert judged(*THREE, let_in("r0", 1), end, let_in("r2", 4)) == []
    assert judged(arrived("r0"), arrived("r1"), *ALL_IN[:2], end, lost("r0", 4)) == []


def test_the_more_urgent_comes_first() -> None:
    log = [arrived("r0", 2), arrived("r1", 1)]
    assert judged(*log, let_in("r1", 1), let_in("r0", 1), lost("r0", 2, "priority")) == []
    assert [finding.request for finding in judged(*log, let_in("r0", 1))] == ["r0"]


def test_a_change_of_priority_by_the_user_counts() -> None:
    changed = PriorityChanged(1, "r2", -1)
    assert judged(*THREE, changed, let_in("r2", 2), let_in("r0", 2)) == []
    assert [finding.request for finding in judged(*THREE, changed, let_in("r0", 2))] == ["r0"]
    running = [*THREE, *ALL_IN, changed]
    assert judged(*running, lost("r1", 3)) == []
    assert [finding.request for finding in judged(*running, lost("r2", 3))] == ["r2"]


def test_each_is_told_once() -> None:
    log = [*THREE, *ALL_IN, lost("r1", 4), let_in("r1", 5), lost("r1", 6)]
    assert len(judged(*log)) == 1


def test_an_engine_that_promises_nothing_is_not_judged() -> None:
    assert judged(*THREE, *ALL_IN, lost("r0", 4), promise="text") == []


def queued(*events: Event, policy: str = "fcfs") -> list[Finding]:
    """Of an engine that serves a queue from its front."""
    return judged(*events, promise="queue_order", policy=policy)


def test_a_queue_in_order_is_clean() -> None:
    log = [*THREE, *ALL_IN, lost("r2", 4), lost("r1", 4), let_in("r1", 5), let_in("r2", 5)]
    assert queued(*log, lost("r2", 6)) == []


def test_whom_the_plan_took_goes_first_when_it_is_back() -> None:
    log = [*THREE, *ALL_IN, lost("r0", 4, "forced"), let_in("r0", 5)]
    assert queued(*log, lost("r0", 6)) == []
    (found,) = queued(*log, lost("r2", 6))
    assert (found.code, found.request) == (Code.PROG_ORDER, "r2")
    assert "number 2 of those that run" in found.message
    assert [found.request for found in judged(*log, lost("r0", 6))] == ["r0"]  # a strict order


def test_who_came_back_into_the_queue_waits_in_front() -> None:
    log = [arrived("r0"), arrived("r1"), let_in("r0", 1), lost("r0", 2, "forced")]
    assert queued(*log, let_in("r0", 3), let_in("r1", 3)) == []
    (found,) = queued(*log, let_in("r1", 3))
    assert "it is let in (number 2 of the queue), and r0" in found.message


@pytest.mark.parametrize("victims", [("r2", "r1", "r0"), ("r0", "r1", "r2")])
def test_who_is_reset_keeps_its_place_whoever_is_told_first(victims: tuple[str, ...]) -> None:
    forced = [lost(request, 4, "forced") for request in victims]
    log = [*THREE, *ALL_IN, *forced, CacheReset(4, running=True)]
    assert queued(*log, let_in("r0", 4), let_in("r1", 4), let_in("r2", 4)) == []
    assert queued(*log, let_in("r2", 4), let_in("r1", 4), let_in("r0", 4))


def test_by_priority_a_queue_has_one_order() -> None:
    log = [*THREE, *ALL_IN, lost("r0", 4, "forced"), let_in("r0", 5)]
    assert queued(*log, lost("r2", 6), policy="priority") == []
    assert queued(*log, lost("r0", 6), policy="priority")


def test_where_prefills_stop_decodes_a_plan_muddles_the_order() -> None:
    log = [*THREE, *ALL_IN, lost("r0", 4, "forced"), let_in("r0", 5), lost("r2", 6)]
    record = run_fake(make_workload([6, 9, 7], max_tokens=4))
    record.header = replace(record.header, capabilities=["recompute", "queue_order"])
    record.events = list(log)
    assert Code.PROG_ORDER not in {
        finding.code for finding in run_checks(record, ["progress"]).findings
    }


def test_the_embedded_engine_is_judged_and_keeps_its_order() -> None:
    harness = PreemptHarness(EmbeddedAdapter(), {"block_size": 2})
    workload = harness.workload(requests=4, prompt_tokens=9, max_tokens=12)
    result = harness.run(workload, "tight")
    result.assert_preempted()
    result.assert_clean()
    counted: dict[str, Any] = run_checks(result.record, ["progress"]).counted
    assert counted["progress/precedence: victims judged"]
    assert counted["progress/precedence: admissions judged"] > 4
