"""Gathers, on the controller, what trials and skips left in the reports of tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from preempt_harness.summary import TrialSummary

# Name of the report property that carries a trial's summary; see `session_state`.
PROPERTY = "preempt_harness_trial"
_SKIP_PREFIXES = ("Skipped: engine ", "Skipped: Engine ")


class TrialCollector:
    """Takes summaries from test reports, wherever the tests ran, and writes them at the end.

    Args:
        config: of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.summaries: list[TrialSummary] = []
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called once per phase of a test; the last one carries everything."""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
            if reason.startswith(_SKIP_PREFIXES):
                self.skips[reason.removeprefix("Skipped: ")] += 1
        if report.when != "teardown":
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                from preempt_harness.summary import TrialSummary

                self.summaries.append(TrialSummary.from_json(str(value)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was preempted, when, and what was compared; on request also into a file."""
        if not self.summaries and not self.skips:
            return
        from preempt_harness.report import write_json_lines, write_summary

        write_summary(terminalreporter, self.summaries, self.skips)
        path = self._config.getoption("preempt_report") or self._config.getini("preempt_report")
        if path:
            write_json_lines(Path(path), self.summaries)
            terminalreporter.write_line(f"{len(self.summaries)} trials written to {path}")
