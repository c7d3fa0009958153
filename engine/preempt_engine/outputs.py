"""What a user gets back. Names are vLLM's; nano-vllm's `output["text"]` works too."""

from __future__ import annotations

from dataclasses import dataclass, field

from preempt_engine.errors import EngineError


@dataclass(slots=True)
class CompletionOutput:
    """One branch of a request.

    Attributes:
        index: branch.
        text: decoded output; "" without a tokenizer.
        token_ids: output token ids.
        logprobs: per output token, {token id: log probability}; None when not asked for.
        cumulative_logprob: sum over the chosen tokens; None when logprobs were not asked for.
        finish_reason: "stop", "length", "error", "abort", or None while it runs.
        stop_reason: the stop string or stop token id that ended it, if one did.
        score: by which the outputs of a beam search are ranked, best first; None otherwise.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request.

    Attributes:
        request_id: as given to, or chosen by, `add_request`.
        prompt: text of the prompt, if text was given.
        prompt_token_ids: its ids.
        outputs: one per branch; those of a beam search are empty until it has ended.
        finished: no more tokens will come.
        prompt_logprobs: per prompt token, {token id: log probability}, None for the first; grows
            as the prompt is computed. None when not asked for.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        num_preemptions: times the request lost its blocks.
        error: why `finish_reason` is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: EngineError | None = None

    def __getitem__(self, name: str) -> str | list[int]:
        """`output["text"]` and `output["token_ids"]` of the first branch."""
        if name == "text":
            return self.outputs[0].text
        if name == "token_ids":
            return self.outputs[0].token_ids
        raise KeyError(f"{name!r}; known: 'text', 'token_ids'")


@dataclass(slots=True, frozen=True)
class StreamDelta:
    """What is new of one branch since the delta before.

    Attributes:
        request_id: of the request.
        index: branch.
        text: new text.
        token_ids: new output token ids; their text may come later.
        logprobs: one entry per new token; None when not asked for.
        finish_reason: set in the last delta of the branch, else None.
        stop_reason: the stop string or stop token id that ended it, if one did.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True, frozen=True)
class TokenScore:
    """Teacher-forced score of one token of a continuation.

    Attributes:
        token_id: the token that was scored.
        logprob: its log probability.
        top_token_id: the most likely token at its position.
        top_logprob: that token's log probability.
        second_logprob: log probability of the runner-up.
    """

    token_id: int
    logprob: float
    top_token_id: int
    top_logprob: float
    second_logprob: float
