"""Searching from a test: markers and options, and what a failure leaves behind."""

from __future__ import annotations

import os

import pytest

from tests.plugin.conftest import SOURCE_PATHS

TEST = """
    import contextlib
    import pytest
    from preempt_harness.faults import fault_named, plant

    @pytest.mark.preempt_explore({marker})
    def test_search(preempt):
        fault = {fault!r}
        planted = plant(fault_named(fault)) if fault else contextlib.nullcontext()
        with planted:
            outcome = preempt.explore()
        print("trials", outcome.num_trials)
"""


@pytest.fixture(autouse=True)
def source_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a subprocess in another folder finds the harness, installed or not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(SOURCE_PATHS))


def source(marker: str = "", fault: str = "") -> str:
    """A test module that explores."""
    return TEST.format(marker=marker, fault=fault)


def test_a_clean_engine_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(source('strategy="swarm", examples=3'))
    result = pytester.runpytest_subprocess("-p", "preempt_harness", "-rP")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*trials 3*"])


@pytest.mark.parametrize(("marker", "expected"), [("", 2), ("examples=4", 4)])
def test_the_marker_goes_before_the_command_line(
    pytester: pytest.Pytester, marker: str, expected: int
) -> None:
    pytester.makepyfile(source(marker))
    result = pytester.runpytest_subprocess("-p", "preempt_harness", "-rP", "--preempt-examples=2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*trials {expected}*"])


def test_a_failure_is_written_and_can_be_replayed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(source("examples=20", fault="resume-cut-to-first-chunk"))
    result = pytester.runpytest_subprocess("-p", "preempt_harness")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*CRASH-EXCEPTION*", "*preempt-harness replay *.json*"])
    (path,) = (pytester.path / "preempt-failures").iterdir()
    assert '"preempt_replay": 1' in path.read_text()


def test_an_unknown_argument_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(source("trials=3"))
    result = pytester.runpytest_subprocess("-p", "preempt_harness")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*preempt_explore(trials)*expected keyword arguments*examples*"])
