"""`preempt-harness check LOG`: all checks over a trial that was recorded before."""

from __future__ import annotations

import argparse
from pathlib import Path

from preempt_harness import record
from preempt_harness.checks import CHECK_NAMES, CheckOptions, run_checks
from preempt_harness.cli import _judging
from preempt_harness.errors import HarnessError
from preempt_harness.record import Preempted, RecordFormatError, TrialRecord


class LogUnreadableError(HarnessError, ValueError):
    """The file is no trial record."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("log", type=Path, metavar="LOG", help="trial record, JSON lines")
    parser.add_argument(
        "--require",
        nargs="+",
        action="extend",
        default=[],
        choices=CHECK_NAMES,
        metavar="CHECK",
        help=f"fail when a check cannot judge: {', '.join(CHECK_NAMES)}",
    )
    parser.add_argument(
        "--verify",
        choices=("incremental", "full"),
        default="incremental",
        help="what KVSan reads again in each step: what changed, or everything",
    )
    _judging.add_tolerance_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print findings; 1 when there are any, or a required check could not judge."""
    trial = _read(arguments.log)
    tolerance = _judging.tolerance_of(trial.header, arguments.tolerances)
    report = run_checks(trial, options=CheckOptions(tolerance=tolerance, verify=arguments.verify))
    _judging.print_report(report)
    blind = sorted(
        {name.partition("/")[0] for name in report.not_observable} & set(arguments.require)
    )
    if blind:
        print(f"required and not observable: {', '.join(blind)}")
    print(_summary(trial, len(report.findings)))
    return 1 if report.findings or blind else 0


def _read(path: Path) -> TrialRecord:
    try:
        return record.read(path)
    except (OSError, RecordFormatError) as error:
        raise LogUnreadableError(
            f"{path} cannot be read as a trial record: {error}.",
            "Give a file of JSON lines as `preempt-harness replay --log FILE` writes it "
            "(docs/trial-record.md).",
        ) from error


def _summary(trial: TrialRecord, num_findings: int) -> str:
    header = trial.header
    num_preemptions = sum(isinstance(event, Preempted) for event in trial.events)
    return (
        f"{num_findings} findings in {len(trial.events)} events of engine {header.engine}, model "
        f"{header.model}, {header.num_blocks} blocks of {header.block_size}: "
        f"{len(trial.results)} requests, {num_preemptions} preemptions"
    )
