"""What `LLM(speculative_config=...)` may say. Data and its validation; names are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from preempt_engine.errors import ConfigError

SpeculativeMethod = Literal["ngram", "draft_model", "scripted"]

_MOST_DRAFTS = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted.

    Outputs are the same with and without: a draft is accepted where it is the token that the
    target would have chosen. Beam searches are never drafted for.

    Attributes:
        method: "ngram" drafts what followed the latest tokens where they stood before;
            "draft_model" asks a second model; "scripted" knows the exact model's next tokens and
            changes some of them.
        num_speculative_tokens: most drafts of a sequence in one step.
        prompt_lookup_max, prompt_lookup_min: longest and shortest end of a text that "ngram" looks
            for in it.
        model: of "draft_model": "exact", a directory in Hugging Face format, or a hub id.
        num_hidden_layers: of "draft_model": take the first so many layers only; None takes all.
        acceptance_rate: of "scripted", and of "draft_model" with model="exact": share of the
            positions whose draft is left as it is, in [0, 1]. A position's lot is drawn from
            `seed`, request and position, so that no preemption changes it.
        seed: of the lots.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    model: str | None = None
    num_hidden_layers: int | None = None
    acceptance_rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            raise ConfigError(
                f"speculative_config: method={self.method!r} is unknown.",
                f"Choose one of {', '.join(get_args(SpeculativeMethod))}.",
            )
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_DRAFTS)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_integer("seed", self.seed, None, None)
        if not 0 <= self.acceptance_rate <= 1:
            raise ConfigError(
                f"speculative_config: acceptance_rate={self.acceptance_rate!r} is no share.",
                "Give a number from 0 to 1.",
            )
        if (self.model is not None) != (self.method == "draft_model"):
            raise ConfigError(
                f"speculative_config: model={self.model!r} with method={self.method!r}.",
                'Give a model with method="draft_model", and only there.',
            )
        if self.num_hidden_layers is not None:
            _check_integer("num_hidden_layers", self.num_hidden_layers, 1, None)
            if self.method != "draft_model" or self.model == "exact":
                raise ConfigError(
                    "speculative_config: num_hidden_layers is given, and no checkpoint drafts.",
                    'Leave it out, or give method="draft_model" and a checkpoint as model.',
                )
        if self.acceptance_rate != 1 and self.method != "scripted" and self.model != "exact":
            raise ConfigError(
                f"speculative_config: acceptance_rate={self.acceptance_rate} with "
                f"method={self.method!r}.",
                'Leave it out: only "scripted" and the exact draft model know what to change.',
            )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from a dictionary.

        Raises:
            ConfigError: a key is unknown or missing, or a value is wrong.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"speculative_config has no key {name!r}.", f"Known: {', '.join(known)}."
                )
        for name in ("method", "num_speculative_tokens"):
            if name not in given:
                raise ConfigError(
                    f"speculative_config has no {name!r}.",
                    'Give {"method": "ngram", "num_speculative_tokens": 3}, for instance.',
                )
        return cls(**given)


def _check_integer(name: str, value: object, low: int | None, high: int | None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and (low is None or value >= low) and (high is None or value <= high):  # type: ignore[operator]
        return
    span = "any integer" if low is None else f"{low} or more"
    raise ConfigError(
        f"speculative_config: {name}={value!r} is out of range.",
        f"Give {span if high is None else f'{low} to {high}'}.",
    )
