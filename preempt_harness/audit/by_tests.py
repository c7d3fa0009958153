"""Looks for a fault by running tests in a pytest process that has it planted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from preempt_harness.audit.kill import Kill, Outcome
from preempt_harness.errors import HarnessError
from preempt_harness.faults.planting import PlantReport

EXACT = "exact"
SUITE = ("--pyargs", "preempt_harness.suite")
_TESTS_FAILED = 1
_LONGEST_OUTPUT = 2000


class TestRunError(HarnessError):
    """pytest could not run the tests at all."""

    __test__ = False  # pytest would take it for a class of tests


def look_by_tests(
    tests: Sequence[str], fault: str, timeout_s: float, *, model: str = EXACT
) -> Kill:
    """Run tests until the first one fails.

    Args:
        tests: arguments for pytest: paths, or `SUITE`.
        fault: name of the fault; "" plants none.
        model: what they run on, where they do not choose for themselves.
        timeout_s: a run that takes longer is killed, and counts as a failure.

    Raises:
        TestRunError: pytest refuses the arguments, finds no test, or dies.
    """
    with tempfile.TemporaryDirectory(prefix="preempt-audit-") as directory:
        path = Path(directory) / "report.json"
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("-p", "preempt_harness", "-p", "preempt_harness.faults.planting"),
            *("--preempt-engine", "embedded", "--preempt-plant-report", str(path)),
            *(("--preempt-plant-fault", fault) if fault else ()),
            *(("--preempt-model", model) if model != EXACT else ()),
            *tests,
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Kill(
                outcome=Outcome.KILLED,
                reached=1,
                where="timeout",
                message=f"the tests did not end within {timeout_s:g} s",
                cpu_s=timeout_s,
            )
        if done.returncode not in (0, _TESTS_FAILED) or not path.exists():
            raise TestRunError(
                f"pytest ended with status {done.returncode}: "
                f"{(done.stdout + done.stderr)[-_LONGEST_OUTPUT:]}",
                "Run the tests by hand first; they must pass on the embedded engine.",
            )
        report = msgspec.json.decode(path.read_bytes(), type=PlantReport)
    return Kill(
        outcome=Outcome.KILLED if report.num_failed else Outcome.SURVIVED,
        codes=tuple(report.codes),
        where=report.first_failure,
        message=report.message.partition("\n")[0],
        num_trials=report.num_trials,
        cpu_s=report.cpu_s,
        reached=report.reached,
    )
