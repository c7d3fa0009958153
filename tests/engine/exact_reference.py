"""What the exact model must give, from the prompt alone: no engine, no cache, no scheduler.

Sampling goes through the engine's own sampler, one row at a time; beam search is written again, as
naively as it can be: every beam is a list of tokens, every step ranks all continuations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from preempt_engine import BeamSearchParams, SamplingParams
from preempt_engine.exact import EOS_TOKEN_ID, ExactLogits, ReferenceSequence
from preempt_engine.sampling.noise import branch_seed
from preempt_engine.sampling.sampler import SampledToken, SampleRequest, sample

VOCAB_SIZE = 64


@dataclass
class Expected:
    """One output; `score` and log probabilities are compared where they are not None."""

    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str
    score: float | None = None


def expected_outputs(
    prompt: list[int], params: SamplingParams | BeamSearchParams, num_ranks: int = 1
) -> list[Expected]:
    """One per branch; whoever samples brings a seed."""
    if isinstance(params, BeamSearchParams):
        return _beams(prompt, params, num_ranks)
    seed = params.seed
    assert seed is not None
    return [
        _branch(prompt, params, branch_seed(seed, branch), num_ranks) for branch in range(params.n)
    ]


def _branch(prompt: list[int], params: SamplingParams, seed: int, num_ranks: int) -> Expected:
    """A request of its own with that seed: its branch is 0."""
    history = ReferenceSequence(prompt, num_ranks=num_ranks)
    stop_ids = _stop_ids(params)
    token_ids: list[int] = []
    logprobs: list[dict[int, float]] = []
    while True:
        request = SampleRequest(
            row=0,
            params=params,
            seed=seed,
            branch=0,
            position=len(prompt) + len(token_ids),
            num_output_tokens=len(token_ids),
            stop_ids=stop_ids,
        )
        (token,) = sample(ExactLogits([history.digest], VOCAB_SIZE), [request])
        assert isinstance(token, SampledToken)  # nothing is forbidden here
        token_ids.append(token.token_id)
        logprobs.append(token.logprobs or {})
        if token.token_id in stop_ids or len(token_ids) == params.max_tokens:
            reason = "stop" if token.token_id in stop_ids else "length"
            return Expected(token_ids, None if params.logprobs is None else logprobs, reason)
        history.append(token.token_id)


def _beams(prompt: list[int], params: BeamSearchParams, num_ranks: int) -> list[Expected]:
    """See `preempt_engine.beam_search` for the rules."""

    def logprobs_after(tokens: list[int]) -> list[float]:
        history = ReferenceSequence(prompt + tokens, num_ranks=num_ranks)
        logits = [float(logit) for logit in ExactLogits([history.digest], VOCAB_SIZE).row(0)]
        log_sum = math.log(sum(math.exp(logit) for logit in logits))
        return [logit - log_sum for logit in logits]

    width, stop_ids = params.beam_width, _stop_ids(params)
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, params.max_tokens + 1):
        continuations = [
            (score + logprob, [*tokens, token_id])
            for score, tokens in running
            for token_id, logprob in enumerate(logprobs_after(tokens))
        ]
        continuations.sort(key=lambda entry: -entry[0])
        best = continuations[: width * max(2, 1 + len(stop_ids))]
        running = []
        for rank, (score, tokens) in enumerate(best):
            if tokens[-1] not in stop_ids and length < params.max_tokens:
                running.append((score, tokens))
            elif rank < width:
                finished.append((score / length**params.length_penalty, tokens))
        running = running[:width]
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        if len(finished) == width and running:
            if params.early_stopping is True:
                break
            patient = params.early_stopping == "never" and params.length_penalty > 0
            reached = params.max_tokens if patient else length
            if running[0][0] / reached**params.length_penalty <= finished[-1][0]:
                break
    expected = []
    for score, tokens in finished:
        logprobs = [
            {token_id: logprobs_after(tokens[:index])[token_id]}
            for index, token_id in enumerate(tokens)
        ]
        reason = "stop" if tokens[-1] in stop_ids else "length"
        expected.append(Expected(tokens, logprobs, reason, score))
    return expected


def _stop_ids(params: SamplingParams | BeamSearchParams) -> frozenset[int]:
    eos = frozenset() if params.ignore_eos else frozenset({EOS_TOKEN_ID})
    return eos | frozenset(params.stop_token_ids)
