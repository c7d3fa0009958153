"""Searching from a test: the limits, and what a failure leaves behind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.explore import replay_file
from preempt_harness.explore.search import Failure, SearchOutcome, TrialRunner
from preempt_harness.explore.shrink import shrink
from preempt_harness.explore.strategy import SearchTask, find_strategy
from preempt_harness.result import PreemptionAssertionError, describe

FAILURES = "preempt-failures"
"""Folder, below pytest's root, for replay files."""

_EXAMPLES = 100
_LISTED = 3  # findings in a failure's text


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """How a test searches.

    Attributes:
        strategy: name of a search strategy.
        examples: trials to run; None is 100.
        time_s: most processor seconds; None sets no limit.
        directory: where a failure's replay file is written; None writes none.
    """

    strategy: str = "random"
    examples: int | None = None
    time_s: float | None = None
    directory: Path | None = None

    def with_values(self, values: Mapping[str, Any]) -> Exploration:
        """The same with some values changed; None changes nothing."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def run(self, runner: TrialRunner, settings: EngineSettings, test: str) -> SearchOutcome:
        """Search, shrink what fails, and write it down.

        Args:
            runner: of the engine.
            settings: for model and seed.
            test: node id, to name the file.

        Raises:
            PreemptionAssertionError: a trial failed.
        """
        task = SearchTask(
            model=settings.model,
            seed=settings.seed,
            max_trials=self.examples or _EXAMPLES,
            max_cpu_s=self.time_s,
        )
        outcome = find_strategy(self.strategy).explore(runner, task)
        if outcome.failure is None:
            return outcome
        small = shrink(outcome.failure, runner)
        raise PreemptionAssertionError(self._text(outcome, small, test))

    def _text(self, outcome: SearchOutcome, small: Failure, test: str) -> str:
        findings = [describe(finding) for finding in small.result.findings[:_LISTED]]
        lines = [
            f"{small.codes[0]} [engine {small.trial.engine}, strategy {self.strategy}, trial "
            f"{outcome.num_trials}], shrunk to {small.num_requests} requests and "
            f"{small.num_preemptions} preemptions",
            *(f"  {line}" for line in findings or [small.message]),
            f"  plan: {small.trial.plan or 'none'}",
        ]
        if self.directory is not None:
            path = self.directory / f"{_file_name(test)}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            replay_file.write(small, path)
            lines.append(f"  replay: preempt-harness replay {path}")
        return "\n".join(lines)


def _file_name(test: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", test).strip("-") or "search"
