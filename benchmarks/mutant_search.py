"""The generic search as a test, for `benchmarks.mutation`: a fixed seed, and nothing is found."""

from __future__ import annotations

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.explore.search import TrialRunner
from preempt_harness.explore.strategy import SearchTask, find_strategy

_TRIALS = 600


def test_the_search_finds_nothing() -> None:
    runner = TrialRunner(EmbeddedAdapter())
    outcome = find_strategy("random").explore(runner, SearchTask(max_trials=_TRIALS))
    assert outcome.failure is None
