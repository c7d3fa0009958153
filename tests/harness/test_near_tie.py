"""A near tie is told from a bug by evidence: the gap where outputs part, and the rest rescored.

The foreign engine's model has two exactly equal best tokens at one position, and its kernel for
many rows prefers the other one: a recomputed request takes another way there, as float noise makes
it do on real engines. The way through the harness is the real one: trial, baseline, scores, checks.
"""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.checks.tokens import Comparison, TokenVerdict, Tolerance
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import RequestResult
from preempt_harness.result import PreemptionAssertionError, TrialResult
from preempt_harness.verdict import Verdict
from tests.plugin.foreign_adapter import ForeignAdapter

PROMPT_TOKENS = 9
TIE_INDEX = 4  # output index whose token is the tie's
TOLERANCE = Tolerance(gap=0.0, regret=0.0, origin="the toy rounds the same way every time")


def run(**options: Any) -> TrialResult:
    """r0 is preempted with `TIE_INDEX` output tokens, so that recomputing it meets the tie."""
    harness = PreemptHarness(ForeignAdapter(), {"block_size": 4})
    workload = harness.workload(requests=2, prompt_tokens=PROMPT_TOKENS, max_tokens=12)
    result = harness.run(
        workload,
        plan=f"preempt:r0@out={TIE_INDEX}",
        enable_prefix_caching=False,  # so that the row that meets the tie has many tokens
        options={"tie_at": PROMPT_TOKENS + TIE_INDEX, **options},
    )
    return TrialResult.judge(
        trial=result.trial,
        record=result.record,
        admission=harness.adapter.admission_model(result.trial.settings),
        tolerance=TOLERANCE,
    )


def comparison_of(result: TrialResult, sequence: str) -> Comparison:
    [found] = [item for item in result.comparisons if item.sequence == sequence]
    return found


def output_of(results: dict[str, RequestResult], request: str) -> list[int]:
    return results[request].outputs[0].token_ids


def test_an_exact_tie_is_benign_with_its_gap_and_position() -> None:
    result = run()
    preempted = output_of(result.record.results, "r0")
    assert result.record.baseline is not None
    unpreempted = output_of(result.record.baseline.results, "r0")
    assert preempted[:TIE_INDEX] == unpreempted[:TIE_INDEX]
    assert preempted[TIE_INDEX] != unpreempted[TIE_INDEX]

    assert result.verdict is Verdict.BENIGN
    comparison = comparison_of(result, "r0.0")
    assert comparison.verdict is TokenVerdict.BENIGN
    assert (comparison.index, comparison.gap) == (TIE_INDEX, 0.0)
    assert comparison.max_regret == 0.0
    assert "a near tie (gap 0)" in comparison.reason
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()


def test_only_the_output_that_parted_is_scored_and_whole() -> None:
    record = run().record
    assert list(record.scores) == ["r0"]
    assert [score.token_id for score in record.scores["r0"]] == output_of(record.results, "r0")


def test_a_corrupted_slot_behind_the_tie_is_a_divergence() -> None:
    """The tie excuses the first difference and nothing after it: later tokens have regret."""
    result = run(bug="corrupt_slot")
    assert result.verdict is Verdict.DIVERGED
    comparison = comparison_of(result, "r0.0")
    assert comparison.code == "TOK-REGRET"
    assert comparison.gap == 0.0
    assert comparison.index is not None
    assert comparison.index > TIE_INDEX
    assert comparison.max_regret is not None
    assert comparison.max_regret > TOLERANCE.regret
    [finding] = result.findings
    assert (finding.code, finding.sequence) == ("TOK-REGRET", "r0.0")
    assert finding.position == PROMPT_TOKENS + comparison.index
    with pytest.raises(PreemptionAssertionError, match=r"a near tie \(gap 0\); but at output"):
        result.assert_matches_baseline()


def test_a_corrupted_slot_without_a_tie_is_no_near_tie() -> None:
    """Nothing is equal at the position where the outputs part."""
    result = run(bug="corrupt_slot", tie_at=1000)
    assert result.verdict is Verdict.DIVERGED
    comparison = comparison_of(result, "r0.0")
    assert comparison.code == "TOK-DIVERGED"
    assert comparison.gap is not None
    assert comparison.gap > TOLERANCE.gap
    assert "this is no near tie" in comparison.reason


def test_without_a_tolerance_a_tie_is_not_believed() -> None:
    harness = PreemptHarness(ForeignAdapter(), {"block_size": 4})
    result = harness.run(
        harness.workload(requests=2, prompt_tokens=PROMPT_TOKENS, max_tokens=12),
        plan=f"preempt:r0@out={TIE_INDEX}",
        enable_prefix_caching=False,
        options={"tie_at": PROMPT_TOKENS + TIE_INDEX},
    )
    assert result.verdict is Verdict.DIVERGED
    assert comparison_of(result, "r0.0").code == "TOK-NO-EVIDENCE"
    assert "missing to tell a near tie from a bug: a tolerance" in result.findings[0].message
