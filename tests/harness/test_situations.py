"""The situation table: what is credited, and which pairs nobody can reach."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload, trials
from hypothesis import given, settings

from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    Event,
    Preempted,
    Resumed,
    TrialRecord,
)
from preempt_harness.situations import (
    DIMENSIONS,
    UNREACHABLE_RULES,
    Situation,
    all_pairs,
    classify,
    pairs,
    reachable_pairs,
    unreachable,
)

SIZE = 4


def history(*events: Event, caching: bool = True) -> TrialRecord:
    record = run_fake(make_workload([1], max_tokens=1), enable_prefix_caching=caching)
    record.events = list(events)  # type: ignore[arg-type]
    return record


def arrive(request: str, prompt: list[int]) -> Arrived:
    return Arrived(0, request, prompt, 8)


def preempt(request: str, step: int = 1, computed: int = 6, tokens: int = 7) -> Preempted:
    return Preempted(step, request, "recompute", "decode", "forced", computed, tokens)


PROMPT = [1, 2, 3, 4, 5]
HELD = [arrive("r0", PROMPT), BlocksAllocated(0, "r0.0", [0, 1])]
LOST = [preempt("r0"), BlocksFreed(1, "r0.0", [0, 1])]


def only(record: TrialRecord) -> Situation:
    (situation,) = classify(record)
    return situation


def test_a_lone_preemption_has_one_value_in_each_dimension() -> None:
    situation = only(history(*HELD, *LOST, Resumed(2, "r0", 4)))
    assert situation.values == {
        "phase": ("decode",),
        "offset": ("other",),
        "repeat": ("first",),
        "victims": ("one",),
        "neighbour": ("alone",),
        "hit": ("full",),
        "prefix_cache": ("on",),
        "accepted": (),
    }
    assert len(situation.pairs()) == 7 * 6 // 2


@pytest.mark.parametrize(
    ("computed", "offset"), [(8, "0"), (5, "1"), (7, "B-1"), (6, "other"), (0, "0")]
)
def test_offset_is_of_the_computed_tokens(computed: int, offset: str) -> None:
    record = history(*HELD, preempt("r0", computed=computed, tokens=9))
    assert only(record).values["offset"] == (offset,)


@pytest.mark.parametrize(
    ("computed", "tokens", "found", "hit"),
    [
        (10, 11, 8, "full"),
        (10, 11, 4, "partial"),
        (10, 11, 0, "no"),
        (8, 8, 4, "full"),  # a hit never covers the whole sequence
        (6, 30, 4, "full"),  # of what was computed
    ],
)
def test_hit_is_measured_by_what_could_be_found(
    computed: int, tokens: int, found: int, hit: str
) -> None:
    record = history(
        *HELD, preempt("r0", computed=computed, tokens=tokens), Resumed(2, "r0", found)
    )
    assert only(record).values["hit"] == (hit,)


def test_request_that_never_comes_back_shows_no_hit() -> None:
    situation = only(history(*HELD, *LOST))
    assert situation.values["hit"] == ()
    assert not any("hit" in dict(pair) for pair in situation.pairs())


def test_second_preemption_is_a_repeated_one() -> None:
    record = history(*HELD, *LOST, Resumed(2, "r0", 0), preempt("r0", step=3))
    assert [situation.values["repeat"] for situation in classify(record)] == [
        ("first",),
        ("repeated",),
    ]


@pytest.mark.parametrize(("victims", "value"), [(1, "one"), (2, "several"), (3, "all")])
def test_victims_are_counted_against_those_who_ran(victims: int, value: str) -> None:
    held: list[Event] = [BlocksAllocated(0, f"r{index}.0", [index]) for index in range(3)]
    record = history(*held, *[preempt(f"r{index}") for index in range(victims)])
    assert {situation.values["victims"] for situation in classify(record)} == {(value,)}


def test_bystander_is_given_a_lost_block_before_the_victim_is_back() -> None:
    taken = BlocksAllocated(1, "r1.0", [1])
    assert only(history(*HELD, *LOST, taken)).values["neighbour"] == ("bystander",)
    late = history(*HELD, *LOST, Resumed(2, "r0", 0), taken)
    assert only(late).values["neighbour"] == ("alone",)
    itself = history(*HELD, *LOST, Resumed(2, "r0", 0), BlocksAllocated(2, "r0.0", [1]))
    assert only(itself).values["neighbour"] == ("alone",)


def test_later_sharer_arrives_afterwards_with_the_same_first_block() -> None:
    sharer = arrive("r1", [*PROMPT[:SIZE], 9])
    assert only(history(*HELD, *LOST, sharer)).values["neighbour"] == ("later_sharer",)
    assert only(history(*HELD, sharer, *LOST)).values["neighbour"] == ("alone",)
    other = arrive("r1", [*PROMPT[: SIZE - 1], 9])
    assert only(history(*HELD, *LOST, other)).values["neighbour"] == ("alone",)


def test_both_neighbours_are_credited() -> None:
    record = history(
        *HELD, *LOST, arrive("r1", PROMPT), BlocksAllocated(2, "r1.0", [0]), Resumed(3, "r0", 0)
    )
    situation = only(record)
    assert situation.values["neighbour"] == ("bystander", "later_sharer")
    assert (("neighbour", "bystander"), ("hit", "no")) in situation.pairs()
    assert (("neighbour", "later_sharer"), ("hit", "no")) in situation.pairs()


def test_cache_setting_that_is_not_known_is_not_credited() -> None:
    record = history(*HELD, *LOST)
    record.header = msgspec.structs.replace(record.header, config={})
    assert "prefix_cache" not in only(record).values


# The table ----------------------------------------------------------------------------------------


def test_pairs_are_reachable_or_have_a_reason() -> None:
    assert reachable_pairs() | unreachable().keys() == all_pairs()
    assert not reachable_pairs() & unreachable().keys()
    assert all(unreachable().values())


def test_unreachable_pairs_are_these() -> None:
    assert set(unreachable()) == {
        (("hit", "partial"), ("prefix_cache", "off")),
        (("hit", "full"), ("prefix_cache", "off")),
        (("phase", "just_resumed"), ("repeat", "first")),
        (("phase", "prefill_first"), ("repeat", "repeated")),
        *((("drafts", "off"), ("accepted", value)) for value in DIMENSIONS["accepted"]),
        *(
            (("phase", phase), ("accepted", value))
            for phase in DIMENSIONS["phase"]
            if phase != "decode"
            for value in DIMENSIONS["accepted"]
        ),
        *((("drafts", "draft_model"), ("ahead", depth)) for depth in ("1", "2")),
    }


@pytest.mark.parametrize("rule", UNREACHABLE_RULES)
def test_every_rule_forbids_something(rule: object) -> None:
    assert any(rule.forbids(dict(pair)) for pair in all_pairs())  # type: ignore[attr-defined]


def test_pairs_name_two_dimensions_in_order() -> None:
    order = list(DIMENSIONS)
    for (first, _), (second, _) in all_pairs():
        assert order.index(first) < order.index(second)


@settings(max_examples=60, deadline=None)
@given(trials())
def test_no_run_shows_an_unreachable_pair(record: TrialRecord) -> None:
    assert not pairs(classify(record)) & unreachable().keys()


def test_every_preemption_is_classified() -> None:
    record = run_fake(make_workload([6, 9, 7], max_tokens=12), num_blocks=8)
    events = [event for event in record.events if isinstance(event, Preempted)]
    assert [(s.step, s.request) for s in classify(record)] == [(e.step, e.request) for e in events]
