"""Crash: every way for an engine to die has its code."""

from __future__ import annotations

import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.checks import Code, run_checks
from preempt_harness.record import EngineError


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("AssertionError", Code.CRASH_EXCEPTION),
        ("signal", Code.CRASH_SIGNAL),
        ("exit", Code.CRASH_EXIT),
        ("hang", Code.CRASH_HANG),
    ],
)
def test_engine_error_is_a_finding_with_step_and_message(kind: str, code: Code) -> None:
    record = run_fake(make_workload([5], max_tokens=3))
    assert run_checks(record, ["crash"]).findings == ()
    record.events.append(EngineError(7, kind, "what it said"))
    (finding,) = run_checks(record, ["crash"]).findings
    assert (finding.code, finding.step) == (code, 7)
    assert "what it said" in finding.message
