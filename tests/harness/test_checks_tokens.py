"""Tokens: the ladder from exact through near tie to regret."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.checks import (
    CheckOptions,
    Code,
    Finding,
    TokenVerdict,
    Tolerance,
    compare_tokens,
    run_checks,
)
from preempt_harness.record import Aborted, Score, TrialRecord
from preempt_harness.workload import Operation, Workload

replace = msgspec.structs.replace

TOLERANCE = Tolerance(gap=0.01, regret=0.02, origin="written for this test")
CHANGED = 2  # output index of the token that differs
PROMPT = 6


def make_record(*, batch_invariant: bool = False) -> TrialRecord:
    """One request of five output tokens, equal to its baseline."""
    record = run_fake(make_workload([PROMPT], max_tokens=5))
    record.header = replace(record.header, batch_invariant=batch_invariant)
    return record


def change_token(record: TrialRecord) -> None:
    result = record.results["r0"]
    token_ids = list(result.outputs[0].token_ids)
    token_ids[CHANGED] = (token_ids[CHANGED] + 1) % 60
    record.results["r0"] = replace(
        result, outputs=[replace(result.outputs[0], token_ids=token_ids)]
    )


def score(record: TrialRecord, *, gap: float, worst: float, at: int = CHANGED) -> None:
    """Scores of the output: all tokens are the best, the one at `at` is `worst` worse."""
    record.scores["r0"] = [
        Score(
            token_id=token_id,
            logprob=-1.0 - (worst if index == at else 0.0),
            top_token_id=token_id,
            top_logprob=-1.0,
            second_logprob=-1.0 - (gap if index == CHANGED else 5.0),
        )
        for index, token_id in enumerate(record.results["r0"].outputs[0].token_ids)
    ]


def verdict(record: TrialRecord, tolerance: Tolerance | None = TOLERANCE) -> TokenVerdict:
    (comparison,) = compare_tokens(record, tolerance)
    return comparison.verdict


def finding(record: TrialRecord, tolerance: Tolerance | None = TOLERANCE) -> Finding:
    report = run_checks(record, ["tokens"], CheckOptions(tolerance=tolerance))
    (found,) = report.findings
    assert verdict(record, tolerance) == TokenVerdict.DIVERGED
    return found


def test_equal_tokens_are_equal() -> None:
    record = make_record()
    assert verdict(record, None) == TokenVerdict.EQUAL
    assert run_checks(record, ["tokens"]).findings == ()


def test_near_tie_with_scores_is_benign_and_counted() -> None:
    record = make_record()
    change_token(record)
    score(record, gap=0.001, worst=0.001)
    (comparison,) = compare_tokens(record, TOLERANCE)
    assert comparison.verdict == TokenVerdict.BENIGN
    assert comparison.index == CHANGED
    assert comparison.gap == pytest.approx(0.001)
    report = run_checks(record, ["tokens"], CheckOptions(tolerance=TOLERANCE))
    assert report.findings == ()
    assert report.counted == {"tokens: sequences BENIGN": 1}


def test_wide_gap_is_diverged_at_the_first_difference() -> None:
    record = make_record()
    change_token(record)
    score(record, gap=0.5, worst=0.001)
    found = finding(record)
    assert (found.code, found.position) == (Code.TOK_DIVERGED, PROMPT + CHANGED)
    assert "written for this test" in found.message


def test_the_baselines_own_gap_counts_before_the_scores() -> None:
    record = make_record()
    change_token(record)
    score(record, gap=0.001, worst=0.001)
    assert record.baseline is not None
    record.baseline = replace(record.baseline, logits_top2={"r0": [1.0, 1.0, 0.5, 1.0, 1.0]})
    assert finding(record).code == Code.TOK_DIVERGED


def test_bug_behind_a_tie_shows_by_regret() -> None:
    record = make_record()
    change_token(record)
    score(record, gap=0.001, worst=3.0, at=4)
    found = finding(record)
    assert (found.code, found.position) == (Code.TOK_REGRET, PROMPT + 4)


@pytest.mark.parametrize(
    ("tolerance", "scored", "words"),
    [
        (None, True, "a tolerance"),
        (TOLERANCE, False, "teacher-forced scores"),
    ],
)
def test_missing_evidence_is_diverged_and_named(
    tolerance: Tolerance | None, scored: bool, words: str
) -> None:
    record = make_record()
    change_token(record)
    if scored:
        score(record, gap=0.001, worst=0.001)
    found = finding(record, tolerance)
    assert found.code == Code.TOK_NO_EVIDENCE
    assert words in found.message


def test_scores_of_another_output_are_no_evidence() -> None:
    record = make_record()
    score(record, gap=0.001, worst=0.001)
    change_token(record)
    assert finding(record).code == Code.TOK_NO_EVIDENCE


def test_batch_invariant_engines_are_held_to_equal_tokens() -> None:
    record = make_record(batch_invariant=True)
    change_token(record)
    score(record, gap=0.001, worst=0.001)
    found = finding(record)
    assert found.code == Code.TOK_DIVERGED
    assert "batch invariance" in found.message


CHOSEN_OTHERWISE = pytest.mark.parametrize(
    ("parameter", "value"),
    [("temperature", 1.0), ("frequency_penalty", 0.5), ("logit_bias", [[3, 2.0]])],
)


@CHOSEN_OTHERWISE
@pytest.mark.parametrize("tolerance", [None, Tolerance(gap=5e-5, regret=5e-5, origin="float32")])
def test_tokens_that_are_not_the_most_likely_are_held_to_equality(
    parameter: str, value: object, tolerance: Tolerance | None
) -> None:
    record = make_record()
    record.header.workload["requests"][0]["sampling"][parameter] = value
    change_token(record)
    score(record, gap=0.001, worst=0.001)
    assert finding(record, tolerance).code == Code.TOK_DIVERGED


@CHOSEN_OTHERWISE
def test_where_noise_may_change_them_they_cannot_be_compared(parameter: str, value: object) -> None:
    """bfloat16, say. It is no finding, and no pass."""
    record = make_record()
    record.header.workload["requests"][0]["sampling"][parameter] = value
    wide = CheckOptions(tolerance=Tolerance(gap=0.25, regret=0.25, origin="bfloat16"))
    assert run_checks(record, ["tokens"], wide).not_observable == {}
    change_token(record)
    report = run_checks(record, ["tokens"], wide)
    assert report.findings == ()
    assert "float noise of up to 0.25 may change any choice" in report.not_observable["tokens"]


def test_shorter_output_is_found() -> None:
    record = make_record()
    result = record.results["r0"]
    short = replace(result.outputs[0], token_ids=result.outputs[0].token_ids[:-1])
    record.results["r0"] = replace(result, outputs=[short])
    found = finding(record)
    assert (found.code, found.position) == (Code.TOK_LENGTH, PROMPT + 4)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_other_log_probabilities_are_found_where_they_must_be_equal(batch_invariant: bool) -> None:
    record = make_record(batch_invariant=batch_invariant)
    result = record.results["r0"]
    assert record.baseline is not None
    reference = record.baseline.results["r0"]
    logprobs = [{token_id: -0.5} for token_id in result.outputs[0].token_ids]
    other = [*logprobs[:-1], {0: -0.25}]
    record.results["r0"] = replace(result, outputs=[replace(result.outputs[0], logprobs=logprobs)])
    record.baseline.results["r0"] = replace(
        reference, outputs=[replace(reference.outputs[0], logprobs=other)]
    )
    if batch_invariant:
        assert finding(record).code == Code.TOK_LOGPROBS
    else:
        assert verdict(record) == TokenVerdict.EQUAL


def test_aborted_requests_compare_by_prefix() -> None:
    workload = make_workload([PROMPT], max_tokens=9)
    aborted = Workload(
        requests=workload.requests, operations=[Operation(kind="abort", step=5, request="r0")]
    )
    record = run_fake(aborted)
    assert 2 < len(record.results["r0"].outputs[0].token_ids) < 9
    assert verdict(record) == TokenVerdict.EQUAL
    change_token(record)
    assert finding(record).code == Code.TOK_DIVERGED


@pytest.mark.parametrize(
    ("num_blocks", "capabilities", "reason", "is_explained"),
    [
        (4, ["pool_limit"], "length", True),  # a shared block, and a half of the other two each
        (8, ["pool_limit"], "length", False),
        (4, [], "length", False),
        (4, ["pool_limit"], "stop", False),
    ],
    ids=["full", "room", "no-promise", "stop"],
)
def test_the_pool_ends_several_outputs_that_divide_it(
    num_blocks: int, capabilities: list[str], reason: str, is_explained: bool
) -> None:
    """The prompt is of 6 tokens, blocks of 4, and a block may be the engine's own."""
    record = make_record()
    workload = make_workload([PROMPT], max_tokens=5)
    (request,) = workload.requests
    several = replace(request, sampling=replace(request.sampling, n=2, temperature=1.0))
    record.header = replace(
        record.header,
        workload=replace(workload, requests=[several]).to_builtins(),
        capabilities=capabilities,
        block_size=4,
        num_blocks=num_blocks,
    )
    (output,) = record.results["r0"].outputs
    shorter = replace(output, token_ids=output.token_ids[:2], finish_reason=reason)
    record.results["r0"] = replace(record.results["r0"], outputs=[shorter])
    wanted = TokenVerdict.EQUAL if is_explained else TokenVerdict.DIVERGED
    assert verdict(record, None) == wanted


@pytest.mark.parametrize("which", ["run", "baseline", "neither"])
def test_an_abort_of_either_run_explains_a_shorter_output(which: str) -> None:
    record = make_record()
    assert record.baseline is not None
    results = record.baseline.results if which == "baseline" else record.results
    output = results["r0"].outputs[0]
    reason = "abort" if which == "baseline" else output.finish_reason
    shorter = replace(output, token_ids=output.token_ids[:3], finish_reason=reason)
    results["r0"] = replace(results["r0"], outputs=[shorter], finished=True)
    if which == "run":
        record.events.append(Aborted(4, "r0"))
    (comparison,) = compare_tokens(record, TOLERANCE)
    assert (comparison.verdict == TokenVerdict.EQUAL) == (which != "neither")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, "no baseline"),
        ({"num_preemptions": 2}, "was preempted 2 times"),
        ({"problems": ["KVSAN-LEAK: ..."]}, "findings of its own"),
    ],
)
def test_without_a_valid_baseline_tokens_are_not_observable(
    changes: dict[str, object] | None, words: str
) -> None:
    record = make_record()
    assert record.baseline is not None
    record.baseline = None if changes is None else replace(record.baseline, **changes)
    report = run_checks(record, ["tokens"])
    assert words in report.not_observable["tokens"]
