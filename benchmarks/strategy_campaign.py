"""Every search strategy on the clean engine: how fast it is, and how often it cries wolf.

    python -m benchmarks.strategy_campaign [--trials 2000] [--seed 0] [--processes 2]

Each trial is run beside its unpreempted baseline, and all checks look at both; any finding is a
false alarm, or a bug of the engine. The exhaustive strategy ends by itself: every place of three
requests, then every pair of places, in both modes. With several processes each takes a seed of its
own. Exits 1 with the trial's description when anything is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.measure import machine, print_table
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.explore.exhaustive import Exhaustive
from preempt_harness.explore.search import SearchOutcome, TrialRunner
from preempt_harness.explore.strategy import SearchTask, find_strategy

ALL = ("random", "swarm", "stateful", "exhaustive")


@dataclass(frozen=True)
class Share:
    """What one process does."""

    strategy: str
    seed: int
    num_trials: int


@dataclass(frozen=True)
class Report:
    """What one process found; plain, so that it can be sent."""

    num_trials: int
    num_steps: int
    num_preemptions: int
    bound: str
    failure: str


def run(share: Share) -> Report:
    """Search with one strategy and one seed."""
    runner = TrialRunner(EmbeddedAdapter())
    if share.strategy == "exhaustive":
        exhaustive = Exhaustive()
        outcome = exhaustive.explore(runner, SearchTask(seed=share.seed))
        return _report(outcome, str(exhaustive.bound))
    task = SearchTask(seed=share.seed, max_trials=share.num_trials)
    return _report(find_strategy(share.strategy).explore(runner, task), "")


def _report(outcome: SearchOutcome, bound: str) -> Report:
    failure = outcome.failure
    return Report(
        outcome.num_trials,
        outcome.num_steps,
        outcome.num_preemptions,
        bound,
        "" if failure is None else f"{failure.message}\n{failure.trial}",
    )


def row(strategy: str, reports: Sequence[Report], seconds: float) -> list[str]:
    """Sums over the processes."""
    trials = sum(report.num_trials for report in reports)
    return [
        strategy,
        str(trials),
        str(sum(report.num_steps for report in reports)),
        str(sum(report.num_preemptions for report in reports)),
        f"{seconds:.1f}",
        f"{trials / seconds:.0f}",
    ]


def main() -> int:
    """Print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000, help="of each endless strategy")
    parser.add_argument("--seed", type=int, default=0, help="of the first process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--strategies", nargs="+", choices=ALL, default=ALL)
    arguments = parser.parse_args()
    print(f"{machine()}; {arguments.processes} processes")
    rows, reports = [], []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for strategy in arguments.strategies:
            each = arguments.trials // arguments.processes
            shares = [
                Share(strategy, arguments.seed + index, each)
                for index in range(arguments.processes)
            ]
            started = time.perf_counter()
            found = list(pool.map(run, shares))
            rows.append(row(strategy, found, time.perf_counter() - started))
            reports += found
    print_table(["strategy", "trials", "steps", "preemptions", "seconds", "trials/s"], rows)
    for report in reports:
        if report.bound:
            print(report.bound)
        if report.failure:
            print(report.failure, file=sys.stderr)
    return 1 if any(report.failure for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
