"""Everything a request carries, all at once, under everything that can happen to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_trials import FEATURES, compare, random_trial

pytest.importorskip("xgrammar")


@given(seed=st.integers(0, 2**32))
def test_all_features_together_are_what_they_are_undisturbed(seed: int) -> None:
    assert compare(random_trial(seed))[0] == []


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone_is_what_it_is_undisturbed(feature: str) -> None:
    num_preemptions = 0
    for seed in range(30):
        problems, count = compare(random_trial(seed, [feature]))
        assert problems == []
        num_preemptions += count
    assert num_preemptions > 0
