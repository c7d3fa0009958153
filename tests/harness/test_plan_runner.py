"""When actions fire, and how each is accounted for: scripted progress, no engine."""

from __future__ import annotations

import pytest

from preempt_harness.plan import (
    AbortCommand,
    Command,
    HoldCommand,
    PlanError,
    PlanRunner,
    PreemptCommand,
    PreemptionPlan,
    RequestView,
)
from preempt_harness.record import PlanApplied, PlanMissed

Views = dict[str, RequestView]


def runner(text: str) -> PlanRunner:
    return PlanRunner(PreemptionPlan.parse(text), block_size=16)


def running(outputs: int = 0, computed: int = 0, chunks: int = 0, resumes: int = 0) -> RequestView:
    return RequestView(
        status="running",
        num_prompt_tokens=40,
        num_output_tokens=outputs,
        num_computed_tokens=computed,
        num_chunks=chunks,
        num_preemptions=resumes,
        num_resumes=resumes,
    )


def waiting(outputs: int = 0) -> RequestView:
    return RequestView(status="waiting", num_prompt_tokens=40, num_output_tokens=outputs)


def finished(outputs: int) -> RequestView:
    return RequestView(status="finished", num_prompt_tokens=40, num_output_tokens=outputs)


def play(plan: PlanRunner, *steps: Views) -> list[list[Command]]:
    """Commands before each of the steps 0, 1, ..."""
    return [plan.before_step(step, views) for step, views in enumerate(steps)]


def preempt(request: str) -> PreemptCommand:
    return PreemptCommand(request, "recompute")


# Anchors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor", "before", "there"),
    [
        ("out=2", running(outputs=1), running(outputs=2)),
        ("out=2", running(outputs=1), running(outputs=4)),  # several tokens came at once
        ("out=2", waiting(outputs=2), running(outputs=2)),
        ("computed=20", running(computed=19), running(computed=20)),
        ("block=2+1", running(computed=32), running(computed=33)),
        ("chunk=2", running(chunks=1), running(chunks=2)),
        ("resume=1", running(outputs=3), running(outputs=3, resumes=1)),
        ("step=1", running(), running()),
    ],
)
def test_an_action_fires_once_at_its_anchor(
    anchor: str, before: RequestView, there: RequestView
) -> None:
    plan = runner(f"preempt:r0@{anchor}")
    commands = play(plan, {"r0": before}, {"r0": there}, {"r0": there})
    assert commands == [[], [preempt("r0")], []]
    [report] = plan.take_reports()
    assert isinstance(report, PlanApplied)
    assert (report.step, report.request) == (1, "r0")
    assert plan.finish(3, {"r0": finished(5)}) == []
    assert plan.take_reports() == []


def test_a_block_boundary_needs_the_block_size() -> None:
    with pytest.raises(PlanError, match='"preempt:r0@block=2" needs the block size'):
        PlanRunner(PreemptionPlan.parse("preempt:r0@block=2"))


def test_a_repeated_action_waits_until_its_request_runs_again() -> None:
    plan = runner("preempt:r0@out=3/preempt:r0@out=3")
    views = [{"r0": running(outputs=3)}, {"r0": waiting(outputs=3)}, {"r0": running(outputs=3)}]
    assert play(plan, *views) == [[preempt("r0")], [], [preempt("r0")]]


def test_preempt_all_takes_everything_that_runs_in_order_of_arrival() -> None:
    plan = runner("preempt-all@out=2")
    early = {"r0": running(outputs=1), "r1": running(), "r2": waiting(), "r3": finished(1)}
    due = {"r0": running(outputs=2), "r1": running(), "r2": waiting(), "r3": finished(1)}
    assert play(plan, early, due, due) == [[], [preempt("r0"), preempt("r1")], []]
    assert plan.take_reports() == [PlanApplied(1, "preempt-all@out=2", "")]


def test_no_request_is_hit_twice_before_one_step() -> None:
    plan = runner("preempt:r1@step=0/preempt-all@step=0/abort:r1@step=0")
    views = {"r0": running(), "r1": running()}
    assert play(plan, views) == [[preempt("r1"), preempt("r0")]]
    assert plan.take_reports()[2:] == [
        PlanMissed(0, "abort:r1@step=0", "an earlier action hits r1 before the same step")
    ]


def test_an_abort_also_hits_a_waiting_request() -> None:
    plan = runner("abort:r0@out=2")
    assert play(plan, {"r0": waiting(outputs=2)}) == [[AbortCommand("r0")]]


def test_a_swap_is_ordered_as_a_swap() -> None:
    assert play(runner("preempt:r0@step=0:swap"), {"r0": running()}) == [
        [PreemptCommand("r0", "swap")]
    ]


# Squeezing ----------------------------------------------------------------------------------------


def test_a_squeeze_holds_blocks_and_gives_them_back() -> None:
    plan = runner("squeeze:5@1..3")
    assert play(plan, {}, {}, {}, {}) == [[], [HoldCommand(5)], [], [HoldCommand(0)]]
    assert plan.take_reports() == [PlanApplied(1, "squeeze:5@1..3", "")]


def test_squeezes_at_once_add_up_and_all_outdoes_them() -> None:
    plan = runner("squeeze:5@0..3/squeeze:2@1..4/squeeze:all@2..5")
    assert play(plan, {}, {}, {}, {}, {}, {}) == [
        [HoldCommand(5)],
        [HoldCommand(7)],
        [HoldCommand("all")],
        [HoldCommand("all")],
        [HoldCommand("all")],
        [HoldCommand(0)],
    ]


def test_blocks_still_held_at_the_end_are_given_back() -> None:
    plan = runner("squeeze:5@0..9")
    play(plan, {})
    assert plan.finish(1, {}) == [HoldCommand(0)]
    assert plan.take_reports() == [PlanApplied(0, "squeeze:5@0..9", "")]


# Random and regular -------------------------------------------------------------------------------


def test_random_preemption_repeats_for_a_seed_and_stops_at_its_limit() -> None:
    views = {"r0": running(), "r1": running()}
    first = play(runner("random:p=0.3,max=4,seed=7"), *[views] * 40)
    assert first == play(runner("random:p=0.3,max=4,seed=7"), *[views] * 40)
    assert first != play(runner("random:p=0.3,max=4,seed=8"), *[views] * 40)
    assert sum(map(len, first)) == 4


def test_the_draws_for_a_request_do_not_depend_on_the_others() -> None:
    both = play(runner("random:p=0.3,max=99,seed=7"), *[{"r0": running(), "r1": running()}] * 30)
    alone = play(runner("random:p=0.3,max=99,seed=7"), *[{"r1": running()}] * 30)
    assert [[c for c in step if c == preempt("r1")] for step in both] == alone


def test_random_preemption_comes_about_as_often_as_its_probability_says() -> None:
    commands = play(runner("random:p=0.25,max=99999,seed=1"), *[{"r0": running()}] * 4000)
    # 1,000 expected, standard deviation 27; the draws are fixed by the seed.
    assert 850 < sum(map(len, commands)) < 1150


def test_every_preempts_the_youngest_or_the_named_request_at_multiples() -> None:
    views = {"r0": running(), "r1": running(), "r2": waiting()}
    youngest = play(runner("every:2,max=2"), *[views] * 8)
    assert youngest == [[], [], [preempt("r1")], [], [preempt("r1")], [], [], []]
    named = play(runner("every:3,max=9,request=r0"), *[views] * 4)
    assert named == [[], [], [], [preempt("r0")]]


# Missed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "views", "why"),
    [
        ("preempt:r0@out=3", {"r0": finished(2)}, "r0 ended with 2 output tokens before out=3"),
        ("preempt:r0@step=0", {"r0": waiting()}, "r0 is waiting"),
        ("preempt:r0@step=0", {}, "r0 has not arrived"),
        ("abort:r0@out=3", {"r0": finished(2)}, "r0 ended with 2 output tokens before out=3"),
        ("preempt-all@step=0", {"r0": waiting()}, "nothing runs that is not preempted already"),
    ],
)
def test_an_action_that_can_fire_no_more_is_missed_at_once(
    text: str, views: Views, why: str
) -> None:
    plan = runner(text)
    assert play(plan, views) == [[]]
    assert plan.take_reports() == [PlanMissed(0, text, why)]
    plan.finish(1, views)
    assert plan.take_reports() == []


@pytest.mark.parametrize(
    ("text", "views", "why"),
    [
        ("preempt:r0@step=9", {"r0": running()}, "the trial ended before r0 ran at step=9"),
        ("preempt:r0@out=3", {"r0": running(2)}, "the trial ended before r0 ran at out=3"),
        ("preempt:r9@out=3", {"r0": running(2)}, "r9 never arrived"),
        ("squeeze:1@5..6", {}, "the trial ended before step 5"),
        ("preempt-all@out=5", {"r0": running(2)}, "before a request that ran was at out=5"),
        ("random:p=1e-09,max=1,seed=1", {"r0": running()}, "no draw for a running request fell"),
        ("every:7,max=1", {"r0": running()}, "before a step that 7 divides met a request"),
    ],
)
def test_what_is_pending_at_the_end_is_missed_with_the_reason(
    text: str, views: Views, why: str
) -> None:
    plan = runner(text)
    assert play(plan, views) == [[]]
    assert plan.take_reports() == []
    plan.finish(1, views)
    [report] = plan.take_reports()
    assert isinstance(report, PlanMissed)
    assert why in report.why


def test_a_request_that_ends_with_the_trial_is_named_as_the_reason() -> None:
    plan = runner("preempt:r0@out=3")
    play(plan, {"r0": running(outputs=2)})
    plan.finish(1, {"r0": finished(2)})
    assert plan.take_reports() == [
        PlanMissed(1, "preempt:r0@out=3", "r0 ended with 2 output tokens before out=3")
    ]


# Refused ------------------------------------------------------------------------------------------


def test_a_refused_command_turns_the_report_into_missed() -> None:
    plan = runner("preempt:r0@step=0")
    [command] = plan.before_step(0, {"r0": running()})
    plan.refuse(command, "the engine says no")
    assert plan.take_reports() == [PlanMissed(0, "preempt:r0@step=0", "the engine says no")]


def test_an_action_counts_as_applied_if_one_of_its_commands_was_carried_out() -> None:
    plan = runner("preempt-all@step=0")
    first, second = plan.before_step(0, {"r0": running(), "r1": running()})
    plan.refuse(first, "the engine says no")
    assert plan.take_reports() == [PlanApplied(0, "preempt-all@step=0", "")]
    plan.refuse(second, "too late: the report is taken")
    assert plan.take_reports() == []


def test_a_refused_squeeze_gives_nothing_back() -> None:
    plan = runner("squeeze:5@0..2")
    [command] = plan.before_step(0, {})
    plan.refuse(command, "every block is in use")
    assert plan.take_reports() == [PlanMissed(0, "squeeze:5@0..2", "every block is in use")]
    assert plan.before_step(2, {}) == []
    assert plan.finish(3, {}) == []


def test_plan_is_over_when_no_action_has_more_to_do() -> None:
    assert PlanRunner(PreemptionPlan(), block_size=16).is_over
    plan = runner("preempt:r0@step=3")
    assert not plan.is_over
    plan.before_step(3, {"r0": running()})
    assert plan.is_over
