"""Known issues of an engine as strict expected failures.

A test whose name matches an issue is expected to fail with that issue's finding code. It counts as
an expected failure only if the failure names the code; when it passes, it fails: the issue is gone,
and its entry must go too.
"""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from preempt_harness.adapters.protocol import EngineAdapter, KnownIssue


def issue_of(adapter: EngineAdapter, test_name: str) -> KnownIssue | None:
    """The known issue that a test is expected to show on this engine.

    Args:
        adapter: of the engine.
        test_name: name of the test with its parameters, without the file.
    """
    for issue in adapter.known_issues:
        if fnmatch(test_name, issue.scenario.replace("[", "[[]")):
            return issue
    return None


def apply(issue: KnownIssue, report: pytest.TestReport) -> None:
    """Change the report of a test's call to what strict expected failure makes of it."""
    reason = f"{issue.code}, versions {issue.versions}, {issue.link}"
    if report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"[XPASS(strict)] this engine is known for {reason}, and this test does not show it: "
            f"remove the known issue, or correct its scenario."
        )
    elif report.failed and str(issue.code) in str(report.longrepr):
        report.outcome = "skipped"
        report.wasxfail = f"reason: known issue {reason}"
