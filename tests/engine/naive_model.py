"""The exact model in closed form, and engines that preempt: shared by tests of request state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.exact import ReferenceSequence, logits_of
from preempt_engine.sequence import Request

VOCAB_SIZE = 128
Change = Callable[[list[float], list[int]], list[float]]


def logits_after(token_ids: Iterable[int]) -> list[float]:
    """Logits of the token that follows a history, as the engine's float32 rows hold them."""
    digest = ReferenceSequence(token_ids).digest
    return [float(np.float32(value)) for value in logits_of(digest, VOCAB_SIZE)]


def naive_greedy(prompt: Sequence[int], num_tokens: int, change: Change) -> list[int]:
    """Greedy output when `change(logits, output so far)` is applied to every row."""
    output: list[int] = []
    for _ in range(num_tokens):
        scores = change(logits_after([*prompt, *output]), list(output))
        output.append(max(range(VOCAB_SIZE), key=lambda token_id: (scores[token_id], -token_id)))
    return output


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Log probabilities, plainly."""
    total = sum(np.exp(np.float64(value)) for value in logits)
    return [float(value - np.log(total)) for value in logits]


class PreemptAt:
    """Preempts what runs before given steps.

    Args:
        step_ids: before which steps.
    """

    def __init__(self, step_ids: Iterable[int]) -> None:
        self.step_ids = set(step_ids)

    def select_victims(self, step_id: int, running: Sequence[Request]) -> list[str]:
        return [item.request_id for item in running] if step_id in self.step_ids else []


def engine(preempt_at: Iterable[int] = (), **options: Any) -> LLM:
    """An exact engine that preempts everything before some steps."""
    defaults: dict[str, Any] = {
        "num_kv_blocks": 64,
        "block_size": 4,
        "exact_vocab_size": VOCAB_SIZE,
    }
    return LLM("exact", preemption_controller=PreemptAt(preempt_at), **{**defaults, **options})


def generate_one(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, *, preempted: bool = False
) -> RequestOutput:
    """One output; `preempted` demands that the run was preempted."""
    (output,) = llm.generate(list(prompt), params, use_tqdm=False)
    assert not preempted or output.num_preemptions > 0
    return output
