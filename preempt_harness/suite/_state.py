"""What scenarios of several files give their requests: state to be lost, and ends to be met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.result import TrialResult
from preempt_harness.suite.shapes import block_size, request, together

STATE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "seed": (("sampling",), {"temperature": 1.0, "seed": 11}),
    "no-seed": (("sampling",), {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    "several": (("parallel_sampling", "sampling"), {"temperature": 1.0, "seed": 3, "n": 2}),
    "repetition-penalty": (("penalties",), {"repetition_penalty": 1.7}),
    "presence-and-frequency": (
        ("penalties",),
        {"presence_penalty": 0.9, "frequency_penalty": 0.7},
    ),
    "penalties": (("penalties",), {"repetition_penalty": 1.4, "frequency_penalty": 0.3}),
    "penalties-sampled": (
        ("penalties", "sampling"),
        {"frequency_penalty": 1.1, "temperature": 1.0, "seed": 3},
    ),
    "logprobs": (("logprobs",), {"logprobs": 4}),
    "prompt-logprobs": (("prompt_logprobs", "logprobs"), {"prompt_logprobs": 2, "logprobs": 1}),
    "logit-bias": (("logit_bias",), {"logit_bias": ((5, 6.0), (9, -8.0))}),
    "processor": (("logits_processors",), {"logits_processors": ("checksum_lane",)}),
    "processors": (
        ("logits_processors",),
        {"logits_processors": ("no_repeated_bigram", "checksum_lane")},
    ),
    "min-tokens": (
        ("stop_tokens", "min_tokens"),
        {"min_tokens": 9, "stop_token_ids": tuple(range(4, 40))},
    ),
    "stop-tokens": (
        ("stop_tokens", "min_tokens"),
        {"min_tokens": 3, "stop_token_ids": tuple(range(4, 8))},
    ),
}
"""Item -> the capabilities that it takes, and sampling parameters."""

REMEMBERING = (
    "repetition-penalty",
    "presence-and-frequency",
    "penalties-sampled",
    "processors",
)
"""Items with which a token depends on all outputs before it, however long ago they came."""

_TRIES = 8


def state(preempt: PreemptHarness, item: str) -> dict[str, Any]:
    """Sampling parameters of an item; skips where the engine lacks what it takes."""
    needs, sampling = STATE[item]
    lacking = sorted({*needs} - preempt.adapter.capabilities)
    if lacking:
        pytest.skip(f"engine {preempt.adapter.name} lacks {', '.join(lacking)}")
    return sampling


def answer(
    preempt: PreemptHarness, prompt: list[int], max_tokens: int, **settings: Any
) -> TrialResult:
    """The prompt alone and in peace, with greedy output."""
    result = preempt.run(
        together(request(preempt, "probe", prompt, max_tokens)),
        "roomy",
        block_size=block_size(preempt),
        expect_preemption=False,
        **settings,
    )
    result.assert_matches_baseline()
    return result


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A prompt and a token that ends its greedy output.

    Attributes:
        prompt: the prompt.
        token_id: comes at `index` for the first time.
        index: of the output.
    """

    prompt: list[int]
    token_id: int
    index: int


def find_stop(
    preempt: PreemptHarness, num_prompt_tokens: int, first: int, *, offset: int | None = None
) -> Stop:
    """A stop that comes at output index `first` or later.

    Args:
        preempt: of the test.
        num_prompt_tokens: of a fresh prompt.
        first: least index.
        offset: so many tokens behind a block boundary prompt and output are to end, -1 for one
            before; None takes any.
    """
    block = block_size(preempt)
    for _ in range(_TRIES):
        prompt = preempt.prompts.take(num_prompt_tokens)
        probe = answer(preempt, prompt, first + 3 * block)
        output = probe.record.results["probe"].outputs[0].token_ids
        for index in range(first, len(output)):
            total = num_prompt_tokens + index + 1
            fits = offset is None or (total - offset) % block == 0
            if fits and output[index] not in output[:index]:
                return Stop(prompt=prompt, token_id=output[index], index=index)
    pytest.skip(f"the outputs of {preempt.settings().model} repeat themselves too soon")


def assert_stopped(result: TrialResult, name: str, num_tokens: int | None = None) -> None:
    """The request stopped, after so many tokens; else the trial shows nothing of a stop."""
    output = result.record.results[name].outputs[0]
    length = len(output.token_ids)
    if output.finish_reason != "stop" or num_tokens not in (None, length):
        pytest.fail(
            f"{name} ended with {output.finish_reason!r} after {length} tokens, not with a stop"
            f"{'' if num_tokens is None else f' after {num_tokens}'}"
        )
