"""Noise is a pure function of its key, and the same on every machine and in every release."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import preempt_engine
from preempt_engine.sampling.noise import (
    TOKEN_CHOICE,
    derive_seed,
    gumbel,
    uniform_noise,
)

IMPORT_ROOT = str(Path(preempt_engine.__file__).parents[1])

Key = tuple[int, int, int, str]

keys = st.tuples(
    st.integers(-(2**70), 2**70),
    st.integers(0, 8),
    st.integers(0, 2**32),
    st.sampled_from([TOKEN_CHOICE, "draft", "1:token"]),
)


@given(st.lists(keys, min_size=1, max_size=8))
def test_noise_does_not_depend_on_what_was_drawn_before(drawn: list[Key]) -> None:
    forwards = {key: uniform_noise(*key, 5).tolist() for key in drawn}
    backwards = {key: uniform_noise(*key, 5).tolist() for key in reversed(drawn)}
    assert forwards == backwards


@given(keys, keys)
def test_two_keys_share_their_noise_exactly_when_they_are_equal(first: Key, second: Key) -> None:
    same = np.array_equal(uniform_noise(*first, 4), uniform_noise(*second, 4))
    assert same == (first == second)


@given(keys, st.integers(0, 300), st.integers(0, 300))
def test_a_shorter_draw_is_a_prefix_of_a_longer_one(key: Key, short: int, more: int) -> None:
    assert np.array_equal(uniform_noise(*key, short), uniform_noise(*key, short + more)[:short])


@given(keys)
def test_uniform_noise_is_open_at_both_ends_and_gumbel_noise_finite(key: Key) -> None:
    uniform = uniform_noise(*key, 1000)
    assert ((uniform > 0) & (uniform < 1)).all()
    noise = gumbel(uniform)
    # The ends: -log(53 log 2) = -3.60 at u = 2**-53, and 53 log 2 = 36.7 at u = 1 - 2**-53.
    assert ((noise > -3.7) & (noise < 36.8)).all()


def test_uniform_noise_keeps_its_pinned_values() -> None:
    assert uniform_noise(0, 0, 0, TOKEN_CHOICE, 3).tolist() == [
        0.8803827157919272,
        0.6012374089768241,
        0.66567962895066,
    ]
    assert uniform_noise(-7, 2, 10**6, TOKEN_CHOICE, 2).tolist() == [
        0.40283220411027265,
        0.05061474748662709,
    ]


def test_gumbel_noise_is_twice_the_negative_logarithm() -> None:
    uniform = uniform_noise(3, 1, 4, TOKEN_CHOICE, 100)
    expected = [-math.log(-math.log(u)) for u in uniform]
    # An ulp of the inner logarithm shifts the outer one by an epsilon, whose own ulp comes on top;
    # libraries differ by an ulp or two.
    epsilon = sys.float_info.epsilon
    assert gumbel(uniform).tolist() == pytest.approx(expected, rel=4 * epsilon, abs=4 * epsilon)


def test_derived_seeds_keep_their_pinned_values() -> None:
    seeds = [derive_seed(0, 0), derive_seed(1, 0), derive_seed(0, 1)]
    assert seeds == [14310878894892020734, 6825217264674490466, 10388568585972377239]


def test_noise_is_the_same_in_another_process() -> None:
    code = (
        "from preempt_engine.sampling.noise import uniform_noise, derive_seed\n"
        "print(uniform_noise(derive_seed(5, 6), 1, 2, 'token', 3).tolist())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": IMPORT_ROOT, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == str(
        uniform_noise(derive_seed(5, 6), 1, 2, TOKEN_CHOICE, 3).tolist()
    )


def test_uniform_noise_fills_its_cells_evenly() -> None:
    """Pearson's statistic over 64 cells of 40,000 draws from 400 keys."""
    draws = np.concatenate([uniform_noise(1, 0, i, TOKEN_CHOICE, 100) for i in range(400)])
    observed = np.bincount((draws * 64).astype(int), minlength=64)
    expected = draws.size / 64
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # A chi-square variable of d degrees exceeds d + 2 sqrt(d x) + 2 x with probability below
    # exp(-x): Laurent and Massart, "Adaptive estimation of a quadratic functional by model
    # selection", Annals of Statistics 28 (2000), lemma 1. Here one in a million, and for good:
    # the draws are fixed.
    degrees, x = 63, math.log(1e6)
    assert statistic < degrees + 2 * math.sqrt(degrees * x) + 2 * x
