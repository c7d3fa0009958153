"""Builds what the user sees of one branch, token by token, and decides when it ends.

Owns text, log probabilities and finish reasons. Knows no blocks and no steps: a preemption does
not reach it.
"""

from __future__ import annotations

from dataclasses import dataclass

from preempt_engine.detokenizer import IncrementalDetokenizer
from preempt_engine.errors import EngineError
from preempt_engine.outputs import CompletionOutput, RequestOutput
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sampling.sampler import SampledToken
from preempt_engine.tokenizer import Tokenizer


@dataclass(slots=True)
class OutputBuilder:
    """One branch's output under construction.

    Attributes:
        output: what the user gets of the request; it grows in place.
        completion: what the user gets of this branch, one of `output.outputs`.
        params: what the user asked for.
        eos_token_ids: ids that end the branch unless `ignore_eos`.
        stop_ids: ids that end the branch, and that `min_tokens` bans.
        max_output_tokens: by `max_tokens`, the model's length and the pool.
        detokenizer: None without a tokenizer.
    """

    output: RequestOutput
    completion: CompletionOutput
    params: SamplingParams
    eos_token_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_output_tokens: int
    detokenizer: IncrementalDetokenizer | None

    @classmethod
    def create_branches(
        cls,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        max_output_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> list[OutputBuilder]:
        """Empty outputs for the `params.n` branches of a new request."""
        eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[_empty_completion(index, params) for index in range(params.n)],
            finished=False,
            # Nothing predicts the first token.
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        return [
            cls(
                output=output,
                completion=completion,
                params=params,
                eos_token_ids=eos_token_ids,
                stop_ids=eos_token_ids | frozenset(params.stop_token_ids),
                max_output_tokens=max_output_tokens,
                detokenizer=_detokenizer(tokenizer, params),
            )
            for completion in output.outputs
        ]

    def append_prompt_logprobs(self, logprobs: list[dict[int, float]]) -> None:
        """Take in the log probabilities of the next tokens of the prompt."""
        assert self.output.prompt_logprobs is not None
        self.output.prompt_logprobs += logprobs

    def append(self, token: SampledToken) -> str:
        """Take in the next token; returns the new text.

        Afterwards `completion.finish_reason` says whether the branch ended with it.
        """
        completion = self.completion
        completion.token_ids.append(token.token_id)
        if token.logprobs is not None:
            assert completion.logprobs is not None
            assert completion.cumulative_logprob is not None
            completion.logprobs.append(token.logprobs)
            completion.cumulative_logprob += token.logprobs[token.token_id]
        if token.token_id in self.stop_ids:
            is_eos = token.token_id in self.eos_token_ids
            return self.finish("stop", None if is_eos else token.token_id)
        text = self._push(token.token_id)
        if self.detokenizer is not None and self.detokenizer.stop_reason is not None:
            return text + self.finish("stop", self.detokenizer.stop_reason)
        if len(completion.token_ids) >= self.max_output_tokens:
            return text + self.finish("length", None)
        return text

    def finish(self, reason: str, stop_reason: str | int | None = None) -> str:
        """End the branch, and the request with its last; returns the text that was held back."""
        completion = self.completion
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.finish()
            completion.text += text
            # Bytes that stayed incomplete can complete a stop string at the very end.
            if reason == "length" and self.detokenizer.stop_reason is not None:
                reason, stop_reason = "stop", self.detokenizer.stop_reason
        completion.finish_reason = reason
        completion.stop_reason = stop_reason
        self.output.finished = all(branch.finished() for branch in self.output.outputs)
        return text

    def fail(self, error: EngineError) -> str:
        """End the branch with an error of the request; returns the text that was held back."""
        self.output.error = error
        return self.finish("error")

    def _push(self, token_id: int) -> str:
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.push(token_id)
        self.completion.text += text
        return text


def _empty_completion(index: int, params: SamplingParams) -> CompletionOutput:
    completion = CompletionOutput(index=index)
    if params.logprobs is not None:
        completion.logprobs = []
        completion.cumulative_logprob = 0.0
    return completion


def _detokenizer(
    tokenizer: Tokenizer | None, params: SamplingParams
) -> IncrementalDetokenizer | None:
    if tokenizer is None:
        return None
    return IncrementalDetokenizer(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
