"""Gauges: what an engine says of its present state is what the state shows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.record import Counters, PoolState

replace = msgspec.structs.replace

STATE = PoolState(
    step=3,
    num_blocks=8,
    free=[6, 7],
    cached=[5],
    held=[0],
    fenced=[],
    ref_counts=[0, 2, 1, 1, 1, 0, 0, 0],
    tables={"r0.0": [1, 2], "r1.0": [1, 3, 4]},
    waiting=["r2"],
    running=["r0", "r1"],
)
RIGHT = {"num_running_requests": 2, "num_used_blocks": 4, "num_waiting_requests": 1}


def judged(values: dict[str, int], state: PoolState = STATE, step: int = 3) -> list[Finding]:
    record = run_fake(make_workload([6, 9, 7], max_tokens=4))
    config: dict[str, Any] = {"reserved_blocks": 1}
    record.header = replace(record.header, num_blocks=8, config=config)
    record.events = [state, Counters(step, values)]
    return [
        finding
        for result in run_checks(record, ["accounting"]).of("accounting")
        if result.part == "gauges"
        for finding in result.findings
    ]


def test_what_the_state_shows_is_right() -> None:
    assert judged(RIGHT) == []
    assert judged({"num_steps": 99}) == []


@pytest.mark.parametrize("name", RIGHT)
def test_another_number_is_found(name: str) -> None:
    (found,) = judged({**RIGHT, name: RIGHT[name] + 1})
    assert (found.code, found.step) == (Code.ACC_COUNTER, 3)
    assert f"{name} is {RIGHT[name] + 1}, its state shows {RIGHT[name]}" in found.message


def test_blocks_that_the_harness_holds_are_in_use() -> None:
    held = replace(STATE, held=[0, 7], free=[6])
    assert judged({"num_used_blocks": 5}, held) == []
    assert judged({"num_used_blocks": 4}, held)


def test_a_state_of_another_step_tells_nothing() -> None:
    assert judged({"num_used_blocks": 7}, step=4) == []
