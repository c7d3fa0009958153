"""Steady steps: what is taken together, what is not, and that no check sees less for it."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from damaged_records import damage, findings, findings_step_by_step, num_steady, steady_records
from hypothesis import given, settings
from hypothesis import strategies as st

from preempt_harness.checks import Code, run_checks
from preempt_harness.checks.kvsan import check_kvsan
from preempt_harness.checks.sanitizer import RankSanitizer
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    AnyEvent,
    Arrived,
    BlocksAllocated,
    BlocksCopied,
    BlocksPoisoned,
    Computed,
    Header,
    PoolCounts,
    PoolState,
    Preempted,
    Scheduled,
    StepDone,
    StepLaunched,
    TokensDelivered,
    TrialRecord,
    event_names,
)
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

SIZE = 4
NUM_STEPS = 12
PROMPTS = {"r0": [1, 2, 3], "r1": [4, 5]}
TABLES = {"r0.0": [0, 1, 2, 3], "r1.0": [4, 5, 6, 7]}

_UNJUDGED = {"token_ids", "written_slots", "text"}  # what they are; how many is looked at


def steps(first: int = 0, number: int = NUM_STEPS, **header: Any) -> TrialRecord:
    """Two requests that decode, a token each a step, in blocks that they have from the start."""
    events: list[AnyEvent] = [Arrived(first, name, prompt, 16) for name, prompt in PROMPTS.items()]
    events += [BlocksAllocated(first, seq, table) for seq, table in TABLES.items()]
    for step in range(number):
        events += one_step(first, step)
    workload = Workload(
        requests=[
            RequestSpec(id=name, prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=16))
            for name, prompt in PROMPTS.items()
        ]
    )
    described = Header(
        workload=workload.to_builtins(),
        engine="by hand",
        model="none",
        block_size=SIZE,
        num_blocks=10,
        vocab_size=100,
        observed=sorted(event_names()),
    )
    return TrialRecord(header=msgspec.structs.replace(described, **header), events=events)


def one_step(first: int, step: int) -> list[AnyEvent]:
    """All that is told of it; in step 0 the prompts are computed."""
    scheduled: list[AnyEvent] = []
    computed: list[AnyEvent] = []
    delivered: list[AnyEvent] = []
    for name, prompt in PROMPTS.items():
        seq = f"{name}.0"
        known = [*prompt, *(output(name, before) for before in range(step))]
        start = len(known) - 1 if step else 0
        slots = [TABLES[seq][p // SIZE] * SIZE + p % SIZE for p in range(start, len(known))]
        new = [] if step else TABLES[seq]
        scheduled.append(Scheduled(first + step, seq, start, len(known)))
        computed.append(
            Computed(
                first + step, 0, seq, start, known[start:], slots, 4 - len(new), new, len(known)
            )
        )
        delivered.append(TokensDelivered(first + step, seq, [output(name, step)]))
    at = first + step
    sizes = PoolCounts(at, num_blocks=10, free=2, cached=0, used=8)
    return [*scheduled, StepLaunched(at), *computed, StepDone(at), *delivered, sizes]


def output(request: str, step: int) -> int:
    """The model."""
    return 10 + (7 * step + len(request) + len(PROMPTS[request])) % 80


def taken_together(record: TrialRecord) -> list[int]:
    """How many steps stand in each piece of more than one."""
    folded = Trace(record).folded
    pieces = [piece for piece in folded if isinstance(piece, SteadySteps | IdleSteps)]
    return [piece.num_steps for piece in pieces if piece.num_steps > 1]


# What is taken together ---------------------------------------------------------------------------


def test_steps_that_only_go_on_are_one_piece() -> None:
    record = steps()
    # Step 0 computes whole prompts, the others a token a row.
    assert taken_together(record) == [NUM_STEPS - 1]
    piece = Trace(record).of(SteadySteps)[-1]
    assert (piece.step, piece.last_step) == (1, NUM_STEPS - 1)
    assert (piece.seqs, piece.lengths) == (("r0.0", "r1.0"), [1, 1])
    assert (piece.starts, piece.ends) == ([3, 2], [2 + NUM_STEPS, 1 + NUM_STEPS])
    assert piece.num_tokens == 2 * (NUM_STEPS - 1)
    assert piece.computed_ids(0) == [output("r0", step) for step in range(NUM_STEPS - 1)]
    assert piece.delivered_ids()[0] == [output("r0", step) for step in range(1, NUM_STEPS)]


def test_a_stay_begins_without_a_closer_look() -> None:
    """KVSan takes whole prompts and what follows as they are; behind a prefix hit, too."""
    record = steps()
    hit = [0, 1, 8, 9]  # r0's blocks are full after five steps
    history = [*PROMPTS["r0"], *(output("r0", step) for step in range(SIZE + 1))]
    prompt = [*history, 50, 51]
    slots = [8 * SIZE, 8 * SIZE + 1]
    late: list[AnyEvent] = [
        Arrived(NUM_STEPS, "r2", prompt, 16),
        BlocksAllocated(NUM_STEPS, "r2.0", hit, num_cached=2),
        Scheduled(NUM_STEPS, "r2.0", 2 * SIZE, len(prompt)),
        StepLaunched(NUM_STEPS),
        Computed(NUM_STEPS, 0, "r2.0", 2 * SIZE, [50, 51], slots, 0, hit, len(prompt)),
        StepDone(NUM_STEPS),
        PoolCounts(NUM_STEPS, num_blocks=10, free=0, cached=0, used=10),
    ]
    record.events += late
    compute = RankSanitizer.compute
    with patch.object(RankSanitizer, "compute", autospec=True, side_effect=compute) as closer:
        assert not check_kvsan(record).findings
        closer.assert_not_called()
        place = record.events.index(late[0])
        record.events[place] = Arrived(NUM_STEPS, "r2", [*prompt[:3], 60, *prompt[4:]], 16)
        assert {item.code for item in check_kvsan(record).findings} == {Code.KVSAN_STALE_READ}
        closer.assert_called_once()


def test_sizes_of_the_pool_may_come_before_the_tokens() -> None:
    record = steps()
    for step in range(NUM_STEPS):
        places = _of_step(record, step)
        record.events.insert(places[-3], record.events.pop(places[-1]))
    assert taken_together(record) == [NUM_STEPS - 1]
    piece = Trace(record).of(SteadySteps)[-1]
    assert (piece.pool.step, piece.delivered_seqs) == (1, ("r0.0", "r1.0"))
    assert piece.delivered_ids()[1] == [output("r1", step) for step in range(1, NUM_STEPS)]
    assert findings(record) == findings_step_by_step(record)


def test_steps_in_which_nothing_runs_are_one_piece() -> None:
    record = steps()
    record.events = [PoolCounts(step, 10, 10, 0, 0) for step in range(NUM_STEPS)]
    assert taken_together(record) == [NUM_STEPS]
    record.events[5] = PoolCounts(5, 10, 9, 0, 0)
    assert taken_together(record) == [5, NUM_STEPS - 6]


def _of_step(record: TrialRecord, step: int) -> list[int]:
    return [place for place, event in enumerate(record.events) if event.step == step]


@pytest.mark.parametrize("index", range(len(one_step(0, 5))))
def test_step_that_is_odd_in_any_field_is_not_taken_with_those_before(index: int) -> None:
    record = steps()
    place = _of_step(record, 5)[index]
    event = record.events[place]
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name in _UNJUDGED:
            others = [[*value, 1], []] if isinstance(value, list) else []
        elif isinstance(value, int):
            others = [value + 1, value - 1]
        elif isinstance(value, str):
            others = ["r9.0"]
        else:
            others = [[1]] if isinstance(value, list) else [[{1: 0.5}]]
        for other in others:
            record.events[place] = msgspec.structs.replace(event, **{name: other})
            pieces = Trace(record).of(SteadySteps)
            assert not any(piece.step < 5 <= piece.last_step for piece in pieces), (name, other)


@pytest.mark.parametrize("index", range(len(one_step(0, 5))))
def test_step_with_a_missing_or_repeated_event_is_not_taken_with_those_before(index: int) -> None:
    for times in (0, 2):
        record = steps()
        place = _of_step(record, 5)[index]
        record.events[place : place + 1] = [record.events[place]] * times
        pieces = Trace(record).of(SteadySteps)
        assert not any(piece.step < 5 <= piece.last_step for piece in pieces)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Scheduled(5, "r2.0", 0, 4)], []),
        ([BlocksCopied(5, [(0, 9)])], []),
        ([], [Computed(5, 0, "r2.0", 0, [1], [32], 0, [8], 1)]),
        ([], [TokensDelivered(5, "r1.0", [1])]),
        ([], [Preempted(5, "r0", "recompute", "decode", "forced", 8, 9)]),
    ],
)
def test_step_of_which_more_is_told_is_judged_by_itself(
    before: list[AnyEvent], after: list[AnyEvent]
) -> None:
    record = steps()
    places = _of_step(record, 5)
    record.events[places[-1] + 1 : places[-1] + 1] = after
    record.events[places[0] : places[0]] = before
    pieces = Trace(record).of(SteadySteps)
    assert not any(piece.step <= 5 <= piece.last_step for piece in pieces)
    assert findings(record) == findings_step_by_step(record)


def test_whole_pool_may_be_told_of_at_any_place() -> None:
    """It comes behind the steps in which it stands, and is judged all the same."""
    free = [8, 9]
    for end in range(len(one_step(0, 5)) + 1):
        for freed in (free, [8]):
            record = steps()
            place = _of_step(record, 5)[0] + end
            state = PoolState(5, 10, freed, [], [], [], [1] * 8 + [0] * 2, TABLES, [], [*PROMPTS])
            record.events.insert(place, state)
            assert taken_together(record) == [NUM_STEPS - 1]
            assert Trace(record).of(PoolState) == [state]
            assert findings(record) == findings_step_by_step(record)
            lost = run_checks(record, ["accounting"]).of("accounting")
            assert any(item.part == "pool state" and item.findings for item in lost) == (
                freed is not free
            )


def test_whole_pool_may_be_told_of_in_steps_in_which_nothing_runs() -> None:
    record = steps()
    state = PoolState(5, 10, [*range(10)], [], [], [], [0] * 10, {}, [], [])
    record.events = [PoolCounts(step, 10, 10, 0, 0) for step in range(NUM_STEPS)]
    record.events.insert(6, state)
    assert taken_together(record) == [NUM_STEPS]
    assert Trace(record).of(PoolState) == [state]
    assert findings(record) == findings_step_by_step(record)


@pytest.mark.parametrize(
    "header", [{"num_ranks": 2}, {"config": {"num_speculative_tokens": 2}}], ids=["ranks", "drafts"]
)
def test_nothing_is_taken_together_with_ranks_or_drafts(header: dict[str, Any]) -> None:
    record = steps(**header)
    assert taken_together(record) == []


def test_nothing_is_taken_together_where_step_numbers_fall() -> None:
    record = steps()
    record.events.append(StepDone(3))
    assert taken_together(record) == []


# What is found ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(steady_records(), st.randoms(use_true_random=False), st.booleans())
def test_no_check_sees_less_in_steady_steps(
    record: TrialRecord, dice: random.Random, is_damaged: bool
) -> None:
    if is_damaged:
        damage(record, dice)
    assert findings(record) == findings_step_by_step(record)


def test_every_damage_of_one_field_is_seen_as_before() -> None:
    dice = random.Random(0)
    total = 0
    for _ in range(300):
        record = steps(first=dice.choice((0, 3)))
        damage(record, dice)
        total += num_steady(record)
        assert findings(record) == findings_step_by_step(record)
    assert total > 300  # pieces are left to be damaged


def _changed(step: int, **changes: Any) -> TrialRecord:
    """One field of r0's `Computed` in that step is another."""
    record = steps()
    place = next(
        place
        for place, event in enumerate(record.events)
        if isinstance(event, Computed) and (event.step, event.seq) == (step, "r0.0")
    )
    record.events[place] = msgspec.structs.replace(record.events[place], **changes)
    return record


def test_wrong_slot_within_steady_steps_names_its_step() -> None:
    record = _changed(7, written_slots=[36])
    assert taken_together(record) == [NUM_STEPS - 1]
    (finding,) = (f for f in run_checks(record, ["kvsan"]).findings if f.request == "r0")
    assert (finding.code, finding.step, finding.position) == (Code.KVSAN_WRONG_SLOT, 7, 9)


def test_wrong_token_within_steady_steps_names_its_step() -> None:
    record = _changed(7, token_ids=[99])
    assert taken_together(record) == [NUM_STEPS - 1]
    first = run_checks(record, ["kvsan"]).findings[0]
    assert (first.code, first.step, first.position) == (Code.KVSAN_TOKEN_MISMATCH, 7, 9)


def test_block_new_to_two_tables_at_once_is_found() -> None:
    record = steps()
    record.events = [_with_block_9(event) for event in record.events]
    assert findings(record) == findings_step_by_step(record)
    assert run_checks(record, ["kvsan"]).findings


def _with_block_9(event: AnyEvent) -> AnyEvent:
    """Tables of two blocks at first; from step 5 on both have block 9 as their third."""
    if not isinstance(event, Computed):
        return event
    keep = 0 if event.step == 0 else 2 if event.step <= 5 else 3
    new = event.table_new[:2] if event.step == 0 else [9] if event.step == 5 else []
    return msgspec.structs.replace(event, table_keep=keep, table_new=new)


def test_poison_between_steady_steps_is_found_at_once() -> None:
    record = steps()
    place = _of_step(record, 6)[-1] + 1
    record.events.insert(place, BlocksPoisoned(6, 0, [0]))
    assert findings(record) == findings_step_by_step(record)
    finding = next(f for f in run_checks(record, ["kvsan"]).findings if f.request == "r0")
    assert (finding.code, finding.step) == (Code.KVSAN_SHARED_WRITE, 6)


def test_positions_left_out_between_steady_steps_are_found() -> None:
    record = steps()
    record.events = [event for event in record.events if not _is_row(event, 6)]
    assert findings(record) == findings_step_by_step(record)
    assert {f.code for f in run_checks(record, ["kvsan"]).findings} >= {Code.KVSAN_GAP}


def _is_row(event: AnyEvent, step: int) -> bool:
    return isinstance(event, Scheduled | Computed) and event.step == step


def test_sound_steady_steps_have_no_finding() -> None:
    assert run_checks(steps(), ["kvsan"]).findings == ()
    assert run_checks(steps(), ["accounting"]).findings == ()
