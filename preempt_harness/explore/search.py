"""Runs trials until one fails. Owns what "fails" means; knows neither strategies nor faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.baseline import BaselineStore
from preempt_harness.checks.finding import Code
from preempt_harness.evidence import gather_scores
from preempt_harness.record import TrialRecord
from preempt_harness.result import TrialResult
from preempt_harness.trial import Trial, run_trial
from preempt_harness.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial with findings.

    Attributes:
        trial: what was run.
        codes: of all findings, the first one first, each once.
        message: the first finding in one line.
        num_preemptions: that happened in the trial.
        result: everything about it.
    """

    trial: Trial
    codes: tuple[str, ...]
    message: str
    num_preemptions: int
    result: TrialResult

    @property
    def num_requests(self) -> int:
        """Requests of its workload."""
        return len(self.trial.workload.requests)


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """How a search ended.

    Attributes:
        num_trials: that were run, the failing one included.
        num_steps: of the engine, without baselines.
        num_preemptions: over all trials.
        cpu_s: processor seconds.
        failure: the first failing trial; None when none failed.
    """

    num_trials: int
    num_steps: int
    num_preemptions: int
    cpu_s: float
    failure: Failure | None


class TrialRunner:
    """Runs and judges trials of one engine.

    Args:
        adapter: of the engine.
        open_session: opens sessions in place of `adapter.open`.
        repeat: run every trial twice; unequal records are a failure, FLAKY.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        *,
        open_session: Callable[[EngineSettings], Session] | None = None,
        repeat: bool = False,
    ) -> None:
        self.adapter = adapter
        self._open_session = open_session
        self._repeat = repeat

    def judge(self, trial: Trial) -> TrialResult:
        """Run a trial and its baseline and apply all checks.

        A trial without a preemption is no failure: a search also looks at engines at rest.
        """
        # A new store each time: drawn trials hardly ever share a baseline, and would pile up.
        baselines = BaselineStore(self._run)
        record = self._run(trial)
        digest = record.digest()  # of the run alone: what is added below is no part of it
        record.baseline = baselines.get(trial.settings, trial.workload, self.adapter)
        gather_scores(record, trial, self.adapter, self._open_session)
        result = TrialResult.judge(
            trial=trial,
            record=record,
            admission=self.adapter.admission_model(trial.settings),
            expect_preemption=False,
        )
        if self._repeat and self._run(trial).digest() != digest:
            result.verdict = Verdict.FLAKY
        return result

    def failure_of(self, result: TrialResult) -> Failure | None:
        """What is wrong with a judged trial; None when nothing is."""
        codes = [str(finding.code) for finding in result.findings]
        messages = [str(finding) for finding in result.findings]
        if result.verdict is Verdict.INVALID_BASELINE and result.record.baseline is not None:
            for problem in result.record.baseline.problems:
                code = problem.partition(":")[0]
                codes.append(code if code in set(Code) else str(result.verdict))
                messages.append(f"unpreempted, {problem}")
        if result.verdict is Verdict.FLAKY:
            codes.append(str(Verdict.FLAKY))
            messages.append("FLAKY: the same trial, run twice, gave different records")
        if not codes:
            return None
        return Failure(
            trial=result.trial,
            codes=tuple(dict.fromkeys(codes)),
            message=messages[0],
            num_preemptions=len(result.preemptions),
            result=result,
        )

    def failure(self, trial: Trial) -> Failure | None:
        """Run a trial; what is wrong with it."""
        return self.failure_of(self.judge(trial))

    def _run(self, trial: Trial) -> TrialRecord:
        return run_trial(trial, self.adapter, open_session=self._open_session)


def search(
    trials: Iterable[Trial],
    runner: TrialRunner,
    *,
    max_trials: int | None = None,
    max_cpu_s: float | None = None,
) -> SearchOutcome:
    """Run trials until one fails, or a limit is reached.

    Args:
        trials: from a strategy.
        runner: of the engine.
        max_trials, max_cpu_s: limits; None is none.
    """
    started = time.process_time()
    count = steps = preemptions = 0
    failure: Failure | None = None
    for trial in trials:
        if max_trials is not None and count >= max_trials:
            break
        if max_cpu_s is not None and time.process_time() - started >= max_cpu_s:
            break
        count += 1
        result = runner.judge(trial)
        preemptions += len(result.preemptions)
        steps += max((event.step for event in result.record.events), default=-1) + 1
        failure = runner.failure_of(result)
        if failure is not None:
            break
    return SearchOutcome(
        num_trials=count,
        num_steps=steps,
        num_preemptions=preemptions,
        cpu_s=time.process_time() - started,
        failure=failure,
    )
