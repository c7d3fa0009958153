"""Trials per second on other people's schedulers: with all checks, beside a bare loop.

    python -m benchmarks.scheduler_speed nano-vllm-scheduler [--trials N] [--repeats N]

Run it where the engine is installed. The same trials, without plans and operations, are run three
ways in turn: bare, as a loop of the engine's scheduler and the exact workers that keeps nothing but
the outputs; recorded; and with the record checked. CPU time, the opening of the engine included.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from unittest.mock import patch

from benchmarks.measure import machine, median_ratio, paired, print_table
from benchmarks.scheduler_campaign import drawn_trial
from preempt_harness.adapters import nano_vllm_watch
from preempt_harness.adapters.exact_workers import ExactWorkers
from preempt_harness.adapters.nano_vllm_session import NanoVllmSession
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.adapters.registry import AdapterRegistry
from preempt_harness.adapters.scheduler_log import Log
from preempt_harness.adapters.vllm_session import VllmSession
from preempt_harness.checks import run_checks
from preempt_harness.record import AnyEvent, Preempted, StepLaunched
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec


class _NoLog(Log):
    """Knows who has ended and how many tokens they got; makes no event."""

    def arrived(self, spec: RequestSpec) -> None:
        super().arrived(spec)
        self.take()

    def add(self, event: AnyEvent) -> None: ...

    def holds(self, name: str, table: Sequence[int], num_cached: int = 0) -> None: ...

    def freed(self, name: str, blocks: Sequence[int]) -> None: ...

    def preempted(self, name: str, reason: str, num_computed: int, num_tokens: int) -> None: ...

    def scheduled(self, name: str, start: int, end: int, num_tokens: int) -> None: ...

    def launched(self) -> None: ...

    def delivered(self, name: str, token_ids: Sequence[int]) -> None:
        self.tracks[name].num_delivered += len(token_ids)

    def finished(self, name: str, reason: str) -> None:
        self.tracks[name].finish_reason = reason


@contextmanager
def nothing_recorded() -> Iterator[None]:
    """Sessions of both adapters listen to nothing and record nothing meanwhile."""
    with ExitStack() as stack:
        for session in (NanoVllmSession, VllmSession):
            stack.enter_context(patch.object(session, "_record_pool", _nothing))
            stack.enter_context(patch(f"{session.__module__}.Log", _NoLog))
        stack.enter_context(patch.object(nano_vllm_watch.SchedulerWatch, "_listen", _nothing))
        stack.enter_context(patch("preempt_harness.adapters.vllm_watch.wrap", _nothing))
        stack.enter_context(patch.object(ExactWorkers, "_computed", _nothing))
        yield


def _nothing(*arguments: object) -> None: ...


def bare(trial: Trial, adapter: EngineAdapter) -> None:
    """The loop alone."""
    session = adapter.open(trial.settings)
    requests = deque(sorted(trial.workload.requests, key=lambda item: item.arrival_step))
    step = 0
    while requests or session.unfinished():
        while requests and requests[0].arrival_step <= step:
            session.submit(requests.popleft())
        session.poll(0)
        step += 1
    session.results()
    session.close()


def recorded(trial: Trial, adapter: EngineAdapter) -> None:
    """As a trial of the harness."""
    run_trial(trial, adapter)


def checked(trial: Trial, adapter: EngineAdapter) -> None:
    """With every check."""
    run_checks(run_trial(trial, adapter))


def sound_trials(adapter: EngineAdapter, count: int) -> list[Trial]:
    """Trials from seed 0 on that the engine gets through, with nothing in them but requests."""
    trials: list[Trial] = []
    seed = 0
    while len(trials) < count:
        drawn = drawn_trial(seed, adapter, clean=False)
        seed += 1
        drawn.workload.operations.clear()
        trial = Trial(engine=drawn.engine, settings=drawn.settings, workload=drawn.workload)
        if not run_checks(run_trial(trial, adapter)).findings:
            trials.append(trial)
    return trials


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["nano-vllm-scheduler", "vllm-scheduler"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    adapter = AdapterRegistry().get(given.engine)
    missing = adapter.missing()
    if missing:
        print(f"engine {given.engine} cannot be used here: {missing}", file=sys.stderr)
        return 2
    print(machine())
    trials = sound_trials(adapter, given.trials)
    records = [run_trial(trial, adapter) for trial in trials]
    events = [event for record in records for event in record.events]
    num_steps = sum(isinstance(event, StepLaunched) for event in events)
    num_preemptions = sum(isinstance(event, Preempted) for event in events)
    print(f"{len(trials)} trials, {num_steps} steps, {num_preemptions} preemptions")
    ways = {
        way.__name__: partial(seconds, way, trials, adapter) for way in (bare, recorded, checked)
    }
    figures = paired(ways, given.repeats)
    report(figures, len(trials), num_steps)
    return 0


def seconds(
    way: Callable[[Trial, EngineAdapter], None], trials: Sequence[Trial], adapter: EngineAdapter
) -> float:
    """CPU seconds of all trials."""
    gc.collect()
    with nothing_recorded() if way is bare else ExitStack():
        started = time.process_time()
        for trial in trials:
            way(trial, adapter)
        return time.process_time() - started


def report(figures: Mapping[str, Sequence[float]], num_trials: int, num_steps: int) -> None:
    """Speed of each way, and its ratio to the bare loop."""
    rows = [
        [
            name,
            f"{num_trials / median(of_way):.0f}",
            f"{num_steps / median(of_way):.0f}",
            f"{median_ratio(figures['bare'], of_way):.2f}",
        ]
        for name, of_way in figures.items()
    ]
    print_table(["", "trials/s", "steps/s", "speed to bare"], rows)


if __name__ == "__main__":
    sys.exit(main())
