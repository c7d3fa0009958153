"""Prompt log probabilities: each once and right, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine, generate_one, log_softmax, logits_after

from preempt_engine import RequestOutput, SamplingParams
from preempt_engine.sequence import Request

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
prompts = st.lists(st.integers(0, 9), min_size=1, max_size=30)


def assert_right(output: RequestOutput, prompt: Sequence[int], num: int = 1) -> None:
    """Compare with the closed form of the model."""
    rows = output.prompt_logprobs
    assert rows is not None
    assert len(rows) == len(prompt)
    assert rows[0] is None
    for position, row in enumerate(rows[1:], start=1):
        expected = log_softmax(logits_after(prompt[:position]))
        best = sorted(range(len(expected)), key=lambda token_id: -expected[token_id])[:num]
        assert row is not None
        assert list(row) == list(dict.fromkeys([prompt[position], *best]))
        # Both sum 128 terms in float64: 128 roundings of 2**-53.
        assert list(row.values()) == pytest.approx([expected[i] for i in row], rel=0, abs=2e-14)


@given(
    prompt=prompts,
    budget=st.integers(1, 9),
    preempt_at=st.lists(st.integers(1, 30), max_size=4, unique=True),
    max_tokens=st.sampled_from([0, 1, 3]),
    caching=st.booleans(),
)
def test_they_are_complete_in_chunks_and_across_preemptions(
    prompt: list[int], budget: int, preempt_at: list[int], max_tokens: int, caching: bool
) -> None:
    llm = engine(preempt_at, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    output = generate_one(llm, prompt, replace(PARAMS, max_tokens=max_tokens))
    assert_right(output, prompt)
    assert len(output.outputs[0].token_ids) == max_tokens
    assert output.outputs[0].finish_reason == "length"


@given(prompt=prompts, shared=st.integers(0, 30))
def test_positions_in_the_prefix_cache_are_computed_for_them(
    prompt: list[int], shared: int
) -> None:
    llm = engine()
    generate_one(llm, prompt[:shared] or prompt, replace(PARAMS, prompt_logprobs=None))
    output = generate_one(llm, prompt, PARAMS)
    assert_right(output, prompt)
    assert output.num_cached_tokens == 0


class PreemptInPrefill:
    """Preempts once, when `num_computed` prompt tokens are computed."""

    def __init__(self, num_computed: int) -> None:
        self.num_computed = num_computed
        self.done = False

    def select_victims(self, step_id: int, running: Sequence[Request]) -> list[str]:
        if not running or self.done or running[0].sequence.num_computed_tokens < self.num_computed:
            return []
        self.done = True
        return [running[0].request_id]


def test_after_a_preemption_known_positions_may_come_from_the_cache() -> None:
    prompt = list(range(20))
    llm = engine(max_num_batched_tokens=5)
    llm.scheduler.controller = PreemptInPrefill(10)
    output = generate_one(llm, prompt, PARAMS, preempted=True)
    assert_right(output, prompt)
    # Ten were computed, of which two blocks of four are full and were findable.
    assert llm.counters.num_recomputed_tokens == 2


def test_they_end_with_an_aborted_request_where_its_prefill_was() -> None:
    prompt = list(range(20))
    llm = engine(max_num_batched_tokens=8)
    request_id = llm.add_request(prompt, PARAMS)
    llm.step()
    output = llm.abort_request(request_id)
    assert output is not None
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 9  # None, and the 8 tokens after positions [0, 8)


def test_max_tokens_0_fills_the_cache_and_gives_nothing_else() -> None:
    prompt = list(range(20))
    llm = engine()
    output = generate_one(llm, prompt, SamplingParams(max_tokens=0))
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([], "")
    assert (output.outputs[0].finish_reason, output.prompt_logprobs) == ("length", None)
    assert generate_one(llm, prompt, PARAMS).num_cached_tokens == 0
    assert generate_one(llm, prompt, SamplingParams()).num_cached_tokens == 16


def test_a_prompt_may_fill_the_model_when_no_output_is_wanted() -> None:
    llm = engine(max_model_len=8)
    whole = replace(PARAMS, max_tokens=0)
    fits, too_long = llm.generate([list(range(8)), list(range(9))], whole, use_tqdm=False)
    assert_right(fits, list(range(8)))
    assert too_long.outputs[0].finish_reason == "error"
    assert generate_one(llm, list(range(8)), PARAMS).outputs[0].finish_reason == "error"
