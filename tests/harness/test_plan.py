"""Plans as data: the string form, its errors, and what a plan may ask of a workload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preempt_harness.adapters.protocol import CAPABILITIES
from preempt_harness.plan import (
    MODES,
    Abort,
    Action,
    Anchor,
    BlockBoundary,
    Chunk,
    ComputedTokens,
    Every,
    OutputTokens,
    PlanError,
    Preempt,
    PreemptAll,
    PreemptionPlan,
    RandomPreempt,
    Resume,
    Squeeze,
    Step,
)
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

WORKLOAD = Workload(
    requests=[
        RequestSpec(id=name, prompt_token_ids=[4] * 10, sampling=SamplingSpec(max_tokens=6))
        for name in ("r0", "r1")
    ]
)

counts = st.integers(1, 10_000)
names = st.text("abcxyzABC0189_.-", min_size=1, max_size=12)
anchors: st.SearchStrategy[Anchor] = st.one_of(
    st.builds(Step, st.integers(0, 10_000)),
    st.builds(OutputTokens, counts),
    st.builds(ComputedTokens, counts),
    st.builds(Chunk, counts),
    st.builds(Resume, counts),
    st.builds(BlockBoundary, counts, st.integers(-100, 100)),
)
modes = st.sampled_from(MODES)
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(Preempt, names, anchors, modes),
    st.builds(PreemptAll, anchors, modes),
    st.builds(
        lambda blocks, start, length: Squeeze(blocks, start, start + length),
        counts | st.just("all"),
        st.integers(0, 100),
        counts,
    ),
    st.builds(Abort, names, anchors),
    st.builds(
        RandomPreempt,
        st.floats(0, 1, exclude_min=True),
        counts,
        st.integers(0, 2**64),
        modes,
    ),
    st.builds(Every, counts, counts, names | st.just(""), modes),
)


@given(st.lists(actions, max_size=6).map(PreemptionPlan))
def test_a_plan_is_read_back_from_its_string_form(plan: PreemptionPlan) -> None:
    assert PreemptionPlan.parse(plan.encode()) == plan


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("preempt:r0@out=3", Preempt("r0", OutputTokens(3))),
        ("preempt:r0@computed=48:swap", Preempt("r0", ComputedTokens(48), "swap")),
        ("preempt:r0@chunk=2", Preempt("r0", Chunk(2))),
        ("preempt:r0@resume=1", Preempt("r0", Resume(1))),
        ("preempt:r0@block=2", Preempt("r0", BlockBoundary(2))),
        ("preempt:r0@block=2+1", Preempt("r0", BlockBoundary(2, 1))),
        ("preempt:r0@block=2-1", Preempt("r0", BlockBoundary(2, -1))),
        ("preempt-all@step=7", PreemptAll(Step(7))),
        ("squeeze:5@3..9", Squeeze(5, 3, 9)),
        ("squeeze:all@3..9", Squeeze("all", 3, 9)),
        ("abort:r1@step=4", Abort("r1", Step(4))),
        ("random:p=0.05,max=3,seed=7", RandomPreempt(0.05, 3, 7)),
        ("every:4,max=8", Every(4)),
        ("every:4,max=2,request=r1:swap", Every(4, 2, "r1", "swap")),
    ],
)
def test_the_string_form_of_each_action_is_as_documented(text: str, action: Action) -> None:
    plan = PreemptionPlan([action])
    assert plan.encode() == text
    assert PreemptionPlan.parse(text) == plan


def test_actions_are_joined_by_a_slash_and_spaces_do_not_matter() -> None:
    plan = PreemptionPlan.parse(" preempt:r0@out=3 /abort:r1@step=4 ")
    assert plan.encode() == "preempt:r0@out=3/abort:r1@step=4"


def test_the_empty_plan_is_the_empty_string_and_false() -> None:
    assert PreemptionPlan.parse("  ") == PreemptionPlan()
    assert PreemptionPlan().encode() == ""
    assert not PreemptionPlan()
    assert PreemptionPlan([Every(4)])


@given(st.lists(actions, min_size=1, max_size=6).map(PreemptionPlan))
def test_a_shell_leaves_the_string_form_alone(plan: PreemptionPlan) -> None:
    assert not set(plan.encode()) & set(" \t\n'\"`$&|;<>()[]{}*?!~#\\%")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preempt:r0@oot=3", "anchor 'oot' is unknown. Did you mean 'out'?"),
        ("preempt:r0@out=three", "anchor 'out=three' is no whole number. Write out=3."),
        ("preempt:r0@out=0", "OutputTokens(count=0) is out of range. Give 1 or more."),
        ("preempt:r0@out=-1", "is no whole number"),
        ("preempt:r0@out=" + 5000 * "9", "is no whole number"),
        ("preempt:r0", "the anchor is missing. Write it, such as @out=3."),
        ("preempt@out=3", "the request is missing. Write it, such as r0."),
        ("preempt:r0@out=3:swop", "mode 'swop' is unknown. Did you mean 'swap'?"),
        ("preempt:r 0@out=3", "A plan cannot name request 'r 0'."),
        ("preempt:r0@block=x", "is no block. Write block=2, block=2+1 or block=2-1."),
        ("preempt:r0:swap@out=3", "too many ':' or '@'. Write kind:target@anchor:mode"),
        ("prempt:r0@out=3", "action 'prempt' is unknown. Did you mean 'preempt'?"),
        ("preempt-all:r0@step=7", "preempt-all takes no target. Write preempt-all@step=7."),
        ("squeeze:some@3..9", "squeeze of 'some' blocks is no whole number. Write 5, or all."),
        ("squeeze:5@3", "'3' is no range of steps. Write squeeze:all@3..9."),
        ("squeeze:5", "is no range of steps"),
        ("squeeze:5@9..3", "lasts no step. stop is the first step after it"),
        ("squeeze:5@3..9:swap", "squeeze takes no mode"),
        ("abort:r0@out=3:swap", "abort takes no mode"),
        ("random:p=0.05,max=3", "seed is missing."),
        ("random:p=x,max=3,seed=1", "p=x is no number."),
        ("random:p=2,max=3,seed=1", "is not in (0, 1]."),
        ("random:p=nan,max=3,seed=1", "is not in (0, 1]."),
        ("random:p=0.1,p=0.2,max=3,seed=1", "option 'p' is given twice."),
        ("random:q=0.1,max=3,seed=1", "option 'q=0.1' is unknown."),
        ("random:p=0.1,max=3,seed=1@out=3", "random takes no anchor"),
        ("every:4", "max is missing. Write every:4,max=8."),
        ("every:4,max=8@out=3", "every takes no anchor"),
        ("", "there is nothing. Put one '/' between two actions."),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_at_the_place(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        PreemptionPlan.parse(f"every:4,max=8/{text}")
    assert str(caught.value).startswith(f'In action 2 of the plan, "{text}": ')
    assert message in str(caught.value)


@given(st.text("premtaloutsqz:@=,./0139- ", max_size=30))
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    try:
        plan = PreemptionPlan.parse(text)
    except PlanError:
        return
    assert PreemptionPlan.parse(plan.encode()) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preempt:r7@out=3", "no request is called r7; known are r0, r1"),
        ("abort:zz@out=3", "no request is called zz; known are r0, r1"),
        ("every:3,max=1,request=zz", "no request is called zz"),
        ("preempt:r0@out=6", "r0 ends at its 6 output tokens (max_tokens), so it runs with 5"),
        ("preempt-all@out=6", "ends at its 6 output tokens"),
        ("preempt:r0@computed=15", "so it runs with 14 computed tokens at most"),
        ("preempt:r0@block=2", "so it runs with 14 computed tokens at most"),
        ("preempt:r0@chunk=15", "r0 has at most 14 tokens to compute in chunks"),
    ],
)
def test_an_action_that_can_never_be_due_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        PreemptionPlan.parse(text).validate(WORKLOAD, block_size=8)
    assert message in str(caught.value)


def test_all_unsuitable_actions_are_named_at_once() -> None:
    plan = PreemptionPlan.parse("preempt:r9@out=1/preempt:r0@out=1/preempt:r1@out=99")
    with pytest.raises(PlanError, match=r"action 1, .*action 3, "):
        plan.validate(WORKLOAD)


@pytest.mark.parametrize(
    "text",
    [
        "preempt:r0@out=5",
        "preempt:r0@computed=14",
        "preempt:r0@block=1+6",
        "preempt-all@step=900",
        "random:p=0.5,max=9,seed=1/every:3,max=2,request=r1/squeeze:all@0..9",
    ],
)
def test_an_action_that_can_be_due_is_accepted(text: str) -> None:
    PreemptionPlan.parse(text).validate(WORKLOAD, block_size=8)


def test_block_boundaries_become_token_counts() -> None:
    plan = PreemptionPlan.parse("preempt:r0@block=2-1/preempt-all@block=1/abort:r1@out=2")
    assert (
        plan.resolve(16).encode() == "preempt:r0@computed=31/preempt-all@computed=16/abort:r1@out=2"
    )
    with pytest.raises(PlanError, match="lies before the first token when a block holds 1"):
        PreemptionPlan.parse("preempt:r0@block=1-1").resolve(1)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("", set()),
        ("preempt:r0@out=3", {"preempt", "recompute"}),
        ("preempt:r0@step=3:swap", {"preempt", "swap", "stepped"}),
        ("preempt-all@chunk=3", {"preempt", "recompute", "stepped"}),
        ("squeeze:1@2..3", {"hold_blocks", "stepped"}),
        ("abort:r0@out=1", {"abort"}),
        ("random:p=0.1,max=1,seed=0", {"preempt", "recompute", "stepped"}),
        ("every:2,max=1", {"preempt", "recompute", "stepped"}),
    ],
)
def test_a_plan_says_what_it_needs_of_a_session(text: str, needed: set[str]) -> None:
    assert PreemptionPlan.parse(text).capabilities == needed
    assert needed <= CAPABILITIES


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Step(-1), "Step(number=-1)"),
        (lambda: OutputTokens(0), "OutputTokens(count=0)"),
        (lambda: BlockBoundary(0), "BlockBoundary(block=0)"),
        (lambda: Squeeze(0, 1, 2), "Squeeze(blocks=0)"),
        (lambda: Preempt("r0", Step(1), "drop"), "mode 'drop' is unknown"),  # type: ignore[arg-type]
        (lambda: Preempt("", Step(1)), "cannot name request ''"),
        (lambda: RandomPreempt(0.0, 1, 0), "is not in (0, 1]"),
        (lambda: Every(0), "Every(steps=0)"),
    ],
)
def test_actions_are_checked_where_they_are_made(make: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)
