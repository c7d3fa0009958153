"""One word for a judged trial, and the order in which the words apply."""

from __future__ import annotations

from enum import StrEnum

from preempt_harness.checks import CheckReport
from preempt_harness.checks.finding import Code
from preempt_harness.checks.tokens import Comparison, TokenVerdict, why_not_comparable
from preempt_harness.record import Preempted, TrialRecord


class Verdict(StrEnum):
    """What a trial shows.

    EQUAL             every output equals the baseline's.
    BENIGN            outputs differ by near ties only, with evidence.
    DIVERGED          an output differs, and float noise does not explain it.
    VACUOUS           no preemption happened, so nothing was tested.
    INVALID_BASELINE  the unpreempted run is no reference: preempted itself, or with findings.
    HANG              the engine stopped answering, or never ended.
    ERROR             the engine raised or died.
    FLAKY             the same trial run twice gave different records.
    """

    EQUAL = "EQUAL"
    BENIGN = "BENIGN"
    DIVERGED = "DIVERGED"
    VACUOUS = "VACUOUS"
    INVALID_BASELINE = "INVALID_BASELINE"
    HANG = "HANG"
    ERROR = "ERROR"
    FLAKY = "FLAKY"


def decide(
    record: TrialRecord,
    report: CheckReport,
    comparisons: list[Comparison],
    *,
    expect_preemption: bool,
) -> Verdict:
    """The first word that applies, the gravest first.

    Args:
        record: of the trial, with its baseline.
        report: of all checks.
        comparisons: of the outputs with the baseline's.
        expect_preemption: whether a trial without a preemption is worthless.
    """
    codes = {finding.code for finding in report.findings}
    if Code.CRASH_HANG in codes:
        return Verdict.HANG
    if codes & {Code.CRASH_EXCEPTION, Code.CRASH_SIGNAL, Code.CRASH_EXIT}:
        return Verdict.ERROR
    if why_not_comparable(record) is not None:
        return Verdict.INVALID_BASELINE
    verdicts = {comparison.verdict for comparison in comparisons}
    if TokenVerdict.DIVERGED in verdicts:
        return Verdict.DIVERGED
    if expect_preemption and not any(isinstance(event, Preempted) for event in record.events):
        return Verdict.VACUOUS
    return Verdict.BENIGN if TokenVerdict.BENIGN in verdicts else Verdict.EQUAL
