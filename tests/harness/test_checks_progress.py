"""Progress: livelock, bounds, order and ends."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.checks.progress import step_bounds, why_infeasible
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    EngineError,
    Event,
    Finished,
    PlanApplied,
    PoolCounts,
    Preempted,
    PriorityChanged,
    RequestResult,
    Resumed,
    SequenceOutput,
    TrialRecord,
)
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

replace = msgspec.structs.replace


def progress(record: TrialRecord) -> list[Finding]:
    return list(run_checks(record, ["progress"]).findings)


def codes(record: TrialRecord) -> list[Code]:
    return [finding.code for finding in progress(record)]


def livelocked() -> TrialRecord:
    """r1 and r2 are preempted in step 3 and never admitted again."""
    return run_fake(
        make_workload([6, 9, 7], max_tokens=12),
        num_blocks=20,
        forced={3: ("r1", "r2")},
        faults=frozenset({"never_resume"}),
        max_steps=120,
    )


def test_livelock_is_found_k_steps_after_the_last_progress() -> None:
    record = livelocked()
    found = progress(record)
    assert [finding.code for finding in found] == [
        Code.PROG_STEP_BOUND,
        Code.PROG_LIVELOCK,
        Code.PROG_UNFINISHED,
        Code.PROG_UNFINISHED,
    ]
    bounds = step_bounds(record)
    last_end = max(event.step for event in record.events if type(event).__name__ == "Finished")
    assert found[1].step == last_end + 1 + bounds.stall
    assert "r1, r2" in found[1].message
    assert bounds.formula in found[0].message


def test_standing_still_while_blocks_are_held_is_exempt() -> None:
    record = livelocked()
    record.events = [
        replace(event, held=1) if isinstance(event, PoolCounts) else event
        for event in record.events
    ]
    assert set(codes(record)) == {Code.PROG_UNFINISHED}


@pytest.mark.parametrize("told_again", [True, False])
def test_blocks_stay_held_until_another_number_is_told(told_again: bool) -> None:
    """Of a step in which nothing could be run, the pool's sizes may not be told."""
    record = livelocked()
    counts = [event for event in record.events if isinstance(event, PoolCounts)]
    kept = {id(event) for event in (counts[0], counts[-1])}
    record.events = [
        replace(event, held=int(told_again or event is counts[0])) if id(event) in kept else event
        for event in record.events
        if not isinstance(event, PoolCounts) or id(event) in kept
    ]
    assert set(codes(record)) == {Code.PROG_UNFINISHED}
    first = replace(counts[0], held=0)
    record.events = [
        first if event.step == first.step and isinstance(event, PoolCounts) else event
        for event in record.events
    ]
    assert Code.PROG_LIVELOCK in codes(record)


def test_a_block_that_is_the_engines_own_excuses_nothing() -> None:
    record = livelocked()
    record.events = [
        replace(event, held=1) if isinstance(event, PoolCounts) else event
        for event in record.events
    ]
    record.header = replace(record.header, config={**record.header.config, "reserved_blocks": 1})
    assert Code.PROG_LIVELOCK in codes(record)


@pytest.mark.parametrize("mixes", [True, False])
def test_natural_preemptions_are_paid_for_where_they_stop_the_others(mixes: bool) -> None:
    record = run_fake(make_workload([6, 9, 7], max_tokens=12), num_blocks=8)
    count = sum(isinstance(event, Preempted) for event in record.events)
    assert count
    shown = ["recompute", "mixed_steps"] if mixes else ["recompute"]
    record.header = replace(record.header, capabilities=shown)
    expected = 0 if mixes else count
    assert f"+ {expected} preemptions that the plan caused" in step_bounds(record).formula


def held_in(record: TrialRecord, steps: set[int]) -> TrialRecord:
    """The record with a block held back in these steps."""
    record.events = [
        replace(event, held=int(event.step in steps)) if isinstance(event, PoolCounts) else event
        for event in record.events
    ]
    return record


def test_a_squeeze_pays_for_what_is_computed_anew() -> None:
    """It may take blocks from the oldest, who computes everything again while nothing is held."""
    plain = run_fake(make_workload([6, 9, 7], max_tokens=12), num_blocks=8)
    plain.header = replace(plain.header, capabilities=["recompute", "mixed_steps"])
    preempted = [event.step for event in plain.events if isinstance(event, Preempted)]
    bound = step_bounds(plain).total
    calm = next(step for step in range(preempted[-1]) if step not in preempted)
    elsewhere = step_bounds(held_in(plain, {calm})).total
    assert elsewhere == bound + 1, "a step in which nobody is preempted is exempt, and no more"
    squeezed = step_bounds(held_in(plain, {preempted[0]}))
    assert squeezed.total > bound + 1
    assert f"+ {preempted.count(preempted[0])} preemptions that the plan" in squeezed.formula


def test_a_squeeze_that_takes_the_only_requests_blocks_is_paid_for() -> None:
    harness = PreemptHarness(EmbeddedAdapter(), {"block_size": 4, "enable_prefix_caching": False})
    workload = harness.workload(requests=1, prompt_tokens=40, max_tokens=8)
    result = harness.run(workload, plan="squeeze:all@24..25", max_num_batched_tokens=2)
    result.assert_preempted(request="r0")
    result.assert_clean()


def test_who_loses_the_first_place_to_a_change_of_priority_is_paid_for() -> None:
    """It has computed nearly all of a long prompt, and begins anew behind the other."""
    harness = PreemptHarness(EmbeddedAdapter(), {"block_size": 16, "enable_prefix_caching": False})
    requests = harness.workload(requests=2, prompt_tokens=144, max_tokens=2).requests
    workload = Workload(
        requests=[
            replace(requests[0], priority=2),
            replace(requests[1], priority=2, arrival_step=11),
        ],
        operations=[Operation(kind="set_priority", step=17, request="r1", priority=0)],
    )
    result = harness.run(workload, 13, max_num_batched_tokens=7, scheduling_policy="priority")
    result.assert_preempted(request="r0")
    result.assert_clean()
    bounds = step_bounds(result.record)
    assert "+ 1 preemptions that the plan caused" in bounds.formula
    # Negative control: without the change nobody pays for it.
    result.record.events = [
        event for event in result.record.events if not isinstance(event, PriorityChanged)
    ]
    assert step_bounds(result.record).total < bounds.total


@pytest.mark.parametrize(
    ("ahead", "drafts", "longest", "waits"),
    [
        (1, 4, 20, 5 + 2),  # of 8 and 5 tokens behind position 15, the second request ends at 17
        (2, 4, 20, 2 * (8 + 5)),  # behind position 10, which is in the prompts: all outputs
        (1, 4, 22, 3),
        (1, 4, 18, 5 + 4),  # the first ends at 18
        (1, 4, 40, 0),  # nobody comes near
        (1, 4, None, 0),
        (1, 0, 20, 0),
        (0, 4, 20, 0),
    ],
)
def test_who_may_wait_for_drafts_near_the_longest_length(
    ahead: int, drafts: int, longest: int | None, waits: int
) -> None:
    record = run_fake(make_workload([12, 12], max_tokens=8))
    record.header.workload["requests"][1]["sampling"]["max_tokens"] = 5

    def bound(**config: object) -> int:
        header = replace(record.header, config={**record.header.config, **config})
        return step_bounds(replace(record, header=header)).total

    plain = bound(async_scheduling=ahead)
    config = {"num_speculative_tokens": drafts, "max_model_len": longest}
    assert bound(async_scheduling=ahead, **config) == plain + waits


def test_a_squeeze_excuses_nobody_who_stands_still_afterwards() -> None:
    """Negative control: r1 and r2 lose their blocks to it, and are never admitted again."""
    record = held_in(livelocked(), {3})
    record.events = [
        replace(event, reason="out_of_blocks") if isinstance(event, Preempted) else event
        for event in record.events
    ]
    assert {Code.PROG_STEP_BOUND, Code.PROG_LIVELOCK} <= set(codes(record))


def test_squeeze_without_pool_counts_is_not_observable() -> None:
    record = livelocked()
    observed = [name for name in record.header.observed if name != "PoolCounts"]
    record.header = replace(record.header, plan="squeeze:all@3..9", observed=observed)
    report = run_checks(record, ["progress"])
    assert "for how long" in report.not_observable["progress/steps"]


def test_idle_steps_before_a_late_arrival_are_no_livelock() -> None:
    record = run_fake(make_workload([6, 6], max_tokens=3, arrivals=(0, 90)))
    assert codes(record) == []


def preempt_all(*faults: str) -> TrialRecord:
    record = run_fake(
        make_workload([6, 9, 7], max_tokens=8),
        num_blocks=20,
        forced={3: ("r0", "r1", "r2")},
        faults=frozenset(faults),
    )
    place = next(index for index, event in enumerate(record.events) if event.step == 3)
    record.events.insert(place, PlanApplied(3, "preempt-all@step=3"))
    return record


def test_re_admission_in_arrival_order_is_clean() -> None:
    record = preempt_all()
    assert sum(isinstance(event, Resumed) for event in record.events) == 3
    assert codes(record) == []


def test_re_admission_out_of_order_is_found() -> None:
    record = preempt_all("reverse_order")
    found = progress(record)
    assert [finding.code for finding in found] == [Code.PROG_ORDER, Code.PROG_ORDER]
    assert {finding.request for finding in found} == {"r0", "r1"}


def test_who_had_come_back_before_may_queue_behind() -> None:
    record = preempt_all("reverse_order")
    place = next(index for index, event in enumerate(record.events) if event.step == 2)
    record.events.insert(place, Resumed(2, "r0", num_cached_tokens=0))
    assert [finding.request for finding in progress(record)] == ["r1"]


def test_order_among_other_priorities_is_free() -> None:
    record = preempt_all("reverse_order")
    record.events = [
        replace(event, priority=index) if type(event).__name__ == "Arrived" else event
        for index, event in enumerate(record.events)
    ]
    assert codes(record) == []


# Ends ---------------------------------------------------------------------------------------------


def ends(results: dict[str, RequestResult], prompts: list[int]) -> list[tuple[Code, str | None]]:
    """Findings about how requests ended, in a pool of 8 blocks of 4 tokens."""
    record = run_fake(make_workload([1]), num_blocks=8)
    requests = [
        RequestSpec(
            id=f"r{index}", prompt_token_ids=[1] * length, sampling=SamplingSpec(max_tokens=4)
        )
        for index, length in enumerate(prompts)
    ]
    record.header = replace(
        record.header, workload=Workload(requests=requests).to_builtins(), observed=[]
    )
    record.events = []
    record.results = results
    found = run_checks(record, ["progress"]).findings
    return [(finding.code, finding.request) for finding in found]


DONE = RequestResult(
    outputs=[SequenceOutput(token_ids=[1] * 4, finish_reason="length")], finished=True
)
FAILED = RequestResult(
    outputs=[SequenceOutput(token_ids=[], finish_reason="error")], finished=True, error="too large"
)
CUT = RequestResult(outputs=[SequenceOutput(token_ids=[1])], finished=False)


def test_infeasible_request_ends_with_an_error_and_alone() -> None:
    assert ends({"r0": DONE, "r1": FAILED}, [8, 40]) == []


def test_infeasible_request_without_an_error_is_found() -> None:
    assert ends({"r0": DONE, "r1": CUT}, [8, 40]) == [(Code.PROG_INFEASIBLE, "r1")]
    assert ends({"r0": DONE}, [8, 40]) == [(Code.PROG_INFEASIBLE, "r1")]


def test_neighbour_that_fails_with_it_is_found() -> None:
    assert ends({"r0": FAILED, "r1": FAILED}, [8, 40]) == [(Code.PROG_UNDUE_ERROR, "r0")]


def test_request_that_outgrows_the_pool_may_end_either_way() -> None:
    assert ends({"r0": FAILED, "r1": DONE}, [31, 31]) == []


def test_unfinished_request_is_found_unless_the_engine_crashed() -> None:
    assert ends({"r0": DONE, "r1": CUT}, [8, 8]) == [(Code.PROG_UNFINISHED, "r1")]
    record = livelocked()
    record.events.append(EngineError(120, "hang", "no step for 10 s"))
    assert Code.PROG_UNFINISHED not in codes(record)


def test_request_that_the_engine_has_not_let_go_is_found() -> None:
    record = run_fake(make_workload([6, 9], max_tokens=6), num_blocks=8)
    assert codes(record) == []
    record.events = [
        event
        for event in record.events
        if not (isinstance(event, Finished) and event.request == "r1")
    ]
    found = [item for item in run_checks(record, ["progress"]).findings if item.request == "r1"]
    assert [item.code for item in found] == [Code.PROG_UNFINISHED]


def refused(*events: Event) -> list[Code]:
    """Findings about r1, which ended with an error; one request may wait."""
    record = run_fake(make_workload([6, 9], max_tokens=6), num_blocks=8)
    record.header = replace(
        record.header, config={**record.header.config, "max_waiting_requests": 1}
    )
    record.events = [*events, Finished(9, "r1", "error"), Finished(9, "r0", "length")]
    record.results["r1"] = FAILED
    found = run_checks(record, ["progress"]).findings
    return [item.code for item in found if item.code == Code.PROG_UNDUE_ERROR]


R0, R1 = Arrived(0, "r0", [1] * 6, 6), Arrived(1, "r1", [1] * 9, 6)


def test_who_finds_the_queue_full_may_be_refused() -> None:
    assert refused(R0, R1) == []
    lost = Preempted(1, "r0", "recompute", "decode", "forced", 6, 7)
    assert refused(R0, BlocksAllocated(0, "r0.0", [0, 1]), lost, R1) == []


def test_who_finds_room_in_the_queue_or_has_run_may_not_be_refused() -> None:
    ran = BlocksAllocated(0, "r0.0", [0, 1])
    assert refused(R0, ran, R1) == [Code.PROG_UNDUE_ERROR]
    assert refused(R0, R1, BlocksAllocated(2, "r1.0", [2, 3])) == [Code.PROG_UNDUE_ERROR]


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("num_waiting", [0, 1, 2, 3])
def test_who_finds_the_queue_full_may_not_run(limit: int, num_waiting: int) -> None:
    """Others arrive, run, and so many of them lose their blocks: also more than may wait."""
    others = [f"r{index}" for index in range(3)]
    record = run_fake(make_workload([6, 9, 6, 6], max_tokens=6), num_blocks=12)
    record.header = replace(
        record.header, config={**record.header.config, "max_waiting_requests": limit}
    )
    record.events = []
    for index, name in enumerate(others):
        record.events += [Arrived(0, name, [1], 6), BlocksAllocated(0, f"{name}.0", [index])]
    record.events += [
        Preempted(1, name, "recompute", "decode", "forced", 6, 7) for name in others[:num_waiting]
    ]
    record.events += [Arrived(2, "r3", [1], 6), BlocksAllocated(3, "r3.0", [5])]
    findings = run_checks(record, ["progress"]).findings
    found = [(item.code, item.request, item.step) for item in findings if item.request == "r3"]
    full = (Code.PROG_QUEUE_LIMIT, "r3", 2) in found
    assert full == (num_waiting >= limit)


@pytest.mark.parametrize(
    "back",
    [
        Resumed(2, "r0", 0),
        BlocksAllocated(2, "r0.0", [0]),
        Finished(2, "r0", "length"),
        Aborted(2, "r0"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_who_has_come_back_or_gone_fills_no_queue(back: Event) -> None:
    record = run_fake(make_workload([6, 9], max_tokens=6), num_blocks=8)
    record.header = replace(
        record.header, config={**record.header.config, "max_waiting_requests": 1}
    )
    lost = Preempted(1, "r0", "swap", "decode", "forced", 6, 7)
    taken = BlocksAllocated(4, "r1.0", [2])
    for events, expected in (([lost, R1, taken], 1), ([lost, back, R1, taken], 0)):
        record.events = [R0, BlocksAllocated(0, "r0.0", [0, 1]), *events]
        codes = [item.code for item in run_checks(record, ["progress"]).findings]
        assert codes.count(Code.PROG_QUEUE_LIMIT) == expected


@pytest.mark.parametrize(("length", "feasible"), [(32, True), (33, False)])
def test_a_prompt_is_infeasible_exactly_when_it_exceeds_the_pool(
    length: int, feasible: bool
) -> None:
    header = run_fake(make_workload([1]), num_blocks=8).header
    spec = RequestSpec(id="r0", prompt_token_ids=[1] * length)
    assert (why_infeasible(header, spec) is None) == feasible
