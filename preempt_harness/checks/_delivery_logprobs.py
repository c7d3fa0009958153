"""Delivery: log probabilities, as many as were asked for, of the right tokens, and their sums.

Judges results by themselves and, where an engine claims batch invariance, against the baseline's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from preempt_harness.checks.finding import Code, Listing
from preempt_harness.checks.tables import first_difference
from preempt_harness.record import RequestResult, SequenceOutput
from preempt_harness.workload import RequestSpec


def judge_logprobs(seq: str, spec: RequestSpec, output: SequenceOutput, listing: Listing) -> None:
    """One entry a token, with the token in it, and their sum where an engine tells one."""
    if spec.sampling.logprobs is None:
        return
    entries = output.logprobs or []
    if len(entries) != len(output.token_ids):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"log probabilities were asked for; the output has {len(output.token_ids)} tokens "
            f"and {len(entries)} entries",
            seq=seq,
        )
        return
    for index, (token_id, entry) in enumerate(zip(output.token_ids, entries, strict=True)):
        if token_id not in entry:
            listing.report(
                Code.DEL_LOGPROBS,
                None,
                f"output token {index} is {token_id}, its log probabilities are of tokens "
                f"{sorted(entry)} only",
                once=seq,
                seq=seq,
                position=spec.num_prompt_tokens + index,
            )
            return
    _judge_sum(seq, output, entries, listing)


def _judge_sum(
    seq: str, output: SequenceOutput, entries: Sequence[dict[int, float]], listing: Listing
) -> None:
    """What an engine adds up on the way is the sum of all its entries, each taken once."""
    mine = output.cumulative_logprob
    if mine is None:
        return
    chosen = [entry[token] for token, entry in zip(output.token_ids, entries, strict=True)]
    total = math.fsum(chosen)
    # Adding n numbers in float32 errs by at most (n - 1) 2**-24 of the sum of their sizes (Higham,
    # "Accuracy and Stability of Numerical Algorithms", section 4.2), and as much again may be lost
    # where each was rounded.
    noise = 2 * len(chosen) * 2.0**-24 * math.fsum(map(abs, chosen))
    if not math.isclose(mine, total, rel_tol=0.0, abs_tol=noise):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"the cumulative log probability is {mine:g}, those of its {len(chosen)} tokens add up "
            f"to {total:g}",
            seq=seq,
        )


def compare_score(
    seq: str, output: SequenceOutput, baseline: SequenceOutput, listing: Listing
) -> None:
    """A batch-invariant engine ranks equal beams by equal scores."""
    if output.token_ids == baseline.token_ids and output.score != baseline.score:
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"the same tokens score {output.score}, unpreempted {baseline.score}, although the "
            f"engine claims batch invariance",
            seq=seq,
        )


def judge_prompt_logprobs(
    request: str, spec: RequestSpec, result: RequestResult, listing: Listing
) -> None:
    """One entry a prompt token, each with its token; nothing predicts the first."""
    entries = result.prompt_logprobs
    if spec.sampling.prompt_logprobs is None or result.error or not result.finished:
        return
    # A request that was given up in its prefill has those of its beginning.
    given_up = any(output.finish_reason == "abort" for output in result.outputs)
    if entries is None or (len(entries) != spec.num_prompt_tokens and not given_up):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"log probabilities of the prompt were asked for; it has {spec.num_prompt_tokens} "
            f"tokens and {len(entries or ())} entries",
            request=request,
        )
        return
    for index, (token_id, entry) in enumerate(zip(spec.prompt_token_ids, entries, strict=False)):
        if index and (entry is None or token_id not in entry):
            listing.report(
                Code.DEL_LOGPROBS,
                None,
                f"prompt token {index} is {token_id}, its log probabilities are of tokens "
                f"{sorted(entry or ())} only",
                request=request,
                position=index,
            )
            return


def compare_prompt_logprobs(
    request: str, result: RequestResult, baseline: RequestResult, listing: Listing
) -> None:
    """As far as both go, they are the same."""
    mine, other = result.prompt_logprobs or [], baseline.prompt_logprobs or []
    num_both = min(len(mine), len(other))
    index = first_difference(mine[:num_both], other[:num_both])
    if index is not None:
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"from prompt token {index} on its log probabilities are not those of the unpreempted "
            f"run, although the engine claims batch invariance",
            request=request,
            position=index,
        )
