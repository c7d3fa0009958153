"""Random trials of the clean engine through every check: no finding, and equal outputs.

A sample; `python -m benchmarks.campaign checks` runs as many as one likes.
"""

from __future__ import annotations

import pytest

from benchmarks.campaign import campaign_checks, campaign_clean

TRIALS = 60


@pytest.mark.parametrize("first_seed", [0, 1_000, 2_000])
def test_preempted_trials_are_clean(first_seed: int) -> None:
    counts = campaign_checks(TRIALS, first_seed, "exact")
    assert [name for name in counts if name.startswith("BAD")] == []
    assert counts["verdict EQUAL"] == counts["trials"] == TRIALS
    assert counts["preemptions"] > TRIALS / 2


def test_harmless_permutations_are_clean() -> None:
    counts = campaign_clean(TRIALS, 0, "exact")
    assert [name for name in counts if name.startswith("BAD")] == []
    assert counts["verdict EQUAL"] == counts["trials"] == TRIALS
