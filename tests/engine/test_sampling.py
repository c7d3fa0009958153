"""The sampler against naive references: filters, distribution, bans, logprobs, scores."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import preempt_engine
from preempt_engine.errors import InfeasibleRequestError, NonFiniteLogitsError
from preempt_engine.sampling.logprobs import largest_ids, score_rows, top_logprobs
from preempt_engine.sampling.noise import TOKEN_CHOICE, gumbel, uniform_noise
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sampling.sampler import (
    SampledToken,
    SampleRequest,
    apply_temperature,
    sample,
    surviving_ids,
)

Row = NDArray[np.float64]


class Logits:
    """A `LogitsBatch` in memory that counts how it is used."""

    def __init__(self, rows: Sequence[Sequence[float]] | Row) -> None:
        self.rows = np.array(rows, dtype=np.float32)
        self.argmax_calls: list[list[int]] = []
        self.rows_read: list[int] = []

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def vocab_size(self) -> int:
        return int(self.rows.shape[1])

    def argmax(self, rows: Sequence[int]) -> list[int]:
        self.argmax_calls.append(list(rows))
        return [int(self.rows[row].argmax()) for row in rows]

    def row(self, index: int) -> NDArray[np.float32]:
        self.rows_read.append(index)
        row: NDArray[np.float32] = self.rows[index].copy()
        return row


def request(
    params: SamplingParams,
    row: int = 0,
    *,
    seed: int = 0,
    position: int = 10,
    num_output_tokens: int = 0,
    stop_ids: Sequence[int] = (),
) -> SampleRequest:
    return SampleRequest(
        row=row,
        params=params,
        seed=seed,
        branch=0,
        position=position,
        num_output_tokens=num_output_tokens,
        stop_ids=frozenset(stop_ids),
    )


GREEDY = SamplingParams(temperature=0.0)

# Halves: ties are common, and every value is exact.
rows = st.lists(st.integers(-20, 20).map(lambda n: n / 2), min_size=2, max_size=24)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    logprobs=st.none() | st.integers(0, 5),
)


# Greedy -------------------------------------------------------------------------------------------


def test_greedy_rows_take_one_batched_argmax_and_no_row() -> None:
    logits = Logits([[0, 3, 1], [5, 0, 0], [0, 0, 2]])
    requests = [request(GREEDY, 2), request(GREEDY, 0)]
    assert sample(logits, requests) == [SampledToken(2, None), SampledToken(1, None)]
    assert (logits.argmax_calls, logits.rows_read) == ([[2, 0]], [])


def test_greedy_and_sampled_rows_in_one_batch_keep_their_order() -> None:
    logits = Logits([[0, 50, 0], [50, 0, 0], [0, 0, 50]])
    requests = [
        request(SamplingParams(), 0),
        request(GREEDY, 1),
        request(replace(GREEDY, logprobs=0), 2),
    ]
    assert [item.token_id for item in sample(logits, requests)] == [1, 0, 2]
    assert (logits.argmax_calls, logits.rows_read) == ([[1]], [0, 2])


def test_greedy_sampling_works_without_numpy() -> None:
    code = """
import sys
sys.modules["numpy"] = None
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sampling.sampler import SampleRequest, sample
class Logits:
    num_rows, vocab_size = 1, 3
    def argmax(self, rows): return [2 for _ in rows]
params = SamplingParams(temperature=0.0, min_tokens=4)
print(sample(Logits(), [SampleRequest(0, params, 0, 0, 7, 0, frozenset({1}))]))
"""
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(preempt_engine.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout == "[SampledToken(token_id=2, logprobs=None)]\n"


@given(rows)
def test_greedy_with_and_without_logprobs_choose_the_same_token(row: list[float]) -> None:
    logits = Logits([row])
    plain, reported = sample(logits, [request(GREEDY), request(replace(GREEDY, logprobs=1))])
    assert plain.token_id == reported.token_id == row.index(max(row))


# Choice with noise --------------------------------------------------------------------------------


def naive_filter(row: list[float], params: SamplingParams) -> set[int]:
    """Which tokens stay, filter by filter, from sorted lists."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    weight = [math.exp((value - max(row)) / params.temperature) for value in row]
    kept = [i for i in order if weight[i] >= params.min_p * weight[order[0]]]
    kept = kept[: params.top_k] if params.top_k else kept
    if params.top_p == 1.0:
        return set(kept)
    total = math.fsum(weight[i] for i in kept)
    nucleus: list[int] = []
    for i in kept:
        nucleus.append(i)
        if math.fsum(weight[i] for i in nucleus) >= params.top_p * total:
            break
    return set(nucleus)


def on_a_border(row: list[float], params: SamplingParams) -> bool:
    """True where a rounding error may decide: a share of the probability is at its limit."""
    weight = sorted(math.exp((value - max(row)) / params.temperature) for value in row)[::-1]
    if any(w != params.min_p and math.isclose(w, params.min_p) for w in weight):
        return True
    kept = [w for w in weight if w >= params.min_p][: params.top_k or None]
    shares = np.cumsum(kept) / math.fsum(kept)
    return params.top_p < 1 and any(math.isclose(share, params.top_p) for share in shares)


@settings(max_examples=400)
@given(rows, sampling_params.filter(lambda params: not params.greedy))
def test_filters_keep_what_the_naive_reference_keeps(
    row: list[float], params: SamplingParams
) -> None:
    assume(not on_a_border(row, params))
    scores = apply_temperature(np.array(row), params.temperature)
    assert surviving_ids(scores, params).tolist() == sorted(naive_filter(row, params))


@given(rows, sampling_params, st.integers(0, 2**64), st.integers(0, 10**6))
def test_a_choice_does_not_depend_on_the_rest_of_the_batch(
    row: list[float], params: SamplingParams, seed: int, position: int
) -> None:
    alone = request(params, 0, seed=seed, position=position)
    neighbour = [-value for value in row]
    others = [request(SamplingParams(seed=5), 0), request(GREEDY, 2)]
    together = [others[0], replace(alone, row=1), others[1]]
    assert sample(Logits([row]), [alone])[0] == sample(Logits([neighbour, row, row]), together)[1]


@given(rows, st.integers(0, 2**64), st.integers(0, 10**6))
def test_top_k_of_one_is_greedy_even_in_a_tie(row: list[float], seed: int, position: int) -> None:
    sampled = request(SamplingParams(top_k=1), seed=seed, position=position)
    assert sample(Logits([row]), [sampled]) == sample(Logits([row]), [request(GREEDY)])


@pytest.mark.parametrize("temperature", [1e-9, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    requests = [request(params, position=position) for position in range(50)]
    logits = Logits([[-65504.0, 1.0, 65504.0, 65503.0]])
    assert {item.token_id for item in sample(logits, requests)} == {2}


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_choice_is_the_argmax_of_tempered_logits_plus_the_noise_of_token_and_position(
    top_k: int,
) -> None:
    row = [float(i % 16) / 4 for i in range(0, 112, 7)]  # 16 values, not in order
    params = SamplingParams(temperature=0.5, top_k=top_k)
    for position in range(200):
        noise = gumbel(uniform_noise(9, 0, position, TOKEN_CHOICE, 16))
        item = request(params, seed=9, position=position)
        expected = max(naive_filter(row, params), key=lambda i: row[i] / 0.5 + noise[i])
        assert sample(Logits([row]), [item])[0].token_id == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2, top_k=6, top_p=0.95),
    ],
)
def test_sampled_tokens_follow_the_filtered_softmax(params: SamplingParams) -> None:
    row = [1.5, -0.5, 0.25, 2.0, 0.0, 1.0, -1.0, 0.75]
    num_draws = 4000
    requests = [request(params, seed=77, position=position) for position in range(num_draws)]
    counts = Counter(item.token_id for item in sample(Logits([row]), requests))

    kept = naive_filter(row, params)
    weight = {i: math.exp(row[i] / params.temperature) for i in kept}
    expected = {i: num_draws * w / sum(weight.values()) for i, w in weight.items()}
    assert set(counts) <= kept
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in kept)
    # Laurent and Massart's tail bound of chi-square (test_noise.py), one in a million.
    degrees, x = len(kept) - 1, math.log(1e6)
    assert statistic < degrees + 2 * math.sqrt(degrees * x) + 2 * x


def test_seed_branch_and_position_each_change_the_noise() -> None:
    row = [0.0] * 1000
    base = request(SamplingParams(), seed=1, position=1)
    variants = [base, replace(base, seed=2), replace(base, branch=1), replace(base, position=2)]
    assert len({item.token_id for item in sample(Logits([row]), variants)}) == 4


# min_tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, logprobs=2), SamplingParams()])
def test_stop_ids_are_banned_until_min_tokens(params: SamplingParams) -> None:
    params = replace(params, min_tokens=3)
    row = [90.0, 60.0, 0.0, 30.0]
    chosen = [
        sample(Logits([row]), [request(params, num_output_tokens=n, stop_ids=[0, 1])])[0].token_id
        for n in range(5)
    ]
    assert chosen == [3, 3, 3, 0, 0]


def test_a_greedy_row_is_read_for_a_ban_only_when_the_winner_is_banned() -> None:
    params = replace(GREEDY, min_tokens=1)
    logits = Logits([[0.0, 9.0, 5.0], [9.0, 0.0, 5.0]])
    chosen = sample(logits, [request(params, row, stop_ids=[1]) for row in (0, 1)])
    assert [item.token_id for item in chosen] == [2, 0]
    assert logits.rows_read == [0]


def test_stop_ids_outside_the_vocabulary_ban_nothing() -> None:
    params = replace(GREEDY, min_tokens=1, logprobs=0)
    item = request(params, stop_ids=[-1, 3, 10**9])
    assert sample(Logits([[0.0, 1.0, 2.0]]), [item])[0].token_id == 2


def test_a_ban_of_the_whole_vocabulary_is_an_error_of_that_request_alone() -> None:
    banned = request(replace(GREEDY, min_tokens=1), 0, stop_ids=range(3))
    error, other = sample(Logits([[0, 3, 1], [0, 0, 2]]), [banned, request(GREEDY, 1)])
    assert isinstance(error, InfeasibleRequestError)
    assert "Every one of the 3 tokens" in str(error)
    assert "by min_tokens" in str(error)
    assert other == SampledToken(2, None)


# Log probabilities --------------------------------------------------------------------------------


def naive_logprobs(row: list[float]) -> list[float]:
    largest = max(row)
    total = math.fsum(math.exp(value - largest) for value in row)
    return [value - largest - math.log(total) for value in row]


@given(rows, st.integers(0, 30), st.data())
def test_top_logprobs_are_the_chosen_token_then_the_most_likely(
    row: list[float], num: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    result = top_logprobs(np.array(row), num, chosen)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num]
    assert list(result) == list(dict.fromkeys([chosen, *order]))
    expected = naive_logprobs(row)
    # 24 terms summed in another order: a few ulps.
    assert list(result.values()) == pytest.approx([expected[i] for i in result], abs=1e-12)


@given(rows, sampling_params)
def test_logprobs_are_those_of_the_raw_distribution(
    row: list[float], params: SamplingParams
) -> None:
    params = replace(params, logprobs=2, min_tokens=1)
    chosen = sample(Logits([row]), [request(params, stop_ids=[0])])[0]
    assert chosen.logprobs == top_logprobs(np.array(row), 2, chosen.token_id)


@given(rows, st.integers(0, 30))
def test_largest_ids_are_a_stable_sort_cut_off(row: list[float], num: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num]
    assert largest_ids(np.array(row), num).tolist() == sorted(expected)


@given(st.lists(rows.filter(lambda row: len(row) >= 4).map(lambda row: row[:4]), min_size=1))
def test_scores_are_the_naive_teacher_forced_ones(batch: list[list[float]]) -> None:
    token_ids = [i % 4 for i in range(len(batch))]
    row_ids = list(reversed(range(len(batch))))
    scores = score_rows(Logits(batch), row_ids, token_ids)
    for score, row_id, token_id in zip(scores, row_ids, token_ids, strict=True):
        expected = naive_logprobs(batch[row_id])
        top, second = sorted(range(4), key=lambda i: (-expected[i], i))[:2]
        assert (score.token_id, score.top_token_id) == (token_id, top)
        assert [score.logprob, score.top_logprob, score.second_logprob] == pytest.approx(
            [expected[token_id], expected[top], expected[second]],
            abs=1e-12,  # four terms summed in another order
        )


# Broken rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_an_error(bad: float) -> None:
    logits = Logits([[0.0, bad, 1.0]])
    with pytest.raises(NonFiniteLogitsError, match=r"1 of the 3 logits of row 0 .* of token 1"):
        sample(logits, [request(SamplingParams())])
    with pytest.raises(NonFiniteLogitsError):
        score_rows(logits, [0], [0])
