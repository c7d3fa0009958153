"""Strategy "exhaustive": every place where a request can be preempted, then every pair of places.

A place is (step, request): before that step the running request loses its blocks. Places are read
off records, not guessed: the single ones off the unpreempted run, and the second ones of a pair off
the run with the first, since a preemption moves everything after it. Few preemptions are enough to
find what preemption breaks (iterative context bounding: Musuvathi and Qadeer, PLDI 2007).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.checks.finding import request_of
from preempt_harness.checks.tables import SchedulerTables
from preempt_harness.explore.search import Failure, SearchOutcome, TrialRunner, search
from preempt_harness.explore.strategy import SearchTask
from preempt_harness.generators import bystander
from preempt_harness.plan import MODES, Mode, Preempt, PreemptionPlan, Step
from preempt_harness.record import BlocksAllocated, BlocksFreed, Forked, TrialRecord
from preempt_harness.result import TrialResult
from preempt_harness.trial import Trial
from preempt_harness.workload import Workload

BLOCK_SIZE = 4


@dataclass(frozen=True, order=True)
class Place:
    """Before step `step`, `request` runs and can be preempted."""

    step: int
    request: str


@dataclass(kw_only=True)
class Bound:
    """What an exhaustive run has covered.

    Attributes:
        num_single: schedules with one preemption.
        num_pairs: schedules with two.
        max_preemptions: all schedules with so many forced preemptions were run.
    """

    num_single: int = 0
    num_pairs: int = 0
    max_preemptions: int = 0

    def __str__(self) -> str:
        return (
            f"every schedule with up to {self.max_preemptions} forced preemptions: "
            f"{self.num_single} with one, {self.num_pairs} with two"
        )


@dataclass
class Exhaustive:
    """All schedules of one workload.

    Args:
        workload: None takes three requests of about three blocks each.
        settings: None takes blocks of 4 tokens and prefix caching; the block count is replaced by
            one with room, unless `num_blocks` is given.
        num_blocks: of the pool.
        max_preemptions: 1, or 2 for pairs too.

    Attributes:
        bound: what the last `explore` covered.
    """

    workload: Workload | None = None
    settings: EngineSettings | None = None
    num_blocks: int | None = None
    max_preemptions: int = 2
    bound: Bound = field(default_factory=Bound)

    name = "exhaustive"

    def explore(self, runner: TrialRunner, task: SearchTask) -> SearchOutcome:
        """Run the unpreempted trial, then single places, then pairs."""
        self.bound = Bound()
        plain = self._plain(runner.adapter, task)
        recorder = _Recorder(runner)
        return search(
            self._schedules(plain, recorder),
            recorder,
            max_trials=task.max_trials,
            max_cpu_s=task.max_cpu_s,
        )

    def _plain(self, adapter: EngineAdapter, task: SearchTask) -> Trial:
        settings = self.settings or EngineSettings(
            model=task.model, num_blocks=1, block_size=BLOCK_SIZE, seed=task.seed
        )
        workload = self.workload or small_workload(
            adapter.vocab_size(settings), settings.block_size, task.seed
        )
        admission = adapter.admission_model(settings)
        blocks = self.num_blocks or KVBudget.roomy(workload, admission).num_blocks
        return Trial(
            engine=adapter.name,
            settings=msgspec.structs.replace(settings, num_blocks=blocks),
            workload=workload,
        )

    def _schedules(self, plain: Trial, recorder: _Recorder) -> Iterator[Trial]:
        modes = [mode for mode in MODES if mode in recorder.adapter.capabilities]
        if protocol.PREEMPT not in recorder.adapter.capabilities:
            modes = []
        yield plain
        first = places(recorder.last_record())
        followers: dict[tuple[Place, Mode], list[Place]] = {}
        for place in first:
            for mode in modes:
                yield _with(plain, [(place, mode)])
                self.bound.num_single += 1
                followers[place, mode] = [
                    other for other in places(recorder.last_record()) if other > place
                ]
        self.bound.max_preemptions = 1
        if self.max_preemptions < 2:
            return
        for (place, mode), others in followers.items():
            for other in others:
                for second in modes:
                    yield _with(plain, [(place, mode), (other, second)])
                    self.bound.num_pairs += 1
        self.bound.max_preemptions = 2


class _Recorder(TrialRunner):
    """A runner that lets a strategy look at what the last trial did."""

    def __init__(self, runner: TrialRunner) -> None:
        self.adapter = runner.adapter
        self._runner = runner
        self._last: TrialRecord | None = None

    def judge(self, trial: Trial) -> TrialResult:
        result = self._runner.judge(trial)
        self._last = result.record
        return result

    def failure_of(self, result: TrialResult) -> Failure | None:
        return self._runner.failure_of(result)

    def last_record(self) -> TrialRecord:
        """Of the trial that was judged last."""
        assert self._last is not None, "no trial was run yet"
        return self._last


def small_workload(vocab_size: int, block_size: int, seed: int) -> Workload:
    """Three requests of about three blocks each, the third arriving later."""
    return bystander(
        vocab_size=vocab_size,
        block_size=block_size,
        seed=seed,
        max_tokens=block_size + 1,
        arrival_step=2,
    )


def places(record: TrialRecord) -> list[Place]:
    """Where a request held blocks when a step began, in order."""
    tables = SchedulerTables()
    found: dict[Place, None] = {}
    step = 0
    for event in record.events:
        while step < event.step:
            step += 1
            found.update(dict.fromkeys(Place(step, request_of(seq)) for seq in tables.leases))
        if isinstance(event, BlocksAllocated):
            tables.allocate(event)
        elif isinstance(event, BlocksFreed):
            tables.free(event)
        elif isinstance(event, Forked):
            tables.fork(event)
    return sorted(found)


def _with(plain: Trial, chosen: list[tuple[Place, Mode]]) -> Trial:
    plan = PreemptionPlan(Preempt(place.request, Step(place.step), mode) for place, mode in chosen)
    return msgspec.structs.replace(plain, plan=plan.encode())
