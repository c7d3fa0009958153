"""A judged trial, and what a test may assert of it.

Every assertion first asks whether the trial tested anything: where a preemption was expected and
none happened, each of them fails as VACUOUS. None uses a bare `assert`, so that `python -O` and
assertion rewriting change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from preempt_harness import replay
from preempt_harness.admission import AdmissionModel
from preempt_harness.budget import KVBudget
from preempt_harness.checks import CHECK_NAMES, CheckOptions, CheckReport, run_checks
from preempt_harness.checks.finding import Finding
from preempt_harness.checks.tokens import Comparison, Tolerance, compare_tokens
from preempt_harness.prediction import predict
from preempt_harness.record import PlanMissed, TrialRecord
from preempt_harness.situations import classify, pair_name, pairs
from preempt_harness.summary import PreemptionNote, TrialSummary, preemption_notes
from preempt_harness.trial import Trial
from preempt_harness.verdict import Verdict, decide

_MAX_FINDINGS = 5  # printed in a failure
_MAX_TEXT = 60  # characters of a prompt in a report


class PreemptionAssertionError(AssertionError):
    """An assertion about a trial does not hold."""


class VacuousTrialError(PreemptionAssertionError):
    """Nothing was preempted, so the trial shows nothing."""


class NotObservableError(PreemptionAssertionError):
    """A check that the test requires cannot judge this engine."""


@dataclass(eq=False)
class TrialResult:
    """One trial with its judgement.

    Attributes:
        trial: what was run.
        record: what happened.
        report: of all checks.
        comparisons: each output with the baseline's.
        verdict: in one word.
        preemptions: all of them, in order.
        asserted: True once a test has asserted something.
    """

    trial: Trial
    record: TrialRecord
    report: CheckReport
    comparisons: list[Comparison]
    verdict: Verdict
    preemptions: list[PreemptionNote]
    admission: AdmissionModel = field(repr=False)
    expect_preemption: bool = True
    test: str = ""
    seconds: float = 0.0
    asserted: bool = False

    @classmethod
    def judge(
        cls,
        *,
        trial: Trial,
        record: TrialRecord,
        admission: AdmissionModel,
        tolerance: Tolerance | None = None,
        expect_preemption: bool = True,
        test: str = "",
        started: float | None = None,
    ) -> TrialResult:
        """Apply all checks to a record that has its baseline and scores.

        Args:
            trial: what was run.
            record: what happened.
            admission: the engine's rules, to say which block count would have preempted.
            tolerance: of the token check; None allows exact equality only.
            expect_preemption: a trial without a preemption is VACUOUS.
            test: node id, for reports.
            started: `time.perf_counter()` before the trial ran.
        """
        options = CheckOptions(tolerance=tolerance, prediction=predict(trial, record, admission))
        report = run_checks(record, options=options)
        comparisons = compare_tokens(record, tolerance)
        return cls(
            trial=trial,
            record=record,
            report=report,
            comparisons=comparisons,
            verdict=decide(record, report, comparisons, expect_preemption=expect_preemption),
            preemptions=preemption_notes(record),
            admission=admission,
            expect_preemption=expect_preemption,
            test=test,
            seconds=0.0 if started is None else time.perf_counter() - started,
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all checks, in their order."""
        return tuple(self.report.findings)

    # Assertions ---------------------------------------------------------------------------------

    def assert_preempted(
        self,
        *,
        at_least: int = 1,
        mode: str | None = None,
        phase: str | None = None,
        request: str | None = None,
    ) -> None:
        """At least so many preemptions of this kind happened.

        Args:
            at_least: how many, 1 or more.
            mode: "recompute" or "swap"; None counts both.
            phase: one of `record.PHASES`; None counts all.
            request: whose; None counts all.

        Raises:
            VacuousTrialError: fewer happened.
        """
        self._begin()
        wanted = {"mode": mode, "phase": phase, "request": request}
        matching = [
            note
            for note in self.preemptions
            if all(value is None or getattr(note, name) == value for name, value in wanted.items())
        ]
        if len(matching) < at_least:
            kind = ", ".join(f"{name}={value}" for name, value in wanted.items() if value)
            raise VacuousTrialError(
                self._text(
                    f"VACUOUS: {len(matching)} preemptions{f' with {kind}' if kind else ''}, "
                    f"at least {at_least} were asked for",
                    *self._failure_lines(),
                    self._why_vacuous(),
                )
            )

    def assert_matches_baseline(self) -> None:
        """Every output equals that of the unpreempted run, but for near ties with evidence.

        Raises:
            PreemptionAssertionError: one differs, the baseline is none, or the engine failed.
        """
        self._begin()
        if self.verdict not in (Verdict.EQUAL, Verdict.BENIGN):
            lines = [comparison.reason for comparison in self.comparisons if comparison.code]
            lines += self._failure_lines()
            if self.verdict is Verdict.INVALID_BASELINE and self.record.baseline is not None:
                lines += self.record.baseline.problems[:_MAX_FINDINGS]
            if self.verdict in (Verdict.HANG, Verdict.ERROR):
                lines += self._finding_lines()
            raise PreemptionAssertionError(self._text(str(self.verdict), *lines))

    def assert_clean(self, *, require: Iterable[str] = ()) -> None:
        """No check has a finding.

        Args:
            require: checks, such as "kvsan", that must have been able to judge.

        Raises:
            PreemptionAssertionError: there are findings.
            NotObservableError: a required check could not judge.
        """
        self._begin()
        required = set(require)
        blind = {
            name: reason
            for name, reason in self.report.not_observable.items()
            if name.partition("/")[0] in required
        }
        unknown = sorted(required - set(CHECK_NAMES))
        if unknown:
            raise PreemptionAssertionError(
                f"assert_clean(require={unknown}): no such check; known are "
                f"{', '.join(CHECK_NAMES)}"
            )
        if blind:
            listed = "; ".join(f"{name}: {reason}" for name, reason in blind.items())
            raise NotObservableError(self._text(f"NOT OBSERVABLE: {listed}"))
        if self.findings:
            raise PreemptionAssertionError(
                self._text(f"{len(self.findings)} findings", *self._finding_lines())
            )

    # Reports ------------------------------------------------------------------------------------

    def summary(self) -> TrialSummary:
        """What is kept for the end of the session."""
        budget = self.trial.budget
        proof = "given" if budget.get("given") else budget.get("proof", {}).get("kind", "given")
        return TrialSummary(
            test=self.test,
            engine=self.trial.engine,
            model=self.trial.settings.model,
            num_blocks=self.record.header.num_blocks,
            budget=proof,
            verdict=str(self.verdict),
            preemptions=self.preemptions,
            missed=[
                f"{event.action}: {event.why}"
                for event in self.record.events
                if isinstance(event, PlanMissed)
            ],
            compared=self._compared(),
            findings=[str(finding.code) for finding in self.findings],
            not_observable=dict(self.report.not_observable),
            pairs=sorted(pair_name(pair) for pair in pairs(classify(self.record))),
            replay=replay.encode(self.trial),
            seconds=round(self.seconds, 4),
            texts=[
                f"{request.id}: {request.text[:_MAX_TEXT]!r}"
                for request in self.trial.workload.requests
                if request.text
            ],
        )

    def replay_command(self) -> str:
        """One command that runs this trial again."""
        text = replay.encode(self.trial)
        if self.test:
            return f"pytest -p preempt_harness '{self.test}' --preempt-replay '{text}'"
        return f"preempt-harness replay '{text}'"

    def _begin(self) -> None:
        self.asserted = True
        if self.verdict is Verdict.VACUOUS:
            raise VacuousTrialError(
                self._text("VACUOUS: nothing was preempted", self._why_vacuous())
            )

    def _compared(self) -> str:
        if not self.comparisons:
            return ""
        tokens = sum(
            len(output.token_ids)
            for result in self.record.results.values()
            for output in result.outputs
        )
        kind = self.record.baseline.kind if self.record.baseline else "none"
        return f"{len(self.comparisons)} outputs, {tokens} tokens, baseline {kind}"

    def _why_vacuous(self) -> str:
        missed = [
            f"the plan's {event.action} did not fire: {event.why}"
            for event in self.record.events
            if isinstance(event, PlanMissed)
        ]
        if missed:
            return "; ".join(missed)
        budget = KVBudget.solve(self.trial.workload, self.admission, self.record.header.num_blocks)
        return budget.explain()

    def _failure_lines(self) -> list[str]:
        """How the engine failed, if it did: nothing else that is missing means much then."""
        failed = self.verdict in (Verdict.ERROR, Verdict.HANG)
        return self._finding_lines() if failed else []

    def _finding_lines(self) -> list[str]:
        lines = [describe(finding) for finding in self.findings[:_MAX_FINDINGS]]
        more = len(self.findings) - len(lines)
        return [*lines, f"and {more} more"] if more > 0 else lines

    def _text(self, headline: str, *details: str) -> str:
        settings = self.trial.settings
        lines = [
            f"{headline} [engine {self.trial.engine}, model {settings.model}, "
            f"{self.record.header.num_blocks} blocks of {self.record.header.block_size}]",
            *(f"  {detail}" for detail in details if detail),
            f"  preemptions: {', '.join(map(str, self.preemptions[:8])) or 'none'}",
            f"  replay: {self.replay_command()}",
        ]
        return "\n".join(lines)


def describe(finding: Finding) -> str:
    """A finding in one line, with its place."""
    places = {
        "step": finding.step,
        "sequence": finding.sequence or finding.request,
        "position": finding.position,
        "block": finding.block,
        "rank": finding.rank,
    }
    where = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    return f"{finding.code} ({where}): {finding.message}"
