"""Records with something wrong in them, wherever it may be; and steady steps judged both ways.

PYTHONPATH=.:tests/harness python tests/harness/damaged_records.py 5000
"""

from __future__ import annotations

import random
import sys
from typing import Any
from unittest.mock import patch

import msgspec
from fake_engine import FakeConfig, FakeEngine
from fake_trials import CONTENT_FAULTS, workloads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preempt_harness.checks import CheckResult, run_checks
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    AnyEvent,
    Counters,
    PoolCounts,
    PoolState,
    StepSent,
    TokensDelivered,
    TrialRecord,
)


@st.composite
def steady_records(draw: st.DrawFn) -> TrialRecord:
    """Records of the fake engine with many steps that are alike, and perhaps a planted fault."""
    faults = draw(st.sampled_from((None, None, *CONTENT_FAULTS)))
    names = ("r0", "r1", "r2")
    forced = st.dictionaries(st.integers(1, 20), st.sampled_from(names).map(lambda name: (name,)))
    config = FakeConfig(
        num_blocks=draw(st.integers(8, 24)),
        block_size=draw(st.sampled_from((4, 4, 8, 32))),
        max_num_batched_tokens=draw(st.sampled_from((2, 5, 9, 16))),
        enable_prefix_caching=draw(st.booleans()),
        move_every=draw(st.sampled_from((0, 0, 6))),
        max_steps=200,
        forced=draw(forced) if draw(st.booleans()) else {},
        faults=frozenset() if faults is None else frozenset({faults}),
    )
    record = FakeEngine(draw(workloads(max_tokens=30, last_arrival=40)), config).run()
    # Steps in which messages or the whole pool are told of are not taken together.
    often = draw(st.sampled_from((1, 4, 16)))
    record.events = [
        event
        for event in record.events
        if not isinstance(event, StepSent)
        and not (isinstance(event, PoolState | Counters) and event.step % often)
    ]
    if draw(st.booleans()):
        _tell_sizes_before_tokens(record.events)
    observed = [name for name in record.header.observed if name != "StepSent"]
    record.header = msgspec.structs.replace(record.header, observed=observed)
    return record


def _tell_sizes_before_tokens(events: list[AnyEvent]) -> None:
    """As engines do that decide ahead."""
    for place, event in enumerate(events):
        if isinstance(event, PoolCounts):
            first = place
            while isinstance(events[first - 1], TokensDelivered):
                first -= 1
            events.insert(first, events.pop(place))


def damage(record: TrialRecord, dice: random.Random) -> None:
    """Change, leave out, repeat or move some events."""
    events = record.events
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(events))
        way = dice.random()
        if way < 0.7:
            events[place] = _changed(events[place], record, dice)
        elif way < 0.8:
            del events[place]
        elif way < 0.9:
            events.insert(place, events[place])
        else:
            events.insert(dice.randrange(len(events)), events.pop(place))


def _changed(event: AnyEvent, record: TrialRecord, dice: random.Random) -> AnyEvent:
    name = dice.choice([field for field in event.__struct_fields__ if field != "traceback"])
    return msgspec.structs.replace(event, **{name: _other(getattr(event, name), record, dice)})


def _other(value: Any, record: TrialRecord, dice: random.Random) -> Any:
    """Another value of the same kind."""
    if value is None:
        return [{1: 0.5}]
    if isinstance(value, str):
        return dice.choice(["r0.0", "r1.0", "r1", "r2", "r7.0", "", "swap"])
    if isinstance(value, int):
        return value + dice.choice((-8, -4, -1, 1, 4, 8))
    if isinstance(value, dict):
        key = dice.choice(list(value) or ["r0.0"])
        return {**value, key: _other(value[key], record, dice)} if key in value else value
    changed = list(value)
    if changed and dice.random() < 0.6:
        place = dice.randrange(len(changed))
        if isinstance(changed[place], int | str):
            changed[place] = _other(changed[place], record, dice)
    elif changed and dice.random() < 0.5:
        del changed[dice.randrange(len(changed))]
    elif all(isinstance(item, int) for item in changed):
        changed.append(dice.randrange(record.header.num_blocks))
    return changed


def findings(record: TrialRecord) -> tuple[CheckResult, ...] | str:
    """What all checks say, or how they fail on a record that no engine writes."""
    try:
        return run_checks(record).results
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__


def findings_step_by_step(record: TrialRecord) -> tuple[CheckResult, ...] | str:
    """The same where no steps are taken together."""
    with patch("preempt_harness.checks.trace.may_be_steady", lambda header: False):
        return findings(record)


def num_steady(record: TrialRecord) -> int:
    """Steps that are judged together with others."""
    return sum(steps.num_steps - 1 for steps in Trace(record).of(SteadySteps))


def check_agreement(num_trials: int) -> int:
    """Both ways say the same of drawn trials, damaged ones included.

    Returns:
        How many steps were judged together with others.

    Raises:
        AssertionError: they differ on a trial, which Hypothesis shrinks and prints.
    """
    total = 0

    @settings(
        max_examples=num_trials,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(steady_records(), st.randoms(use_true_random=False), st.booleans())
    def agree(record: TrialRecord, dice: random.Random, is_damaged: bool) -> None:
        nonlocal total
        if is_damaged:
            damage(record, dice)
        total += num_steady(record)
        assert findings(record) == findings_step_by_step(record)

    agree()
    return total


if __name__ == "__main__":
    steps = check_agreement(int(sys.argv[1]))
    print(f"both ways agree on {sys.argv[1]} trials, of which {steps} steps were judged together")
