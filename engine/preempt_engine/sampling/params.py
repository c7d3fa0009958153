"""What a user may ask of sampling. Data and its validation; no arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from preempt_engine.errors import ConfigError

if TYPE_CHECKING:
    from preempt_engine.sampling.logits_processor import LogitsFunction, LogitsProcessor

# What does not change which token a greedy choice takes.
_GREEDY_IGNORES = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "ignore_eos",
        "stop",
        "stop_token_ids",
    }
)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A language that the output must belong to. Exactly one of the two is given.

    The output ends with the end-of-sequence token, which is allowed exactly where the text is
    complete. Needs the package `xgrammar` (extra `grammar`).

    Attributes:
        json: a JSON schema, as a dictionary or as text; kept as text. The output has no white space
            between its parts.
        regex: a regular expression that the whole text matches.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if (self.json is None) == (self.regex is None):
            raise ConfigError(
                "StructuredOutputsParams needs exactly one of json and regex.",
                "Give the one that describes the output.",
            )
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", json.dumps(self.json))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        n: outputs per prompt, each a branch with noise of its own (`noise.branch_seed`).
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely, in [0, 1].
        seed: of this request's noise; None derives it from the engine's seed and the
            request's arrival index.
        max_tokens: most output tokens. 0 computes the prompt and ends with reason "length": for
            prompt log probabilities, or to fill the prefix cache.
        min_tokens: no stop token and no stop string before this many output tokens.
        ignore_eos: the end-of-sequence token does not end the request.
        stop: strings that end the request; the text is cut before the first of them.
        stop_token_ids: ids that end the request; the id itself is part of `token_ids`.
        logprobs: number of most likely tokens to report per position, beside the chosen one;
            None reports nothing.
        prompt_logprobs: the same for each token of the prompt but the first, which nothing
            predicts. Positions whose log probabilities are still wanted are computed, not taken
            from the prefix cache.
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive,
            else multiplied; above 0, 1 does nothing.
        presence_penalty: subtracted from the logit of every token in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: {token id: what is added to its logit}; -inf forbids it. Kept as sorted pairs.
        bad_words: texts whose token sequence is never completed in the output.
        logits_processors: the user's own, applied in order; see `sampling.processors`.
        structured_outputs: a JSON schema or a regular expression for the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] | list[str] = ()
    logits_processors: tuple[LogitsProcessor | LogitsFunction, ...] | list[Any] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "bad_words", "logits_processors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._validate()

    @property
    def num_sequences(self) -> int:
        """Sequences that the request runs at once."""
        return self.n

    @property
    def greedy(self) -> bool:
        """True when no noise takes part."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """True when a penalty takes part."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs."""
        return tuple(dict(self.logit_bias).items())

    @property
    def has_processors(self) -> bool:
        """True when processors change the scores of its tokens."""
        return bool(
            self.penalized
            or self.logit_bias
            or self.bad_words
            or self.logits_processors
            or self.structured_outputs
        )

    @property
    def argmax_suffices(self) -> bool:
        """True when the largest logit alone decides: greedy, and nothing else is asked for.

        Every field counts that is not known to leave a greedy choice alone, so that a new one is
        never forgotten here.
        """
        return self.greedy and all(
            getattr(self, field.name) == field.default
            for field in dataclasses.fields(self)
            if field.name not in _GREEDY_IGNORES
        )

    def _validate(self) -> None:
        words = self.bad_words
        checks = (
            (self.n >= 1, "n", "1 or more"),
            (self.temperature >= 0, "temperature", "0 or more"),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]"),
            (self.top_k >= 0, "top_k", "0, -1 or a positive integer"),
            (0 <= self.min_p <= 1, "min_p", "in [0, 1]"),
            (self.max_tokens >= 0, "max_tokens", "0 or more"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", "in [0, max_tokens]"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "None, 0 or more"),
            (
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                "prompt_logprobs",
                "None, 0 or more",
            ),
            (
                all(bias < math.inf for _, bias in self.bias_pairs),
                "logit_bias",
                "numbers, or -inf to forbid a token",
            ),
            (self.repetition_penalty > 0, "repetition_penalty", "above 0"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]"),
            (all(self.stop), "stop", "strings that are not empty"),
            (all(word.strip() for word in words), "bad_words", "texts that are not blank"),
            (
                self.structured_outputs is None or not self.ignore_eos,
                "ignore_eos",
                "False with structured_outputs, which end with the end-of-sequence token",
            ),
        )
        _raise_first_invalid(self, checks)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched; the meaning of each parameter is that of transformers.

    Attributes:
        beam_width: beams, and outputs, of a prompt (transformers: `num_beams`).
        max_tokens: most output tokens, at least 1 (`max_new_tokens`).
        length_penalty: outputs are ranked by their sum of log probabilities divided by
            length ** length_penalty; above 0 prefers long ones.
        early_stopping: True ends as soon as `beam_width` outputs are complete; False when the
            best beam, judged at its present length, ranks below them; "never" when it must.
        ignore_eos: the end-of-sequence token does not end a beam.
        stop_token_ids: ids that end a beam; the id itself is part of `token_ids`.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] | list[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            (self.beam_width >= 1, "beam_width", "1 or more"),
            (self.max_tokens >= 1, "max_tokens", "1 or more"),
            (
                isinstance(self.early_stopping, bool) or self.early_stopping == "never",
                "early_stopping",
                'True, False or "never"',
            ),
        )
        _raise_first_invalid(self, checks)

    @property
    def num_sequences(self) -> int:
        """Sequences that the request runs at once."""
        return self.beam_width

    @property
    def argmax_suffices(self) -> bool:
        """False: a search ranks the continuations of all beams."""
        return False

    @property
    def for_output(self) -> SamplingParams:
        """How the tokens of a finished beam are reported: with the log probability of each."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=0,
        )


def _raise_first_invalid(
    params: SamplingParams | BeamSearchParams, checks: Iterable[tuple[bool, str, str]]
) -> None:
    for valid, name, expected in checks:
        if not valid:
            raise ConfigError(
                f"{type(params).__name__}({name}={getattr(params, name)!r}) is out of range.",
                f"{name} must be {expected}.",
            )
