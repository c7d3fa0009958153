"""What `check` and `replay` share: the tolerance of a record, and how findings are printed."""

from __future__ import annotations

import argparse
from pathlib import Path

from preempt_harness import tolerances
from preempt_harness.checks import CheckReport, Tolerance
from preempt_harness.record import Header
from preempt_harness.result import describe


def add_tolerance_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--tolerances`."""
    parser.add_argument(
        "--tolerances",
        type=Path,
        metavar="FILE",
        help="of `preempt-harness calibrate`; default: the table that ships",
    )


def tolerance_of(header: Header, path: Path | None) -> Tolerance | None:
    """The measured tolerance of what a record ran on; None if there is none.

    Raises:
        ToleranceFileError: the file is no tolerance table.
    """
    table = tolerances.shipped() if path is None else tolerances.read(path)
    return table.of(header)


def print_report(report: CheckReport) -> None:
    """Findings, then what could not be judged."""
    for finding in report.findings:
        print(describe(finding))
    for name, reason in report.not_observable.items():
        print(f"NOT OBSERVABLE: {name}: {reason}")
