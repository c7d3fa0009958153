"""Requests that end at awkward places: one token, a block boundary, in a stop string."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine, generate_one, naive_greedy

from preempt_engine import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@given(length=st.integers(1, 13), preempt_at=st.lists(st.integers(0, 5), max_size=3))
def test_one_token_is_one_token(length: int, preempt_at: list[int]) -> None:
    prompt = list(range(1, length + 1))
    llm = engine(preempt_at, max_num_batched_tokens=3)
    output = generate_one(llm, prompt, replace(GREEDY, max_tokens=1)).outputs[0]
    assert output.token_ids == naive_greedy(prompt, 1, lambda scores, _: scores)
    assert output.finish_reason == "length"


@pytest.mark.parametrize("by", ["max_tokens", "stop_token_ids", "stop"])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("preempted", [False, True])
def test_an_end_at_a_block_boundary(by: str, offset: int, preempted: bool) -> None:
    # The last token of the output is the last, or first, of a block; the pool holds no more.
    prompt = [3, 4, 5, 6, 7, 9]
    num_tokens = 6 + offset
    expected = naive_greedy(prompt, num_tokens, lambda scores, _: scores)
    assert expected.index(expected[-1]) == num_tokens - 1
    options = {
        "max_tokens": {"max_tokens": num_tokens},
        "stop_token_ids": {"max_tokens": 50, "stop_token_ids": [expected[-1]]},
        "stop": {"max_tokens": 50, "stop": engine().tokenizer.decode(expected[-2:])},
    }[by]
    num_blocks = -(-(len(prompt) + num_tokens - 1) // 4)
    llm = engine(range(1, 40, 2) if preempted else (), num_kv_blocks=num_blocks)
    output = generate_one(llm, prompt, replace(GREEDY, **options), preempted=preempted).outputs[0]
    assert output.token_ids == expected
    assert output.finish_reason == ("length" if by == "max_tokens" else "stop")
    assert llm.scheduler.pool_counts().used == 0


@given(
    cut=st.integers(1, 9),
    min_tokens=st.integers(0, 10),
    preempt_at=st.lists(st.integers(1, 20), max_size=6, unique=True),
)
def test_a_stop_string_is_found_across_a_preemption(
    cut: int, min_tokens: int, preempt_at: list[int]
) -> None:
    prompt = [9, 8, 7]
    text = generate_one(engine(), prompt, replace(GREEDY, max_tokens=12)).outputs[0].text
    stop = text[cut - 1 : cut + 2]
    params = replace(GREEDY, max_tokens=12, stop=stop, min_tokens=min_tokens)
    output = generate_one(engine(preempt_at), prompt, params).outputs[0]
    if cut + 2 > min_tokens:
        assert (output.text, output.finish_reason) == (text[: cut - 1], "stop")
        assert output.stop_reason == stop
    else:
        assert (output.text, output.finish_reason) == (text, "length")


def test_a_second_generate_gives_what_a_first_one_would() -> None:
    params = replace(GREEDY, max_tokens=9, repetition_penalty=1.5)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    llm = engine((3, 7, 13), num_kv_blocks=4)
    first = llm.generate(prompts, params, use_tqdm=False)
    second = llm.generate(prompts, params, use_tqdm=False)
    assert [item["token_ids"] for item in first] == [item["token_ids"] for item in second]
    assert not llm.has_unfinished_requests()
