"""What a trial's result asserts, and what it refuses to pass over."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.harness import ArgumentError, PreemptHarness
from preempt_harness.result import (
    NotObservableError,
    PreemptionAssertionError,
    TrialResult,
    VacuousTrialError,
)
from preempt_harness.verdict import Verdict
from tests.plugin.conftest import RunPytest


@pytest.fixture
def harness() -> PreemptHarness:
    return PreemptHarness(EmbeddedAdapter(), {"block_size": 4})


def test_a_tight_budget_preempts_and_matches(harness: PreemptHarness) -> None:
    result = harness.run(harness.workload(requests=4, prompt_tokens=(8, 20), max_tokens=16))
    assert result.verdict is Verdict.EQUAL
    result.assert_preempted(mode="recompute", phase="decode")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "accounting", "tokens"])


def test_a_budget_too_large_is_vacuous_and_says_what_would_preempt(
    harness: PreemptHarness,
) -> None:
    workload = harness.workload(requests=3, prompt_tokens=10, max_tokens=16)
    result = harness.run(workload, 500)
    assert result.verdict is Verdict.VACUOUS
    for assertion in (
        result.assert_preempted,
        result.assert_matches_baseline,
        result.assert_clean,
    ):
        with pytest.raises(VacuousTrialError, match=r"500 blocks never preempt .* would preempt"):
            assertion()


def test_no_preemption_is_fine_where_none_is_expected(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=10, max_tokens=8)
    result = harness.run(workload, "roomy", expect_preemption=False)
    result.assert_matches_baseline()
    result.assert_clean()
    with pytest.raises(VacuousTrialError):
        result.assert_preempted()


def test_more_or_other_preemptions_than_happened(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=10, max_tokens=8)
    result = harness.run(workload, plan="preempt:r0@out=2")
    result.assert_preempted(request="r0")
    others = ({"at_least": 2}, {"mode": "swap"}, {"phase": "prefill_first"}, {"request": "r1"})
    for wanted in others:
        with pytest.raises(VacuousTrialError, match="were asked for"):
            result.assert_preempted(**wanted)  # type: ignore[arg-type]


def test_a_plan_that_missed_its_target_says_why(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=10, max_tokens=8)
    result = harness.run(workload, plan="preempt:r0@step=90")
    with pytest.raises(VacuousTrialError, match="preempt:r0@step=90 did not fire"):
        result.assert_clean()


def test_requiring_an_unknown_check_is_refused(harness: PreemptHarness) -> None:
    result = harness.run(
        harness.workload(requests=2, prompt_tokens=10, max_tokens=8), plan="preempt:r0@out=2"
    )
    with pytest.raises(PreemptionAssertionError, match="known are crash, kvsan"):
        result.assert_clean(require=["kv-san"])


def test_requiring_a_check_that_cannot_see_fails(harness: PreemptHarness) -> None:
    result = harness.run(
        harness.workload(requests=2, prompt_tokens=10, max_tokens=8), plan="preempt:r0@out=2"
    )
    seen = [name for name in result.record.header.observed if name != "Computed"]
    result.record.header = replace(result.record.header, observed=seen)
    blind = TrialResult.judge(
        trial=result.trial,
        record=result.record,
        admission=harness.adapter.admission_model(result.trial.settings),
    )
    with pytest.raises(NotObservableError, match="kvsan"):
        blind.assert_clean(require=["kvsan"])


def test_a_setting_that_does_not_exist_is_refused(harness: PreemptHarness) -> None:
    with pytest.raises(ArgumentError, match="blocksize: no such setting"):
        harness.run(harness.workload(requests=1), blocksize=4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"requests": 0}, "requests=0"), ({"prompt_tokens": (9, 3)}, r"prompt_tokens=\(9, 3\)")],
)
def test_a_workload_that_is_none_is_refused(
    harness: PreemptHarness, arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ArgumentError, match=text):
        harness.workload(**arguments)  # type: ignore[arg-type]


def test_what_the_engine_cannot_do_is_refused_before_it_runs(harness: PreemptHarness) -> None:
    adapter = EmbeddedAdapter()
    adapter.capabilities = adapter.capabilities - {"abort"}
    limited = PreemptHarness(adapter, {"block_size": 4})
    with pytest.raises(UnsupportedTrialError, match="abort"):
        limited.run(limited.workload(requests=2, max_tokens=8), plan="abort:r0@out=2")


def test_the_failure_text_names_place_preemptions_and_replay(harness: PreemptHarness) -> None:
    result = harness.run(
        harness.workload(requests=2, prompt_tokens=10, max_tokens=8), plan="preempt:r0@out=2"
    )
    with pytest.raises(VacuousTrialError) as caught:
        result.assert_preempted(at_least=9)
    text = str(caught.value)
    assert "engine embedded, model exact" in text
    assert "preemptions: r0@2 decode" in text
    assert "preempt-harness replay 'preempt1:" in text


def test_a_result_that_is_never_asserted_fails_its_test(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_forgets(preempt):\n"
        "    preempt.run(preempt.workload(requests=3, max_tokens=16), block_size=4)\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert completed.returncode == 1
    assert "nothing was asserted of them" in completed.stdout


def test_a_test_that_failed_by_itself_is_not_blamed_twice(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_fails(preempt):\n"
        "    preempt.run(preempt.workload(requests=3, max_tokens=16), block_size=4)\n"
        "    assert 1 == 2\n"
    )
    completed = run_pytest("-p", "preempt_harness")
    assert "nothing was asserted" not in completed.stdout
    assert "1 failed" in completed.stdout
    assert "error" not in completed.stdout.splitlines()[-1]
