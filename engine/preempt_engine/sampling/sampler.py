"""Chooses one token per row of logits.

Owns the order of the stages and the choice. Every choice is a pure function of its row and of the
`SampleRequest`: rows are handled one by one, noise is keyed by position, nothing is remembered
(the state of a request's processors follows its output tokens, `history.py`).
Must never know requests beyond `SampleRequest`, nor where logits live.

Stages of a row, in vLLM V1's order (https://docs.vllm.ai/en/v0.20.0/api/vllm/v1/sample/sampler/):

    raw logits -> log probabilities for the report
               -> processors: logit bias, the user's own, penalties, bad words, grammar
               -> bans (stop tokens before `min_tokens`)
               -> temperature -> min-p -> top-k -> top-p
               -> argmax of what is left, plus Gumbel noise

(vLLM forbids bad words first; bans come last here, which differs only where a user's processor
would lift one.) Greedy is the same without the temperature, the filters and the noise. Without
processors it is decided by one batched `LogitsBatch.argmax`, and needs no row, and so no NumPy,
unless log probabilities are asked for or the winner is banned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from preempt_engine.errors import InfeasibleRequestError, LogitsProcessorError
from preempt_engine.sampling.history import ProcessorState
from preempt_engine.sampling.logprobs import largest_ids, read_row, top_logprobs
from preempt_engine.sampling.noise import TOKEN_CHOICE, gumbel, uniform_noise
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.step import LogitsBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class SampleRequest:
    """One token to choose.

    Attributes:
        row: index of the row in the `LogitsBatch`.
        params: what the user asked for.
        seed: of the request's noise.
        branch: index of the sequence within its request.
        position: absolute index, prompt included, of the token to be chosen.
        num_output_tokens: output tokens the sequence has already.
        stop_ids: ids that end the sequence (end-of-sequence and `stop_token_ids`); banned while
            `num_output_tokens` is below `params.min_tokens`.
        state: of the sequence's processors; None when it has none.
        output_token_ids: the sequence's output, where `state` needs it.
    """

    row: int
    params: SamplingParams
    seed: int
    branch: int
    position: int
    num_output_tokens: int
    stop_ids: frozenset[int]
    state: ProcessorState | None = None
    output_token_ids: Seq[int] = ()

    @property
    def banned_ids(self) -> frozenset[int]:
        """Ids that must not be chosen at this position."""
        early = self.num_output_tokens < self.params.min_tokens
        return self.stop_ids if early else frozenset()


@dataclass(slots=True)
class SampledToken:
    """A choice.

    Attributes:
        token_id: the chosen token.
        logprobs: see `top_logprobs`; None when not asked for.
    """

    token_id: int
    logprobs: dict[int, float] | None


SampleError: TypeAlias = InfeasibleRequestError | LogitsProcessorError
"""Why no token can be chosen for one request; the others are not affected."""


def sample(logits: LogitsBatch, requests: Seq[SampleRequest]) -> list[SampledToken | SampleError]:
    """Choose a token for each request; results stand in the order of `requests`.

    Raises:
        NonFiniteLogitsError: a row that had to be read holds NaN or an infinity. Rows that the
            batched argmax decides are not read, and not checked.
    """
    sampled: dict[int, SampledToken] = {}
    greedy = [i for i, item in enumerate(requests) if _argmax_may_decide(item)]
    if greedy:
        winners = logits.argmax([requests[i].row for i in greedy])
        for i, token_id in zip(greedy, winners, strict=True):
            if token_id not in requests[i].banned_ids:
                sampled[i] = SampledToken(token_id, None)
    return [
        sampled[i] if i in sampled else _sample_row(logits, item) for i, item in enumerate(requests)
    ]


def _argmax_may_decide(request: SampleRequest) -> bool:
    params = request.params
    return params.greedy and params.logprobs is None and request.state is None


def _sample_row(logits: LogitsBatch, request: SampleRequest) -> SampledToken | SampleError:
    raw = read_row(logits, request.row)  # [vocab_size]
    try:
        scores = _process(raw, request)
    except (InfeasibleRequestError, LogitsProcessorError) as error:
        return error
    token_id = _choose(scores, request)
    num_logprobs = request.params.logprobs
    if num_logprobs is None:
        return SampledToken(token_id, None)
    return SampledToken(token_id, top_logprobs(raw, num_logprobs, token_id))


def _process(raw: NDArray[np.float64], request: SampleRequest) -> NDArray[np.float64]:
    """A copy after processors, with -inf at every banned id; at least one token stays.

    Stop ids outside the vocabulary ban nothing.
    """
    scores = raw.copy()
    if request.state is not None:
        scores = request.state.process(scores, request.output_token_ids)
    banned = [token_id for token_id in request.banned_ids if 0 <= token_id < scores.size]
    scores[banned] = -math.inf
    if scores.max() == -math.inf:
        raise InfeasibleRequestError(
            f"Every one of the {scores.size} tokens of the vocabulary is forbidden after "
            f"{request.num_output_tokens} output tokens: by {_what_forbids(request)}.",
            "Forbid less. Note that min_tokens bans stop tokens, and a complete grammar allows "
            "nothing else.",
        )
    return scores


def _what_forbids(request: SampleRequest) -> str:
    params = request.params
    causes = {
        "min_tokens": bool(request.banned_ids),
        "logit_bias": bool(params.logit_bias),
        "logits_processors": bool(params.logits_processors),
        "bad_words": bool(params.bad_words),
        "structured_outputs": params.structured_outputs is not None,
    }
    return " and ".join(name for name, takes_part in causes.items() if takes_part)


def _choose(scores: NDArray[np.float64], request: SampleRequest) -> int:
    """The largest score, after temperature, filters and noise unless greedy; lowest id on a tie."""
    if request.params.greedy:
        return int(scores.argmax())
    scores = apply_temperature(scores, request.params.temperature)
    ids = surviving_ids(scores, request.params)  # [num_survivors], rising
    uniform = uniform_noise(
        request.seed, request.branch, request.position, TOKEN_CHOICE, scores.size
    )
    return int(ids[(scores[ids] + gumbel(uniform[ids])).argmax()])


def apply_temperature(scores: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Scores divided by a temperature above 0, shifted so that the largest is 0.

    Shifted first, because then the only possible overflow is to -inf: the right limit of a token
    that is not the most likely one, as the temperature goes to 0.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        shifted: NDArray[np.float64] = (scores - scores.max()) / temperature
    return shifted


def surviving_ids(scores: NDArray[np.float64], params: SamplingParams) -> NDArray[np.intp]:
    """Ids that min-p, top-k and top-p leave to choose from, in rising order.

    Each filter sees the distribution that the one before it left, renormalised. The most likely
    token always stays. Where the border of top-k or top-p falls among equals, the lower ids stay,
    so exactly k tokens stay and `top_k=1` is greedy. (vLLM's top-k keeps all equals.)

    Args:
        scores: [vocab_size], the largest is 0; -inf marks a token that cannot be chosen.
    """
    import numpy as np

    if params.min_p > 0:
        ids = np.flatnonzero(scores >= math.log(params.min_p))
    else:
        ids = np.flatnonzero(scores > -math.inf)
    if params.top_k > 0:
        ids = ids[largest_ids(scores[ids], params.top_k)]
    if params.top_p < 1:
        ids = ids[largest_ids(scores[ids], _nucleus_size(scores[ids], params.top_p))]
    return ids


def _nucleus_size(scores: NDArray[np.float64], top_p: float) -> int:
    """Size of the smallest set of tokens whose probability reaches `top_p`.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration",
    https://arxiv.org/abs/1904.09751, section 3.1.
    """
    import numpy as np

    weights = np.sort(np.exp(scores))[::-1]  # [num_survivors], falling
    reached = np.cumsum(weights)
    return int(np.searchsorted(reached, top_p * reached[-1])) + 1
