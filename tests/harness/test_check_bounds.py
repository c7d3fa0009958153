"""Bounds of Progress and Work, from both sides: at the bound nothing is found, one beyond it is.

Every number here is worked out by hand from the formulas in the checks' docstrings. A check whose
bound has become wider finds less, and no clean trial tells of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from preempt_harness.checks import Code, run_checks
from preempt_harness.checks.progress import step_bounds, why_infeasible
from preempt_harness.checks.run import CheckReport
from preempt_harness.record import (
    Aborted,
    AnyEvent,
    Arrived,
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksPoisoned,
    Finished,
    Forked,
    Header,
    PlanApplied,
    PoolCounts,
    Preempted,
    PriorityChanged,
    RequestResult,
    Resumed,
    Scheduled,
    SequenceOutput,
    StepDone,
    StepLaunched,
    StepSent,
    SwappedIn,
    SwappedOut,
    TokensChosen,
    TokensDelivered,
    TrialRecord,
    event_names,
    from_lines,
    to_lines,
)
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

BLOCK = 4


def spec(index: int, prompt: int, outputs: int, *, n: int = 1, **more: Any) -> RequestSpec:
    return RequestSpec(
        id=f"r{index}",
        prompt_token_ids=[1] * prompt,
        sampling=SamplingSpec(max_tokens=outputs, n=n),
        **more,
    )


def record(
    requests: list[RequestSpec],
    events: list[AnyEvent] | None = None,
    *,
    config: dict[str, Any] | None = None,
    operations: list[Operation] | None = None,
    **header: Any,
) -> TrialRecord:
    """A record made by hand, in a pool of 8 blocks of 4, 8 tokens a step."""
    workload = Workload(requests=requests, operations=operations or [])
    fields = {
        "engine": "by-hand",
        "model": "toy",
        "block_size": BLOCK,
        "num_blocks": 8,
        "config": {"max_num_batched_tokens": 8, **(config or {})},
        "observed": sorted(event_names()),
    }
    made = Header(workload=workload.to_builtins(), **{**fields, **header})
    return TrialRecord(header=made, events=list(events or []))


def found(record: TrialRecord, check: str, *codes: Code) -> list[tuple[int | None, str | None]]:
    """(step, request) of the check's findings of these codes."""
    findings = judged(record, check).findings
    return [(item.step, item.request) for item in findings if item.code in codes]


def judged(record: TrialRecord, check: str) -> CheckReport:
    """What a check says of the record as it is read from a file, where no string is a literal."""
    return run_checks(from_lines(to_lines(record)), [check])


# Steps --------------------------------------------------------------------------------------------

# 10 + 5 tokens in chunks of 8 take 2 steps, 21 + 7 take 4.
FIRST, SECOND = spec(0, 10, 5), spec(1, 21, 7, arrival_step=9)
SPLIT = spec(1, 21, 7, n=3, arrival_step=9)


@pytest.mark.parametrize(
    ("second", "config", "total", "stall"),
    [
        # 9 + (2 + 5 + 2) + (4 + 7 + 2); (2 + 2) + (4 + 2) + 2
        (SECOND, {}, 31, 12),
        # every token by itself: 15 and 28 steps
        (SECOND, {"max_num_batched_tokens": None}, 9 + 22 + 37, 17 + 30 + 2),
        # three outputs of 7: 42 tokens take 6 steps, and all three fit a step
        (SPLIT, {}, 9 + 9 + 15, 4 + 8 + 2),
        # but two run at once: 7 tokens of three branches take 14 steps
        (SPLIT, {"max_num_seqs": 2}, 9 + 9 + 22, 4 + 8 + 2),
        (SPLIT, {"max_num_seqs": 3}, 9 + 9 + 15, 4 + 8 + 2),
        # each like a request of its own: three times 4 + 7 + 2
        (SPLIT, {"branches_one_by_one": True}, 9 + 9 + 39, 4 + 18 + 2),
        # each 2 is 4, each 2 is 6
        (SECOND, {"async_scheduling": 1}, 9 + 11 + 15, 6 + 8 + 4),
        (SECOND, {"async_scheduling": 2}, 9 + 13 + 17, 8 + 10 + 6),
        (SECOND, {"async_scheduling": True}, 31, 12),
    ],
)
def test_bounds_are_what_the_formula_says(
    second: RequestSpec, config: dict[str, Any], total: int, stall: int
) -> None:
    bounds = step_bounds(record([FIRST, second], config=config))
    assert (bounds.total, bounds.stall) == (total, stall)


def lost(step: int, request: str, reason: str = "forced", mode: str = "recompute") -> Preempted:
    return Preempted(step, request, mode, "decode", reason, 5, 6)


HELD = PoolCounts(3, num_blocks=8, free=2, cached=0, used=5, held=1)


@pytest.mark.parametrize(
    ("events", "capabilities", "num_paid", "num_exempt"),
    [
        ([lost(3, "r0"), lost(4, "r0")], ["mixed_steps"], 2, 0),
        ([lost(3, "r0", "out_of_blocks")], ["mixed_steps"], 0, 0),
        ([lost(3, "r0", "out_of_blocks")], [], 0, 0),
        ([lost(3, "r0", "out_of_blocks"), lost(4, "r1")], ["recompute"], 2, 0),
        ([HELD, lost(3, "r0", "out_of_blocks"), lost(4, "r1", "out_of_blocks")], [], 1, 1),
    ],
)
def test_who_pays_for_a_preemption(
    events: list[AnyEvent], capabilities: list[str], num_paid: int, num_exempt: int
) -> None:
    """What it may cost: the longest prefill, 4 steps, and 2."""
    made = record([FIRST, SECOND], events, capabilities=capabilities)
    made = from_lines(to_lines(made))
    assert step_bounds(made).total == 31 + 6 * num_paid + num_exempt


@pytest.mark.parametrize(
    ("second", "num_preemptions", "num_paid"),
    [
        ({"priority": 0, "arrival_step": 9}, 3, 1),
        ({"priority": 0, "arrival_step": 9}, 0, 0),
        ({"priority": 1, "arrival_step": 9}, 3, 0),  # an equal takes nobody's place
        ({"priority": 0, "arrival_step": 3}, 3, 0),  # it was first from the beginning
        ({"priority": 0, "arrival_step": 1}, 3, 0),
    ],
)
def test_each_more_urgent_arrival_pays_for_one_preemption(
    second: dict[str, int], num_preemptions: int, num_paid: int
) -> None:
    requests = [spec(0, 10, 5, priority=1, arrival_step=3), spec(1, 21, 7, **second)]
    events: list[AnyEvent] = [lost(10, "r0", "priority")] * num_preemptions
    plain = 22 + max(3, second["arrival_step"])
    assert step_bounds(record(requests, events)).total == plain + 6 * num_paid
    forced = [*events, lost(11, "r1")]
    assert step_bounds(record(requests, forced)).total == plain + 6 * (num_paid + 1)


def test_nobody_pays_for_what_did_not_happen() -> None:
    """Two more urgent requests come, and one preemption is for want of blocks."""
    urgent = [spec(index, 4, 4, arrival_step=index) for index in (1, 2)]
    requests = [spec(0, 10, 5, priority=1), *urgent]
    plain = step_bounds(record(requests)).total  # a preemption costs 2 + 2 steps
    for events, num_paid in (
        ([lost(5, "r0", "out_of_blocks")], 1),
        ([lost(5, "r0", "out_of_blocks"), lost(6, "r1")], 2),
        ([lost(5, "r0", "priority")] * 4, 2),
        ([*[lost(5, "r0", "priority")] * 4, lost(6, "r1"), lost(7, "r1")], 4),
    ):
        assert step_bounds(record(requests, list(events))).total == plain + 4 * num_paid


def test_a_trial_may_take_as_many_steps_as_its_bound() -> None:
    for last, expected in ((30, []), (31, [(31, None)])):
        made = record([FIRST, SECOND], [Arrived(0, "r0", [1] * 10, 5), StepDone(last)])
        assert found(made, "progress", Code.PROG_STEP_BOUND) == expected
        counted = judged(made, "progress").counted
        assert counted["progress/steps: steps"] == last + 1
        assert counted["progress/steps: step bound"] == 31
        assert counted["progress/steps: stall bound K"] == 12
    (finding,) = [
        item for item in judged(made, "progress").findings if item.code == Code.PROG_STEP_BOUND
    ]
    assert "takes 32 steps, its planned work at most 31 (" in finding.message


# Livelock: one request of 10 + 5 tokens; K is 2 + 2 + 2.


def stalled(*between: AnyEvent, last: int, config: dict[str, Any] | None = None) -> list[Any]:
    """Where a livelock is found when steps up to the last compute nothing, but for what is given"""
    events: list[AnyEvent] = [Arrived(0, "r0", [1] * 10, 5), *map(StepLaunched, range(1, last + 1))]
    events += between
    events.sort(key=lambda event: event.step)
    return found(record([FIRST], events, config=config), "progress", Code.PROG_LIVELOCK)


def test_a_livelock_is_found_one_step_beyond_k() -> None:
    assert stalled(last=6) == []
    assert stalled(last=7) == [(7, None)]


@pytest.mark.parametrize(
    "event",
    [
        Scheduled(4, "r0.0", 0, 1),
        lost(4, "r0"),
        Arrived(4, "r1", [1], 1),
        Finished(4, "r1", "stop"),
        Aborted(4, "r1"),
    ],
)
def test_what_begins_the_count_anew(event: AnyEvent) -> None:
    assert stalled(event, last=10) == []
    assert stalled(event, last=11) == [(11, None)]


@pytest.mark.parametrize(
    "event",
    [
        Scheduled(4, "r0.0", 0, 0),
        lost(4, "r0", "out_of_blocks"),
        Resumed(4, "r0", 0),
        TokensDelivered(4, "r0.0", [5]),
    ],
)
def test_what_does_not(event: AnyEvent) -> None:
    assert stalled(event, last=7) == [(7, None)]


def test_what_held_blocks_took_begins_the_count_anew() -> None:
    given_back = msgspec.structs.replace(HELD, step=4, held=0)
    squeezed = [HELD, lost(3, "r0", "out_of_blocks"), given_back]
    assert stalled(*squeezed, last=9) == []
    assert stalled(*squeezed, last=10) == [(10, None)]
    assert stalled(HELD, given_back, last=8) == [(8, None)]


def test_computing_the_same_again_is_no_progress() -> None:
    again = [Scheduled(step, "r0.0", 0, 8) for step in range(1, 9)]
    assert stalled(*again[:7], last=7) == []
    assert stalled(*again, last=8) == [(8, None)]


def test_what_is_computed_anew_is_no_progress_though_every_step_ends_elsewhere() -> None:
    """A prefill that begins again and again: two chunks, from the start."""
    anew = [Scheduled(step, "r0.0", step % 2 * 4, step % 2 * 4 + 4) for step in range(1, 12)]
    assert stalled(*anew[:7], last=7) == []
    assert stalled(*anew[:8], last=8) == [(8, None)]


def test_with_drafts_what_is_delivered_is_progress() -> None:
    """How far a step got is not told in time; without drafts a delivery proves nothing."""
    delivered = [TokensDelivered(step, "r0.0", [5]) for step in range(1, 20)]
    assert stalled(*delivered, last=19, config={"num_speculative_tokens": 3}) == []
    assert stalled(*delivered, last=19) == [(7, None)]


@pytest.mark.parametrize(
    ("held", "reserved", "exempt"), [(1, 0, 1), (2, 1, 1), (1, 1, 0), (1, 2, 0)]
)
def test_only_what_is_held_beyond_the_engines_own_excuses(
    held: int, reserved: int, exempt: int
) -> None:
    pool = msgspec.structs.replace(HELD, held=held)
    bounds = step_bounds(record([FIRST, SECOND], [pool], config={"reserved_blocks": reserved}))
    assert bounds.total == 31 + exempt


def test_nobody_stalls_when_nobody_is_there() -> None:
    assert stalled(Finished(1, "r0", "stop"), last=20) == []
    assert stalled(Aborted(1, "r0"), last=20) == []


def test_drafts_are_no_progress_before_they_come_true() -> None:
    """They are computed further and further beyond the ten tokens that are known."""
    drafts = {"num_speculative_tokens": 9}
    further = [Scheduled(step, "r0.0", 10, 10 + step) for step in range(2, 10)]
    assert stalled(Scheduled(1, "r0.0", 0, 10), *further, last=8, config=drafts) == [(8, None)]
    assert stalled(Scheduled(1, "r0.0", 0, 10), *further, last=8) == []


# Order: r0, r1, r2 are preempted together in step 1003.

TOGETHER: list[AnyEvent] = [
    *(Arrived(0, f"r{index}", [1] * 4, 4) for index in range(3)),
    PlanApplied(1003, "preempt-all@step=1003"),
    *(lost(1003, f"r{index}") for index in range(3)),
]


def out_of_order(events: list[AnyEvent], **options: Any) -> list[Any]:
    made = record([spec(index, 4, 4) for index in range(3)], events, **options)
    return found(made, "progress", Code.PROG_ORDER)


def back(step: int, *requests: int) -> list[AnyEvent]:
    return [Resumed(step, f"r{index}", 0) for index in requests]


@pytest.mark.parametrize(
    ("order", "overtaken"),
    [((0, 1, 2), []), ((1, 0, 2), [0]), ((2, 1, 0), [1, 0]), ((0, 2, 1), [1])],
)
def test_each_that_is_overtaken_is_found(order: tuple[int, ...], overtaken: list[int]) -> None:
    events = [*TOGETHER, *back(1005, *order)]
    assert out_of_order(events) == [(1005, f"r{index}") for index in overtaken]
    made = record([spec(index, 4, 4) for index in range(3)], events)
    assert judged(made, "progress").counted["progress/order: re-admissions judged"] == 3


def test_who_was_not_preempted_with_the_others_is_not_compared() -> None:
    for other in (lost(1003, "r0", "out_of_blocks"), lost(1004, "r0"), lost(1002, "r0")):
        apart = [event for event in TOGETHER if event != lost(1003, "r0")]
        events = sorted([*apart, other], key=lambda event: event.step)
        assert out_of_order([*events, *back(1005, 1, 0, 2)]) == []
    assert out_of_order([*TOGETHER, *back(1005, 1, 0, 2)]) == [(1005, "r0")]


def test_whose_priority_is_changed_is_not_compared() -> None:
    changed = [Operation(kind="set_priority", step=1009, request="r0", priority=3)]
    events = [*TOGETHER, *back(1005, 1, 0, 2)]
    assert out_of_order(events, operations=changed) == []
    aborted = [Operation(kind="abort", step=1009, request="r0")]
    assert out_of_order(events, operations=aborted) == [(1005, "r0")]


def test_who_loses_its_blocks_again_is_judged_by_its_first_return() -> None:
    events = [*TOGETHER, *back(1005, 0, 1), lost(1006, "r0", "out_of_blocks"), *back(1007, 2, 0)]
    assert out_of_order(events) == []
    late = [*TOGETHER, lost(1004, "r0", "out_of_blocks"), *back(1005, 1, 0, 2)]
    assert out_of_order(late) == []


def test_a_second_preemption_of_all_is_judged_by_itself() -> None:
    again: list[AnyEvent] = [
        PlanApplied(1006, "preempt-all@step=1006"),
        *(lost(1006, f"r{index}") for index in range(3)),
    ]
    before = [*TOGETHER, *back(1005, 2)]
    assert out_of_order([*before, *again, *back(1007, 0, 1, 2)]) == []
    assert out_of_order([*before, *again, *back(1007, 1, 0, 2)]) == [(1007, "r0")]
    assert out_of_order([*before, *again, *back(1007, 0, 2, 1)]) == [(1007, "r1")]
    # r2 had come back before: it may queue behind.
    assert out_of_order([*before, *again, *back(1007, 0, 1), *back(1008, 2)]) == []


# Ends ---------------------------------------------------------------------------------------------

DONE = RequestResult(
    outputs=[SequenceOutput(token_ids=[1] * 4, finish_reason="length")], finished=True
)
TOLD = RequestResult(outputs=[SequenceOutput(token_ids=[], finish_reason="error")], finished=True)
FAILED = msgspec.structs.replace(DONE, error="too large")


def ends(result: RequestResult | None, prompt: int, **options: Any) -> list[Code]:
    """Findings about how a request ended; with 4 outputs, in a pool of 8 blocks of 4."""
    made = record([spec(0, prompt, 4)], **{"observed": [], **options})
    made.results = {} if result is None else {"r0": result}
    return [item.code for item in judged(made, "progress").findings]


@pytest.mark.parametrize("failed", [FAILED, TOLD])
@pytest.mark.parametrize(
    ("prompt", "max_model_len", "undue"),
    [
        (24, None, True),  # 7 blocks: it fits if the engine keeps one for itself
        (25, None, False),
        (24, 28, True),
        (24, 400, True),
        (24, 27, False),
    ],
)
def test_an_error_is_undue_exactly_when_all_of_it_fits(
    failed: RequestResult, prompt: int, max_model_len: int | None, undue: bool
) -> None:
    config = {"max_model_len": max_model_len}
    expected = [Code.PROG_UNDUE_ERROR] if undue else []
    assert ends(failed, prompt, config=config) == expected
    assert ends(DONE, prompt, config=config) == []


def test_an_undue_error_is_quoted() -> None:
    made = record([spec(0, 8, 4)], observed=[])
    made.results = {"r0": FAILED}
    (finding,) = judged(made, "progress").findings
    assert "ended with the error 'too large'" in finding.message


@pytest.mark.parametrize(("prompt", "expected"), [(12, None), (13, "has 13 tokens, max_model_len")])
def test_a_prompt_is_infeasible_beyond_the_models_length(prompt: int, expected: str | None) -> None:
    made = record([], config={"max_model_len": 12})
    why = why_infeasible(made.header, spec(0, prompt, 4))
    assert why is None if expected is None else expected in str(why)


@pytest.mark.parametrize("by", ["operation", "event"])
def test_an_aborted_request_owes_no_end(by: str) -> None:
    assert ends(None, 8) == [Code.PROG_UNFINISHED]
    if by == "operation":
        operations = [Operation(kind="abort", step=2, request="r0")]
        assert ends(None, 8, operations=operations) == []
        reset = [Operation(kind="reset_prefix_cache", step=2, request="r0")]
        assert ends(None, 8, operations=reset) == [Code.PROG_UNFINISHED]
    else:
        assert ends(None, 8, events=[Aborted(2, "r0")]) == []


def test_every_request_is_judged_once() -> None:
    made = record([spec(0, 8, 4), spec(1, 8, 4), spec(2, 8, 4)], [Aborted(2, "r1")], observed=[])
    made.results = {"r0": DONE, "r2": DONE}
    report = judged(made, "progress")
    assert not report.findings
    assert report.counted["progress/ends: requests judged"] == 2


@pytest.mark.parametrize(("limit", "refusals"), [(1, 2), (2, 1), (3, 0)])
def test_the_queue_is_full_when_as_many_wait_as_may(limit: int, refusals: int) -> None:
    """r0 waits, r1 and r2 come and are refused, which only some limits explain."""
    events: list[AnyEvent] = [Arrived(index, f"r{index}", [1] * 8, 4) for index in range(3)]
    made = record(
        [spec(index, 8, 4) for index in range(3)],
        events,
        config={"max_waiting_requests": limit},
        observed=[],
    )
    made.results = {"r0": DONE, "r1": FAILED, "r2": FAILED}
    report = judged(made, "progress")
    undue = [item.request for item in report.findings if item.code == Code.PROG_UNDUE_ERROR]
    assert undue == ["r1", "r2"][: 2 - refusals]
    full = report.counted.get("progress/ends: requests that found the queue full", 0)
    assert full == refusals


@pytest.mark.parametrize("gone", [Finished(1, "r0", "stop"), Aborted(1, "r0")])
def test_who_has_gone_waits_no_more(gone: AnyEvent) -> None:
    events = [Arrived(0, "r0", [1] * 8, 4), gone, Arrived(2, "r1", [1] * 8, 4)]
    requests = [spec(0, 8, 4), spec(1, 8, 4)]
    made = record(requests, events, config={"max_waiting_requests": 1}, observed=[])
    made.results = {"r0": DONE, "r1": FAILED}
    assert found(made, "progress", Code.PROG_UNDUE_ERROR) == [(None, "r1")]


# Recomputed tokens --------------------------------------------------------------------------------

COMPUTED: list[AnyEvent] = [
    Arrived(0, "r0", [1] * 10, 5),
    Scheduled(0, "r0.0", 0, 6),
    Scheduled(1, "r0.0", 6, 10),
    TokensDelivered(1, "r0.0", [5]),
    Scheduled(2, "r0.0", 10, 11),
]


def again(*events: AnyEvent) -> list[Any]:
    return found(record([FIRST, SECOND], [*COMPUTED, *events]), "work", Code.WORK_RECOMPUTE)


def test_only_what_was_lost_is_computed_again() -> None:
    assert again() == []
    assert again(Scheduled(3, "r0.0", 10, 11)) == [(None, "r0")]
    assert again(lost(3, "r0"), Scheduled(4, "r0.0", 0, 11)) == []
    assert again(lost(3, "r0"), Scheduled(4, "r0.0", 0, 11), Scheduled(5, "r0.0", 10, 12)) == [
        (None, "r0")
    ]
    assert again(lost(3, "r0", mode="swap"), Scheduled(4, "r0.0", 10, 11)) == [(None, "r0")]
    assert again(lost(3, "r1"), Scheduled(4, "r0.0", 10, 11)) == [(None, "r0")]


def test_what_was_lost_twice_may_be_computed_twice() -> None:
    twice: list[AnyEvent] = [
        lost(3, "r0"),
        Scheduled(4, "r0.0", 0, 11),
        lost(5, "r0"),
        Scheduled(6, "r0.0", 0, 11),
    ]
    assert again(*twice) == []
    assert again(*twice, Scheduled(7, "r0.0", 10, 11)) == [(None, "r0")]


def test_positions_beyond_the_known_tokens_may_be_computed_again() -> None:
    drafts = [Scheduled(3, "r0.0", 11, 14), Scheduled(4, "r0.0", 11, 14)]
    assert again(*drafts) == []
    known = TokensDelivered(3, "r0.0", [5])
    assert again(known, Scheduled(4, "r0.0", 11, 14), Scheduled(5, "r0.0", 11, 14)) == [
        (None, "r0")
    ]
    chosen = TokensChosen(3, "r0.0", [5])
    assert again(chosen, Scheduled(4, "r0.0", 11, 14), Scheduled(5, "r0.0", 11, 14)) == [
        (None, "r0")
    ]


def test_a_fork_has_computed_what_its_parent_has() -> None:
    fork = Forked(2, "r0.0", "r0.1")
    assert again(fork, Scheduled(3, "r0.1", 10, 11)) == [(None, "r0")]
    assert again(fork, TokensChosen(2, "r0.1", [6]), Scheduled(3, "r0.1", 11, 12)) == []
    both = [lost(3, "r0"), Scheduled(4, "r0.0", 0, 11), Scheduled(4, "r0.1", 0, 11)]
    assert again(fork, *both) == []
    assert again(fork, *both, Scheduled(5, "r0.1", 10, 11)) == [(None, "r0")]


# Preemptions: r0 needs 4 blocks, r1 needs 7.


@pytest.mark.parametrize(
    ("forced", "times"),
    [
        ([], 1),
        ([lost(2, "r1")], 2),
        ([PlanApplied(2, "squeeze:all@2..3")], 2),
        ([lost(2, "r1"), PlanApplied(2, "squeeze:3@2..3"), lost(3, "r0")], 4),
        ([PlanApplied(2, "preempt:r0@out=1")], 1),
    ],
)
@pytest.mark.parametrize(("request_", "bound"), [("r0", 8), ("r1", 5)])
def test_a_request_is_preempted_as_often_as_others_need_blocks(
    forced: list[AnyEvent], times: int, request_: str, bound: int
) -> None:
    """Once for each block of the others, once by itself; anew with whatever is forced."""
    natural = [lost(4, request_, "out_of_blocks")]
    for count, expected in ((bound * times, []), (bound * times + 1, [(None, request_)])):
        made = record([FIRST, SECOND], [*forced, *natural * count])
        assert found(made, "work", Code.WORK_PREEMPTIONS) == expected
        counted = judged(made, "work").counted
        assert counted["work/preemptions: natural preemptions"] == count


@pytest.mark.parametrize(
    ("second", "held_in", "excused"), [(SPLIT, 3, True), (SPLIT, 2, False), (SECOND, 3, False)]
)
def test_while_blocks_are_held_several_sequences_come_and_go(
    second: RequestSpec, held_in: int, excused: bool
) -> None:
    lacks = [lost(3, "r1", "out_of_blocks")] * 40
    made = record([FIRST, second], [replace(HELD, step=held_in), *lacks])
    expected = [] if excused else [(None, "r1")]
    assert found(made, "work", Code.WORK_PREEMPTIONS) == expected


@pytest.mark.parametrize(("promises", "excused"), [([], True), (["drafts_last"], False)])
def test_while_blocks_are_held_who_drafts_comes_and_goes(
    promises: list[str], excused: bool
) -> None:
    """Unless drafts never cost a request its blocks."""
    lacks = [lost(3, "r1", "out_of_blocks")] * 40
    events = [replace(HELD, step=3), *lacks]
    config = {"num_speculative_tokens": 4}
    made = record([FIRST, SECOND], events, config=config, capabilities=promises)
    expected = [] if excused else [(None, "r1")]
    assert found(made, "work", Code.WORK_PREEMPTIONS) == expected


# Victims ------------------------------------------------------------------------------------------

EVICTED: list[AnyEvent] = [
    BlocksAllocated(0, "r0.0", [0, 1]),
    BlocksAllocated(0, "r1.0", [2]),
    Preempted(6, "r0", "recompute", "decode", "out_of_blocks", 6, 7),
    BlocksFreed(6, "r0.0", [0, 1]),
]


def vain(*events: AnyEvent, **options: Any) -> list[Any]:
    return found(record([FIRST, SECOND], list(events), **options), "work", Code.WORK_VAIN)


def test_somebody_else_must_gain_and_in_the_same_step() -> None:
    assert vain(*EVICTED) == [(6, "r0")]
    assert vain(*EVICTED, BlocksAllocated(6, "r1.0", [0])) == []
    assert vain(*EVICTED, BlocksAllocated(7, "r1.0", [0])) == [(6, "r0")]
    assert vain(*EVICTED, BlocksAllocated(6, "r0.0", [0])) == [(6, "r0")]


def test_a_victim_that_takes_what_another_gave_up_gains_for_neither() -> None:
    both = [
        *EVICTED,
        Preempted(6, "r1", "recompute", "decode", "out_of_blocks", 3, 4),
        BlocksFreed(6, "r1.0", [2]),
        BlocksAllocated(6, "r1.0", [0]),
    ]
    assert vain(*both) == [(6, "r0"), (6, "r1")]


def test_where_steps_are_decided_ahead_victims_are_not_judged() -> None:
    assert vain(*EVICTED, config={"async_scheduling": 1}) == []
    assert vain(*EVICTED, config={"async_scheduling": 0}) == [(6, "r0")]


def test_a_victim_of_several_branches_is_taken_to_have_needed_a_block() -> None:
    fork = Forked(0, "r0.0", "r0.1")
    freed = BlocksFreed(6, "r0.1", [0, 1])
    assert vain(*EVICTED[:2], fork, *EVICTED[2:], freed) == []
    other = Forked(0, "r1.0", "r1.1")
    assert vain(*EVICTED[:2], other, *EVICTED[2:]) == [(6, "r0")]


SWAPPED = [*EVICTED[:2], SwappedOut(6, "r0", [(0, 0), (1, 1)]), *EVICTED[2:]]


@pytest.mark.parametrize(
    ("later", "in_vain"),
    [
        (BlocksAllocated(7, "r1.0", [0]), False),
        (BlocksAllocated(8, "r1.0", [0]), True),
        (Aborted(7, "r1"), False),
        (Aborted(8, "r1"), True),
        (lost(7, "r1", "forced"), False),
        (lost(7, "r1", "priority"), False),
        (lost(7, "r1", "out_of_blocks"), False),
        (PlanApplied(7, "squeeze:1@7..8"), False),
        (PlanApplied(7, "preempt:r1@out=1"), True),
    ],
)
def test_what_a_swap_withholds_is_had_in_the_next_step(later: AnyEvent, in_vain: bool) -> None:
    steps = [step for step, request in vain(*SWAPPED, later) if request == "r0"]
    assert steps == ([6] if in_vain else [])


DISPLACED = [
    *EVICTED[:2],
    SwappedOut(6, "r0", [(0, 0), (1, 1)]),
    Preempted(6, "r0", "swap", "decode", "priority", 6, 7),
    BlocksFreed(6, "r0.0", [0, 1]),
]


@pytest.mark.parametrize(
    ("later", "in_vain"),
    [
        ([BlocksAllocated(7, "r2.0", [0])], False),
        ([PriorityChanged(7, "r0", 0)], False),
        ([PriorityChanged(7, "r2", 9)], False),
        ([PriorityChanged(8, "r0", 0)], True),
        ([Scheduled(7, "r1.0", 1, 8)], True),
        ([Scheduled(7, "r1.0", 1, 9)], False),  # 8 tokens are all that a step may compute
        ([Scheduled(8, "r1.0", 1, 9)], True),
        ([PoolCounts(7, 20, 10, 0, 10, held=0)], True),
        ([PoolCounts(7, 20, 0, 0, 10, held=10)], False),
        ([PoolCounts(8, 20, 0, 0, 10, held=10)], True),
    ],
)
def test_whom_a_more_urgent_one_displaced_is_told_why_nobody_came(
    later: list[AnyEvent], in_vain: bool
) -> None:
    assert vain(*DISPLACED, *later) == ([(6, "r0")] if in_vain else [])


# Bytes: 64 for the frame, 48 and its name for each sequence, 5 for each id.


def sent(step: int, num_bytes: int, *before: AnyEvent, rank: int = 0) -> list[AnyEvent]:
    return [*before, StepSent(step, rank, num_bytes), StepDone(step)]


def too_long(*parts: list[AnyEvent], **options: Any) -> list[int | None]:
    events = [Arrived(0, "r0", [1] * 10, 5), *(event for part in parts for event in part)]
    made = record([FIRST, SECOND], events, **{"num_ranks": 2, **options})
    return [step for step, _ in found(made, "work", Code.WORK_BYTES)]


PREFILL = (BlocksAllocated(0, "r0.0", [0, 1, 2]), Scheduled(0, "r0.0", 0, 10))
NEXT = (TokensDelivered(0, "r0.0", [5]), Scheduled(1, "r0.0", 10, 11))
ONE_NAME = 64 + 48 + 4


def test_a_prefill_may_send_its_tokens_and_blocks() -> None:
    assert too_long(sent(0, ONE_NAME + 5 * 13, *PREFILL)) == []
    assert too_long(sent(0, ONE_NAME + 5 * 13 + 1, *PREFILL)) == [0]


@pytest.mark.parametrize(
    ("more", "num_bytes"),
    [
        ([], 5),
        ([BlocksAllocated(1, "r0.0", [3])], 2 * 5),
        ([BlocksPoisoned(1, 0, [7, 6])], 3 * 5),
        ([BlocksCopied(1, [(0, 7)])], 3 * 5),
        ([SwappedOut(1, "r1", [(5, 0), (6, 1)])], 5 * 5),
        ([SwappedIn(1, "r1", [(0, 5)])], 3 * 5),
        ([BlocksFreed(1, "r11.0", [7])], 5 + 48 + 5),
        ([Forked(1, "r1.0", "r1.123")], 5 + 48 + 6),
    ],
)
def test_a_decode_may_send_its_token_and_what_is_new(more: list[AnyEvent], num_bytes: int) -> None:
    before = sent(0, 100, *PREFILL)
    bound = ONE_NAME + num_bytes
    assert too_long(before, sent(1, bound, *more, *NEXT)) == []
    assert too_long(before, sent(1, bound + 1, *more, *NEXT)) == [1]


def test_all_ids_travel_with_the_first_chunk_and_no_other() -> None:
    first = (BlocksAllocated(0, "r0.0", [0, 1, 2]), Scheduled(0, "r0.0", 0, 4))
    assert too_long(sent(0, ONE_NAME + 5 * 13, *first)) == []
    assert too_long(sent(0, ONE_NAME + 5 * 13 + 1, *first)) == [0]
    before = sent(0, 100, *first)
    assert too_long(before, sent(1, ONE_NAME + 5 * 4, Scheduled(1, "r0.0", 4, 8))) == []
    assert too_long(before, sent(1, ONE_NAME + 5 * 4 + 1, Scheduled(1, "r0.0", 4, 8))) == [1]


def test_chunks_of_one_token_are_compared_like_decodes() -> None:
    events = sent(0, 100, BlocksAllocated(0, "r0.0", [0, 1, 2]), Scheduled(0, "r0.0", 0, 1))
    for step, num_bytes in ((1, 30), (2, 42), (3, 43)):
        events += sent(step, num_bytes, Scheduled(step, "r0.0", step, step + 1))
    assert too_long(events) == [3]


def test_a_message_after_a_rejected_draft_is_no_measure() -> None:
    """What was wrong has to be cut off again, which takes a few bytes more."""
    events = [*sent(0, 100, *PREFILL), *sent(1, 30, *NEXT)]
    drafted = sent(2, 60, TokensDelivered(1, "r0.0", [5]), Scheduled(2, "r0.0", 11, 14))
    after = sent(3, 43, TokensDelivered(2, "r0.0", [5]), Scheduled(3, "r0.0", 12, 13))
    assert too_long(events, drafted, after) == []
    later = sent(4, 43, TokensDelivered(3, "r0.0", [5]), Scheduled(4, "r0.0", 13, 14))
    assert too_long(events, drafted, after, later) == [4]


@pytest.mark.parametrize("how", ["preempted", "aborted"])
def test_who_loses_host_blocks_may_be_named_though_no_event_says_so(how: str) -> None:
    before = sent(0, 100, *PREFILL)
    for request, names in (("r0", 2), ("r1", 1)):
        event = lost(1, request, mode="swap") if how == "preempted" else Aborted(1, request)
        bound = 64 + names * (48 + 4) + 5
        assert too_long(before, sent(1, bound, event, *NEXT)) == []
        assert too_long(before, sent(1, bound + 1, event, *NEXT)) == [1]


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_news_are_told_as_late_as_steps_are_decided_ahead(num_ahead: int) -> None:
    """r11 loses its blocks before step 1; a step that was decided by then does not tell of it."""
    events = sent(0, 100, *PREFILL)
    events += sent(1, 100, BlocksFreed(1, "r11.0", [7]), *NEXT)
    for step in (2, 3):
        events += sent(step, ONE_NAME + 5, Scheduled(step, "r0.0", 10, 11))
    last = len(events) - 2
    options = {"config": {"async_scheduling": num_ahead}}
    assert too_long(events, **options) == []
    for place, step in ((last - 3, 2), (last, 3)):
        longer = list(events)
        longer[place] = StepSent(step, 0, ONE_NAME + 5 + 48 + 5)
        assert too_long(longer, **options) == ([] if step <= 1 + num_ahead else [step])
        longer[place] = StepSent(step, 0, ONE_NAME + 5 + 48 + 5 + 1)
        assert too_long(longer, **options) == [step]


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_blocks_by_which_a_sequence_grows_are_told_as_late(num_ahead: int) -> None:
    options = {"config": {"async_scheduling": num_ahead}}
    for late in (0, 1, 2):
        events = [*sent(0, 100, *PREFILL), BlocksAllocated(1, "r0.0", [3, 4])]
        for step in (1, 2, 3):
            told = 1 + (2 if step == 1 + late else 0)
            events += sent(step, ONE_NAME + 5 * told, Scheduled(step, "r0.0", 9 + step, 10 + step))
        assert too_long(events, **options) == ([] if late <= num_ahead else [1 + late])


def test_who_comes_back_is_sent_whole_once() -> None:
    freed = [lost(2, "r0"), BlocksFreed(2, "r0.0", [0, 1, 2])]
    comes = [BlocksAllocated(2, "r0.0", [3, 4, 5]), Scheduled(2, "r0.0", 0, 11)]
    before = [*sent(0, 100, *PREFILL), *sent(1, 100, *NEXT)]
    bound = ONE_NAME + 48 + 4 + 5 * 14  # it is named twice: dropped, and scheduled
    assert too_long(before, sent(2, bound, *freed, *comes)) == []
    assert too_long(before, sent(2, bound + 1, *freed, *comes)) == [2]


def test_equal_messages_differ_by_the_width_of_three_numbers() -> None:
    def steady(num_bytes: int, **options: Any) -> list[AnyEvent]:
        delivered = TokensDelivered(1, "r0.0", [5])
        return sent(2, num_bytes, delivered, Scheduled(2, "r0.0", 11, 12), **options)

    before = [*sent(0, 100, *PREFILL), *sent(1, 30, *NEXT)]
    assert too_long(before, steady(42)) == []
    assert too_long(before, steady(43)) == [2]
    assert too_long(before, steady(43, rank=1)) == []  # another rank has messages of its own
    less = [*sent(0, 100, *PREFILL), *sent(1, 50, *NEXT)]
    assert too_long(less, steady(30)) == []
    third = sent(3, 43, TokensDelivered(2, "r0.0", [5]), Scheduled(3, "r0.0", 12, 13))
    assert too_long(less, steady(30), third) == [3]
    grown = steady(43)
    grown.insert(0, BlocksAllocated(2, "r0.0", [3]))
    assert too_long(before, grown) == []  # a message with news is no measure, and is not measured
