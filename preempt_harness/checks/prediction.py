"""Work against a prediction: the steps, preemptions and tokens of an engine that does as it says.

The prediction is a simulation of the engine's declared rules, made by `preempt_harness.prediction`;
where there is none, there is nothing to compare.
"""

from __future__ import annotations

from itertools import zip_longest

from preempt_harness.admission import Simulation
from preempt_harness.checks._accounting_counters import TalliedTrial
from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.trace import ScheduledRows, Trace
from preempt_harness.record import EngineError, Preempted


def check_prediction(trace: Trace, predicted: Simulation) -> CheckResult:
    """The first way in which the schedule is not the predicted one."""
    listing = Listing()
    if trace.has(EngineError):
        return listing.result("work", "prediction")
    _compare_preemptions(trace, predicted, listing)
    if not listing.findings:
        _compare_totals(trace, predicted, listing)
    listing.count("predictions compared")
    return listing.result("work", "prediction")


def _compare_preemptions(trace: Trace, predicted: Simulation, listing: Listing) -> None:
    prompts = {request: spec.num_prompt_tokens for request, spec in trace.specs.items()}
    for number, (event, expected) in enumerate(
        zip_longest(trace.of(Preempted), predicted.preemptions), start=1
    ):
        if event is None:
            what = f"preemption {number} should be of {expected.request} and did not happen"
            listing.report(Code.WORK_PREDICTION, expected.step, what, request=expected.request)
            return
        mine = (
            event.step,
            event.request,
            event.num_computed_tokens,
            event.num_tokens - prompts.get(event.request, 0),
        )
        if expected is None:
            what = "its preemption is one more than the engine's rules lead to"
            listing.report(Code.WORK_PREDICTION, event.step, what, request=event.request)
            return
        other = (
            expected.step,
            expected.request,
            expected.num_computed_tokens,
            expected.num_output_tokens,
        )
        if mine != other:
            what = (
                f"preemption {number} is (step, request, computed tokens, outputs) {mine}; the "
                f"engine's rules lead to {other}"
            )
            listing.report(Code.WORK_PREDICTION, event.step, what, request=event.request)
            return


def _compare_totals(trace: Trace, predicted: Simulation, listing: Listing) -> None:
    tally = trace.derive(TalliedTrial).tally
    scheduled = trace.of(SteadySteps, ScheduledRows)
    last = scheduled[-1].last_step if scheduled else -1
    totals = {
        "tokens computed": (tally.values["num_computed_tokens"], predicted.num_scheduled_tokens),
        "tokens recomputed": (
            tally.values["num_recomputed_tokens"],
            predicted.num_recomputed_tokens,
        ),
        "steps": (last + 1, predicted.last_step + 1),
    }
    for name, (mine, other) in totals.items():
        if mine != other:
            what = f"{mine} {name}, the engine's rules lead to {other}"
            listing.report(Code.WORK_PREDICTION, None, what)
            return
