"""The protocol of search strategies, and their names. One strategy per module."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from preempt_harness.errors import HarnessError
from preempt_harness.explore.search import SearchOutcome, TrialRunner


class UnknownStrategyError(HarnessError, ValueError):
    """No strategy has that name."""


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """What a strategy is asked to do.

    Attributes:
        model: name of the model.
        seed: of everything drawn.
        max_trials: stop after so many; None leaves it to the strategy, if it ends by itself.
        max_cpu_s: stop after so many processor seconds; None sets no limit.
    """

    model: str = "exact"
    seed: int = 0
    max_trials: int | None = None
    max_cpu_s: float | None = None


class Strategy(Protocol):
    """Where trials come from. The same task gives the same trials."""

    name: str

    def explore(self, runner: TrialRunner, task: SearchTask) -> SearchOutcome:
        """Run trials until one fails, all are done, or a limit is reached."""
        ...


STRATEGIES: Mapping[str, str] = {
    "random": "preempt_harness.explore.random_trials:RandomTrials",
    "swarm": "preempt_harness.explore.swarm:Swarm",
    "exhaustive": "preempt_harness.explore.exhaustive:Exhaustive",
    "stateful": "preempt_harness.explore.stateful:Stateful",
    "replay": "preempt_harness.explore.replay_file:Replay",
}


def find_strategy(name: str, **arguments: Any) -> Strategy:
    """The strategy of that name.

    Args:
        name: of `STRATEGIES`.
        **arguments: of its constructor.

    Raises:
        UnknownStrategyError: there is none.
    """
    if name not in STRATEGIES:
        raise UnknownStrategyError(
            f"Strategy {name!r} is unknown.", f"Choose one of {', '.join(STRATEGIES)}."
        )
    module, _, attribute = STRATEGIES[name].partition(":")
    made: Strategy = getattr(importlib.import_module(module), attribute)(**arguments)
    return made
