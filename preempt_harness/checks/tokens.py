"""Tokens: the preempted run's outputs against the unpreempted baseline's, and a verdict for each.

The ladder of evidence:
    (a) exact: the same tokens; log probabilities too where the engine claims batch invariance;
    (b) near tie: at the first difference the baseline's two best tokens lie within `gap`;
    (c) regret: an unpreempted reference, forced along the whole preempted output, never loses more
        than `regret` by its tokens, so that a bug cannot hide behind a tie.
A difference is harmless (BENIGN) with (b) and (c) together. Outputs of a batch-invariant engine
have tier (a) only. So have those of other engines whose tokens are not simply the most likely ones,
since no score tells how near another choice was; and where the engine's float noise is large enough
to change choices (bfloat16), they are INCOMPARABLE once they differ: no finding, but not observable
either.
Aborted requests compare by prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from preempt_harness.checks._delivery_ends import at_limit, was_aborted
from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.tables import first_difference
from preempt_harness.checks.trace import Trace
from preempt_harness.record import Aborted, Score, SequenceOutput, TrialRecord

SMALL_NOISE = 1e-3
"""Log probability. Noise below it, as of float32, hardly ever changes a sampled token."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far float noise alone may go, in log probability.

    Attributes:
        gap: largest top-2 gap that counts as a near tie.
        regret: largest loss by a token that noise may have chosen.
        origin: where the figures come from: model, dtype, device, quantile and number of positions.
    """

    gap: float
    regret: float
    origin: str


class TokenVerdict(StrEnum):
    """Of one sequence. INCOMPARABLE: it differs, and nothing could tell noise from a bug."""

    EQUAL = "EQUAL"
    BENIGN = "BENIGN"
    DIVERGED = "DIVERGED"
    INCOMPARABLE = "INCOMPARABLE"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One sequence against its baseline.

    Attributes:
        sequence: "request.branch".
        verdict: of the ladder.
        index: output index of the first difference, None when there is none.
        gap: the top-2 gap there, None if unknown.
        max_regret: the worst regret of the whole output, None if unknown or not needed.
        reason: why it is not EQUAL, as a sentence; "" otherwise.
        code: of the finding when it DIVERGED.
    """

    sequence: str
    verdict: TokenVerdict
    index: int | None = None
    gap: float | None = None
    max_regret: float | None = None
    reason: str = ""
    code: Code | None = None


def why_not_comparable(record: TrialRecord) -> str | None:
    """Why there is nothing to compare with, None when there is."""
    if record.baseline is None:
        return "the record has no baseline"
    if record.baseline.num_preemptions:
        return f"the baseline was preempted {record.baseline.num_preemptions} times itself"
    if record.baseline.problems:
        return f"the baseline has findings of its own: {record.baseline.problems[0]}"
    return None


def compare_tokens(record: TrialRecord, tolerance: Tolerance | None = None) -> list[Comparison]:
    """Every sequence that has both an output and a baseline.

    Args:
        record: with a baseline; `scores` are of its own outputs, for first branches.
        tolerance: None allows exact equality only.
    """
    aborted = {event.request for event in record.events if isinstance(event, Aborted)}
    return _compare_all(Trace(record), aborted, tolerance)


def _compare_all(trace: Trace, aborted: set[str], tolerance: Tolerance | None) -> list[Comparison]:
    record, baseline = trace.record, trace.record.baseline
    if baseline is None:
        return []
    specs = trace.specs
    comparisons = []
    for request, result in record.results.items():
        reference = baseline.results.get(request)
        if reference is None or request not in specs:
            continue
        # A refused request gave nothing to compare; whether it had to be refused is progress's.
        by_prefix = (
            request in aborted
            or was_aborted(reference)
            or bool(result.error)
            or not (result.finished and reference.finished)
        )
        sampling = specs[request].sampling
        for branch, (output, other) in enumerate(
            zip(result.outputs, reference.outputs, strict=False)
        ):
            evidence = _Evidence(
                sequence=f"{request}.{branch}",
                output=output,
                baseline=other,
                by_prefix=by_prefix or _fills_the_pool(trace, request, output),
                is_ranked=branch == 0 and sampling.temperature == 0 and not sampling.changes_logits,
                batch_invariant=record.header.batch_invariant,
                gaps=baseline.logits_top2.get(request, []) if branch == 0 else [],
                scores=record.scores.get(request, []) if branch == 0 else [],
                tolerance=tolerance,
            )
            comparisons.append(_compare(evidence))
    return comparisons


def _fills_the_pool(trace: Trace, request: str, output: SequenceOutput) -> bool:
    """The pool ended the output: with room it would have gone on."""
    spec, most = trace.specs[request], trace.header.max_total_tokens
    length = len(output.token_ids)
    if output.finish_reason != "length" or length >= spec.sampling.max_tokens:
        return False
    if spec.sampling.num_sequences > 1 and spec.sampling.beam is None:
        return "pool_limit" in trace.header.capabilities and at_limit(trace.header, spec, length)
    return most is not None and spec.num_prompt_tokens + length >= most


def check_tokens(trace: Trace, tolerance: Tolerance | None = None) -> CheckResult:
    """A finding for every sequence that DIVERGED."""
    reason = why_not_comparable(trace.record)
    if reason is not None:
        return CheckResult(check="tokens", not_observable=reason)
    listing = Listing()
    specs = trace.specs
    aborted = {event.request for event in trace.of(Aborted)}
    for comparison in _compare_all(trace, aborted, tolerance):
        listing.count(f"sequences {comparison.verdict}")
        if comparison.verdict is TokenVerdict.INCOMPARABLE:
            reason = reason or f"{comparison.sequence}: {comparison.reason}"
        if comparison.code is None:
            continue
        request = comparison.sequence.rpartition(".")[0]
        position = None
        if comparison.index is not None:
            position = specs[request].num_prompt_tokens + comparison.index
        listing.report(
            comparison.code, None, comparison.reason, seq=comparison.sequence, position=position
        )
    return replace(listing.result("tokens"), not_observable=None if listing.findings else reason)


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    sequence: str
    output: SequenceOutput
    baseline: SequenceOutput
    by_prefix: bool
    is_ranked: bool
    batch_invariant: bool
    gaps: list[float]
    scores: list[Score]
    tolerance: Tolerance | None


def _compare(evidence: _Evidence) -> Comparison:
    mine, other = evidence.output.token_ids, evidence.baseline.token_ids
    if evidence.by_prefix:
        length = min(len(mine), len(other))
        mine, other = mine[:length], other[:length]
    index = first_difference(mine, other)
    if index is None:
        return _compare_logprobs(evidence, len(mine))
    if index == min(len(mine), len(other)):
        reason = (
            f"the output has {len(mine)} tokens, unpreempted {len(other)}; up to output index "
            f"{index} they are equal"
        )
        return _diverged(evidence, Code.TOK_LENGTH, index, reason)
    where = f"at output index {index} the token is {mine[index]}, unpreempted it is {other[index]}"
    if evidence.batch_invariant:
        why = "the engine claims batch invariance, so that only equal tokens will do"
        return _diverged(evidence, Code.TOK_DIVERGED, index, f"{where}; {why}")
    if evidence.is_ranked:
        return _judge_tie(evidence, index, where)
    tolerance = evidence.tolerance
    if tolerance is None or tolerance.gap <= SMALL_NOISE:
        why = "its tokens are not the most likely ones, and can only be compared exactly"
        return _diverged(evidence, Code.TOK_DIVERGED, index, f"{where}; {why}")
    return Comparison(
        sequence=evidence.sequence,
        verdict=TokenVerdict.INCOMPARABLE,
        index=index,
        reason=f"{where}; its tokens are not the most likely ones, and the engine's float noise "
        f"of up to {tolerance.gap:.3g} may change any choice ({tolerance.origin})",
    )


def _judge_tie(evidence: _Evidence, index: int, where: str) -> Comparison:
    """Tiers (b) and (c)."""
    tolerance = evidence.tolerance
    scores = evidence.scores
    scored = [score.token_id for score in scores] == evidence.output.token_ids
    gap = evidence.gaps[index] if index < len(evidence.gaps) else None
    if gap is None and scored:
        # Up to here both outputs are equal, so this is the baseline's own top-2 gap.
        gap = scores[index].top_logprob - scores[index].second_logprob
    regrets = [score.top_logprob - score.logprob for score in scores] if scored else []
    missing = []
    if tolerance is None:
        missing.append("a tolerance")
    if not scored:
        missing.append("teacher-forced scores of the whole output")
    if gap is None:
        missing.append("the baseline's top-2 gap")
    if tolerance is None or gap is None or not regrets:
        reason = f"{where}; missing to tell a near tie from a bug: {', '.join(missing)}"
        return _diverged(evidence, Code.TOK_NO_EVIDENCE, index, reason, gap)
    worst = max(range(len(regrets)), key=regrets.__getitem__)
    if gap > tolerance.gap:
        reason = (
            f"{where}; this is no near tie: the baseline's top-2 gap is {gap:.3g}, tolerated are "
            f"{tolerance.gap:.3g} ({tolerance.origin})"
        )
        return _diverged(evidence, Code.TOK_DIVERGED, index, reason, gap, regrets[worst])
    if regrets[worst] > tolerance.regret:
        reason = (
            f"{where}, a near tie (gap {gap:.3g}); but at output index {worst} the token "
            f"{evidence.output.token_ids[worst]} is {regrets[worst]:.3g} worse than the "
            f"reference's best, tolerated are {tolerance.regret:.3g} ({tolerance.origin})"
        )
        return _diverged(evidence, Code.TOK_REGRET, worst, reason, gap, regrets[worst])
    return Comparison(
        sequence=evidence.sequence,
        verdict=TokenVerdict.BENIGN,
        index=index,
        gap=gap,
        max_regret=regrets[worst],
        reason=f"{where}; a near tie (gap {gap:.3g}), and no token of the output is more than "
        f"{regrets[worst]:.3g} worse than the reference's best",
    )


def _compare_logprobs(evidence: _Evidence, length: int) -> Comparison:
    """Equal tokens; a batch-invariant engine gives them equal log probabilities."""
    mine, other = evidence.output.logprobs, evidence.baseline.logprobs
    if evidence.batch_invariant and mine is not None and other is not None:
        index = first_difference(mine[:length], other[:length])
        if index is not None:
            reason = (
                f"the tokens are equal, but from output index {index} the log probabilities are "
                f"not, although the engine claims batch invariance"
            )
            return _diverged(evidence, Code.TOK_LOGPROBS, index, reason)
    return Comparison(sequence=evidence.sequence, verdict=TokenVerdict.EQUAL)


def _diverged(
    evidence: _Evidence,
    code: Code,
    index: int,
    reason: str,
    gap: float | None = None,
    max_regret: float | None = None,
) -> Comparison:
    return Comparison(
        sequence=evidence.sequence,
        verdict=TokenVerdict.DIVERGED,
        index=index,
        gap=gap,
        max_regret=max_regret,
        reason=reason,
        code=code,
    )
