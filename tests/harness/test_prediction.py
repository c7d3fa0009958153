"""What an engine's own rules lead to is foretold only for the outputs that they are played with."""

from __future__ import annotations

import msgspec
import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.admission import Simulation
from preempt_harness.checks import CheckOptions, Code, Finding, run_checks
from preempt_harness.harness import PreemptHarness
from preempt_harness.prediction import predict
from preempt_harness.record import TrialRecord
from preempt_harness.workload import Workload

replace = msgspec.structs.replace


def test_a_trial_whose_outputs_are_others_is_not_foretold() -> None:
    """An output that left the baseline's at a near tie may end sooner, and so may the trial."""
    adapter = EmbeddedAdapter()
    harness = PreemptHarness(adapter, {"model": "exact", "block_size": 4})
    result = harness.run(harness.workload(requests=3, prompt_tokens=9, max_tokens=12))
    result.assert_clean()
    admission = adapter.admission_model(result.trial.settings)
    assert predict(result.trial, result.record, admission) is not None
    first = result.record.results["r0"]
    shorter = replace(first.outputs[0], token_ids=first.outputs[0].token_ids[:-1])
    result.record.results["r0"] = replace(first, outputs=[shorter])
    assert predict(result.trial, result.record, admission) is None


@pytest.fixture(scope="module")
def foretold() -> tuple[TrialRecord, Simulation]:
    """A trial of which two preemptions or more were foretold, and happened."""
    adapter = EmbeddedAdapter()
    harness = PreemptHarness(adapter, {"model": "exact", "block_size": 4})
    result = harness.run(harness.workload(requests=4, prompt_tokens=9, max_tokens=24), "tight")
    result.assert_clean()
    result.assert_matches_baseline()
    predicted = predict(result.trial, result.record, adapter.admission_model(result.trial.settings))
    assert predicted is not None
    assert len(predicted.preemptions) >= 2
    return result.record, predicted


def compared(record: TrialRecord, predicted: Simulation) -> list[Finding]:
    report = run_checks(record, ["work"], CheckOptions(prediction=predicted))
    return [item for item in report.findings if item.code == Code.WORK_PREDICTION]


@pytest.mark.parametrize("field", ["last_step", "num_scheduled_tokens", "num_recomputed_tokens"])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_one_step_or_token_more_or_less_than_foretold_is_found(
    foretold: tuple[TrialRecord, Simulation], field: str, off: int
) -> None:
    record, predicted = foretold
    other = replace(predicted, **{field: getattr(predicted, field) + off})
    assert len(compared(record, other)) == abs(off)


@pytest.mark.parametrize("field", ["step", "num_computed_tokens", "num_output_tokens"])
@pytest.mark.parametrize("off", [-1, 1])
def test_another_preemption_than_foretold_is_found_at_its_place(
    foretold: tuple[TrialRecord, Simulation], field: str, off: int
) -> None:
    record, predicted = foretold
    first, second, *others = predicted.preemptions
    changed = replace(second, **{field: getattr(second, field) + off})
    (finding,) = compared(record, replace(predicted, preemptions=(first, changed, *others)))
    assert (finding.step, finding.request) == (second.step, second.request)
    assert "preemption 2 is" in finding.message


def test_a_preemption_too_many_or_too_few_is_found(
    foretold: tuple[TrialRecord, Simulation],
) -> None:
    record, predicted = foretold
    last = predicted.preemptions[-1]
    (surplus,) = compared(record, replace(predicted, preemptions=predicted.preemptions[:-1]))
    assert (surplus.step, surplus.request) == (last.step, last.request)
    assert "one more" in surplus.message
    more = replace(last, step=last.step + 1)
    (missing,) = compared(record, replace(predicted, preemptions=(*predicted.preemptions, more)))
    assert (missing.step, missing.request) == (more.step, last.request)
    assert "did not happen" in missing.message


def test_where_nothing_is_computed_there_was_no_step(
    foretold: tuple[TrialRecord, Simulation],
) -> None:
    record, predicted = foretold
    empty = msgspec.structs.replace(record.header, workload=Workload(requests=[]).to_builtins())
    nothing = replace(
        predicted, preemptions=(), last_step=-1, num_scheduled_tokens=0, num_recomputed_tokens=0
    )
    assert compared(TrialRecord(header=empty), nothing) == []
    assert len(compared(TrialRecord(header=empty), replace(nothing, last_step=0))) == 1
