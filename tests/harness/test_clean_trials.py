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


@pytest.mark.parametrize(
    "seed",
    [
        10_071_757,  # two victims, one recomputed and one swapped out; the latter could come back
        10_079_104,  # a newcomer that lacked places, and not blocks
        10_023_276,  # a newcomer for whom the token budget left nothing
        11_097_258,  # who was to get a victim's blocks is a victim itself in the next step
        10_065_637,  # a victim that becomes the most urgent in the next step
        10_003_443,  # a squeeze in which half of the steps compute nothing
        10_009_173,  # a squeeze while steps are decided ahead
        10_032_747,  # a block that its last holder gets again, and poison on the way
        10_073_244,  # blocks told a step late
        10_085_457,  # an end before any token is chosen
    ],
)
def test_trials_that_once_were_not(seed: int) -> None:
    counts = campaign_checks(1, seed, "exact")
    assert [name for name in counts if name.startswith("BAD")] == []
    assert counts["verdict EQUAL"] == 1


def test_harmless_permutations_are_clean() -> None:
    counts = campaign_clean(TRIALS, 0, "exact")
    assert [name for name in counts if name.startswith("BAD")] == []
    assert counts["verdict EQUAL"] == counts["trials"] == TRIALS
