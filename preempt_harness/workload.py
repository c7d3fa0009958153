"""What a trial asks of an engine: requests and scripted operations. Plain data, no engine."""

from __future__ import annotations

from typing import Any

import msgspec


class BeamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A beam search, named as in transformers; `SamplingSpec` says what ends a beam."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters, plain data; names and meaning as in vLLM.

    Those from `prompt_logprobs` on are not every engine's: each has a capability.

    Attributes:
        logit_bias: (token id, what is added to its logit) pairs.
        json_schema: the output is JSON of this schema (text of a schema).
        regex: the whole output matches this expression.
        logits_processors: names in `preempt_harness.processors.PROCESSORS`.
    """

    n: int = 1
    beam: BeamSpec | None = None
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = True
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    logits_processors: tuple[str, ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether more than the model's own logits, temperature, filters and noise chooses."""
        return any(
            (
                self.beam is not None,
                self.repetition_penalty != 1.0,
                self.presence_penalty,
                self.frequency_penalty,
                self.min_tokens,
                self.logit_bias,
                self.bad_words,
                self.logits_processors,
                self.json_schema is not None,
                self.regex is not None,
            )
        )

    @property
    def num_sequences(self) -> int:
        """Sequences that a request of these parameters runs at once."""
        return self.beam.num_beams if self.beam is not None else self.n


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        id: short name, "r0", "r1", ...
        prompt_token_ids: the prompt.
        sampling: how and how long.
        arrival_step: submitted before the step (poll) of this number.
        priority: lower is more urgent.
        text: the prompt as text where it has one, for reports.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingSpec = SamplingSpec()
    arrival_step: int = 0
    priority: int = 0
    text: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Done by the user before a step.

    Attributes:
        kind: "abort" a request, "reset_prefix_cache", "reset_running_requests" (preempt all that
            run, and forget cached content) or "set_priority" of a request.
        step: the step (poll) before which it is done.
        request: which one, where it concerns one.
        priority: the new one, for "set_priority".
    """

    kind: str
    step: int
    request: str = ""
    priority: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in arrival order, and operations."""

    requests: list[RequestSpec]
    operations: list[Operation] = []

    def to_builtins(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for a record's header: what JSON gives back."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        for request in data["requests"]:
            sampling = request["sampling"]
            sampling.update({name: _as_lists(value) for name, value in sampling.items()})
        return data

    @classmethod
    def from_builtins(cls, data: dict[str, Any]) -> Workload:
        """Inverse of `to_builtins`."""
        return msgspec.convert(data, cls)


def _as_lists(value: Any) -> Any:
    """A value with lists for its tuples, of which JSON knows none."""
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
