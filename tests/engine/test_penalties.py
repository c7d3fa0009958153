"""Penalties, logit bias and bad words against plain references, with and without preemptions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import VOCAB_SIZE, engine, generate_one, logits_after, naive_greedy

from preempt_engine import SamplingParams
from preempt_engine.errors import ConfigError, InfeasibleRequestError

PROMPT = [3, 4, 5, 3, 4, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
preemptions = st.lists(st.integers(1, 25), max_size=4, unique=True)


@given(
    repetition=st.sampled_from([0.5, 1.0, 1.7]),
    presence=st.sampled_from([-2.0, 0.0, 1.1]),
    frequency=st.sampled_from([-0.5, 0.0, 2.0]),
    preempt_at=preemptions,
)
def test_penalties_are_the_formulas_of_their_sources(
    repetition: float, presence: float, frequency: float, preempt_at: list[int]
) -> None:
    def penalize(scores: list[float], output: list[int]) -> list[float]:
        for token_id in range(VOCAB_SIZE):
            count = output.count(token_id)
            if token_id in PROMPT or count:
                positive = scores[token_id] > 0
                scores[token_id] *= 1 / repetition if positive else repetition
            scores[token_id] -= frequency * count + (presence if count else 0.0)
        return scores

    params = replace(
        GREEDY,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    output = generate_one(engine(preempt_at), PROMPT, params)
    assert output.outputs[0].token_ids == naive_greedy(PROMPT, 12, penalize)


@pytest.mark.parametrize("preempt_at", [(), (1, 4, 5), range(1, 40, 2)])
def test_repetition_penalty_counts_the_prompt_and_presence_penalty_does_not(
    preempt_at: tuple[int, ...],
) -> None:
    # A prompt that holds the whole vocabulary: a penalty on all of it changes no order.
    prompt = list(range(VOCAB_SIZE))
    plain = naive_greedy(prompt, 1, lambda scores, output: scores)
    once = replace(GREEDY, max_tokens=1)
    llm = engine(preempt_at, max_num_batched_tokens=32)
    presence = generate_one(llm, prompt, replace(once, presence_penalty=2.0))
    assert presence.outputs[0].token_ids == plain
    # The only positive logit, 1, becomes 0.2 and stays above the negative ones ...
    assert generate_one(llm, prompt, replace(once, repetition_penalty=5.0)).outputs[0].token_ids
    # ... unless negative ones are pulled towards 0: 1 / 0.001 stays the largest all the same.
    smaller = generate_one(llm, prompt, replace(once, repetition_penalty=0.001))
    assert smaller.outputs[0].token_ids == plain


@given(bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-9, 9)), at=preemptions)
def test_logit_bias_is_added_and_minus_infinity_forbids(
    bias: dict[int, float], at: list[int]
) -> None:
    banned = naive_greedy(PROMPT, 1, lambda scores, output: scores)[0]
    bias[banned] = -math.inf

    def add(scores: list[float], output: list[int]) -> list[float]:
        return [score + bias.get(token_id, 0.0) for token_id, score in enumerate(scores)]

    output = generate_one(engine(at), PROMPT, replace(GREEDY, logit_bias=bias))
    assert output.outputs[0].token_ids == naive_greedy(PROMPT, 12, add)
    assert banned not in output.outputs[0].token_ids


@given(at=preemptions)
def test_a_bad_word_is_never_completed(at: list[int]) -> None:
    output = generate_one(engine(), PROMPT, GREEDY).outputs[0]
    words = [output.text[2:5], output.text[7]]
    ids = [output.token_ids[2:5], output.token_ids[7:8]]

    def forbid(scores: list[float], output: list[int]) -> list[float]:
        for *prefix, last in ids:
            if output[len(output) - len(prefix) :] == prefix:
                scores[last] = -math.inf
        return scores

    output = generate_one(engine(at), PROMPT, replace(GREEDY, bad_words=words)).outputs[0]
    assert output.token_ids == naive_greedy(PROMPT, 12, forbid)
    assert not any(word in output.text for word in words)


def test_reported_log_probabilities_are_those_of_the_model_not_of_the_penalized_scores() -> None:
    params = replace(GREEDY, logprobs=1, frequency_penalty=2.0, logit_bias={9: 50.0})
    output = generate_one(engine(), PROMPT, params).outputs[0]
    assert output.token_ids[0] == 9
    assert output.logprobs is not None
    history = [*PROMPT, *output.token_ids]
    for index, row in enumerate(output.logprobs):
        logits = logits_after(history[: len(PROMPT) + index])
        assert max(row, key=row.__getitem__) == logits.index(max(logits))


@pytest.mark.parametrize(
    ("params", "part"),
    [
        (replace(GREEDY, logit_bias={VOCAB_SIZE: 1.0}), "logit_bias names token 128"),
        (replace(GREEDY, bad_words=["\N{SNOWMAN}"]), "no character"),
        (
            replace(GREEDY, logit_bias=dict.fromkeys(range(VOCAB_SIZE), -math.inf)),
            "Every one of the 128 tokens .* by logit_bias",
        ),
    ],
)
def test_what_cannot_be_done_ends_the_request_and_not_its_neighbour(
    params: SamplingParams, part: str
) -> None:
    failed, other = engine().generate([PROMPT, PROMPT], [params, GREEDY], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    with pytest.raises(InfeasibleRequestError, match=part):
        raise failed.error or AssertionError
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -3.0},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: math.nan}},
        {"bad_words": [" "]},
        {"prompt_logprobs": -1},
        {"max_tokens": -1},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    llm = engine(skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="bad_words"):
        llm.add_request(PROMPT, replace(GREEDY, bad_words=["a"]))
    assert not llm.has_unfinished_requests()
