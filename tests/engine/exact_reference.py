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
from preempt_engine.sampling.sampler import SampleRequest, sample

VOCAB_SIZE = 64


@dataclass
class Expected:
    """One output; `score` and log probabilities are compared where they are not None."""

    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str
    score: float | None = None


def expected_outputs(
    prompt: list[int], params: SamplingParams | BeamSearchParams, seed: int = 0
) -> list[Expected]:
    """One per branch. `seed` is the request's, where `params` name none."""
    if isinstance(params, BeamSearchParams):
        return _beams(prompt, params)
    if params.seed is not None:
        seed = params.seed
    return [_branch(prompt, params, branch_seed(seed, branch)) for branch in range(params.n)]


def _branch(prompt: list[int], params: SamplingParams, seed: int) -> Expected:
    """A request of its own with that seed: its branch is 0."""
    history = ReferenceSequence(prompt)
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
        token_ids.append(token.token_id)
        logprobs.append(token.logprobs or {})
        if token.token_id in stop_ids or len(token_ids) == params.max_tokens:
            reason = "stop" if token.token_id in stop_ids else "length"
            return Expected(token_ids, None if params.logprobs is None else logprobs, reason)
        history.append(token.token_id)


def _beams(prompt: list[int], params: BeamSearchParams) -> list[Expected]:
    """See `preempt_engine.beam_search` for the rules."""
    width, stop_ids = params.beam_width, _stop_ids(params)
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, params.max_tokens + 1):
        continuations = [
            (score + logprob, [*tokens, token_id])
            for score, tokens in running
            for token_id, logprob in enumerate(_logprobs(prompt + tokens))
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
    return [_expected_beam(prompt, score, tokens, stop_ids) for score, tokens in finished]


def _expected_beam(
    prompt: list[int], score: float, tokens: list[int], stop_ids: frozenset[int]
) -> Expected:
    logprobs = [
        {token_id: _logprobs(prompt + tokens[:index])[token_id]}
        for index, token_id in enumerate(tokens)
    ]
    return Expected(tokens, logprobs, "stop" if tokens[-1] in stop_ids else "length", score)


def _logprobs(token_ids: list[int]) -> list[float]:
    digest = ReferenceSequence(token_ids).digest
    logits = [float(logit) for logit in ExactLogits([digest], VOCAB_SIZE).row(0)]
    log_sum = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - log_sum for logit in logits]


def _stop_ids(params: SamplingParams | BeamSearchParams) -> frozenset[int]:
    eos = frozenset() if params.ignore_eos else frozenset({EOS_TOKEN_ID})
    return eos | frozenset(params.stop_token_ids)
