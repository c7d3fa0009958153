"""Strategies find, shrinking keeps what was found, files bring it back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.embedded_pool import EnginePool
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.explore import replay_file
from preempt_harness.explore.exhaustive import Exhaustive, places
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.explore.search import Failure, TrialRunner, search
from preempt_harness.explore.shrink import shrink, size_of
from preempt_harness.explore.strategy import (
    STRATEGIES,
    SearchTask,
    UnknownStrategyError,
    find_strategy,
)
from preempt_harness.explore.watchdog import watched
from preempt_harness.faults import fault_named, plant
from preempt_harness.plan import PreemptionPlan, Squeeze
from preempt_harness.record import AnyEvent
from preempt_harness.replay import ReplayError
from preempt_harness.trial import Trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

DRAWING = [name for name in STRATEGIES if name != "replay"]
FAULT = "worker-keeps-its-table-on-resume"


def found(name: str = "random") -> Failure:
    """A failure that a strategy finds."""
    with plant(fault_named(FAULT)):
        outcome = find_strategy(name).explore(
            TrialRunner(EmbeddedAdapter()), SearchTask(max_trials=40)
        )
    assert outcome.failure is not None
    return outcome.failure


@pytest.mark.parametrize("name", DRAWING)
def test_a_strategy_finds_nothing_in_a_clean_engine(name: str) -> None:
    runner = TrialRunner(EmbeddedAdapter())
    outcome = find_strategy(name).explore(runner, SearchTask(max_trials=15))
    assert outcome.failure is None
    assert outcome.num_trials >= 5  # the stateful strategy drops what it cannot carry out
    assert outcome.num_preemptions >= 1


@pytest.mark.parametrize("name", DRAWING)
def test_a_strategy_finds_a_fault_and_the_same_one_again(name: str) -> None:
    failures = [found(name) for _ in range(2)]
    assert failures[0].trial == failures[1].trial
    assert failures[0].codes == failures[1].codes
    assert failures[0].codes


def test_another_seed_gives_other_trials() -> None:
    adapter = EmbeddedAdapter()
    assert random_trial(0, adapter, model="exact") != random_trial(1, adapter, model="exact")


def test_later_draws_come_in_addition_and_can_be_left_out() -> None:
    adapter = EmbeddedAdapter()
    pairs = [
        tuple(random_trial(seed, adapter, model="exact", later=later) for later in (True, False))
        for seed in range(60)
    ]
    assert any(drawn == plain for drawn, plain in pairs)
    samplings = [
        {name for name in ("regex", "stop", "bad_words") if getattr(request.sampling, name)}
        for trial in (drawn for drawn, _ in pairs)
        for request in trial.workload.requests
    ]
    assert {"regex", "stop", "bad_words"} == set().union(*samplings)
    assert any(drawn.settings.max_waiting_requests for drawn, _ in pairs)
    for _, plain in pairs:
        assert plain.settings.max_waiting_requests is None
        for request in plain.workload.requests:
            spec = request.sampling
            assert not any((spec.regex, spec.stop, spec.bad_words))
            assert spec.max_tokens >= 1


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(UnknownStrategyError, match="Choose one of random, swarm"):
        find_strategy("luck")


def test_a_search_keeps_its_limits() -> None:
    runner = TrialRunner(EmbeddedAdapter())
    trials = (random_trial(seed, runner.adapter, model="exact") for seed in itertools.count())
    assert search(trials, runner, max_trials=2).num_trials == 2
    assert search(trials, runner, max_cpu_s=0.0).num_trials == 0


def test_exhaustive_covers_every_place_and_every_pair() -> None:
    strategy = Exhaustive()
    runner = TrialRunner(EmbeddedAdapter())
    outcome = strategy.explore(runner, SearchTask())
    assert outcome.failure is None
    bound = strategy.bound
    assert bound.max_preemptions == 2
    assert outcome.num_trials == 1 + bound.num_single + bound.num_pairs
    single = Exhaustive(max_preemptions=1)
    plain = single.explore(runner, SearchTask())
    assert single.bound.num_single == bound.num_single
    assert plain.num_trials == 1 + bound.num_single
    assert "up to 2 forced preemptions" in str(bound)


def test_places_are_where_a_request_holds_blocks() -> None:
    adapter = EmbeddedAdapter()
    record = TrialRunner(adapter).judge(random_trial(0, adapter, model="exact")).record
    arrived = {event.request for event in record.events if type(event).__name__ == "Arrived"}
    found_places = places(record)
    assert found_places == sorted(set(found_places))
    assert {place.request for place in found_places} <= arrived


def test_shrinking_keeps_the_finding_and_makes_it_small() -> None:
    failure = found()
    with plant(fault_named(FAULT)):
        runner = TrialRunner(EmbeddedAdapter())
        small = shrink(failure, runner)
        again = shrink(failure, runner)
        repeated = runner.failure(small.trial)
    assert small.trial == again.trial
    assert repeated is not None
    assert repeated.codes == small.codes
    assert failure.codes[0] in small.codes
    assert size_of(small) <= size_of(failure)
    assert size_of(small).requests <= 2
    assert size_of(small).preemptions <= 2


def shrunk(fault: str, workload: Workload, **changes: Any) -> Failure:
    """A trial with a fault, shrunk."""
    settings = msgspec.structs.replace(
        EngineSettings(model="exact", num_blocks=40, block_size=2), **changes.pop("settings", {})
    )
    trial = Trial(engine="embedded", settings=settings, workload=workload, **changes)
    with plant(fault_named(fault)):
        runner = TrialRunner(EmbeddedAdapter())
        failure = runner.failure(trial)
        assert failure is not None
        return shrink(failure, runner)


def test_shrinking_gives_blocks_back_earlier() -> None:
    """A fault that evicts whoever waits for a token as long as no block is free."""
    workload = Workload(
        requests=[
            RequestSpec(id="r0", prompt_token_ids=[5, 6, 7], sampling=SamplingSpec(max_tokens=12))
        ]
    )
    small = shrunk(
        "blocks-taken-for-tokens-to-come",
        workload,
        plan="squeeze:all@3..30",
        settings={"async_scheduling": 2},
    )
    assert small.codes[0] == "WORK-PREEMPTIONS"
    (squeeze,) = PreemptionPlan.parse(small.trial.plan).actions
    assert isinstance(squeeze, Squeeze)
    assert squeeze.stop - squeeze.start <= 6
    assert size_of(small).preemptions <= 4


def test_shrinking_leaves_out_what_a_failure_does_not_need() -> None:
    workload = Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[5 + index] * 9,
                sampling=SamplingSpec(max_tokens=12),
                priority=index,
            )
            for index in range(3)
        ]
    )
    small = shrunk(
        FAULT,
        workload,
        settings={
            "num_blocks": 12,
            "scheduling_policy": "priority",
            "max_waiting_requests": 9,
            "options": {"poison": True, "block_reuse_order": "lifo"},
        },
    )
    assert small.trial.settings.scheduling_policy == "fcfs"
    assert small.trial.settings.max_waiting_requests is None
    assert small.trial.settings.options == {}
    assert not any(request.priority for request in small.trial.workload.requests)


@pytest.mark.parametrize("limit", ["max_trials", "max_cpu_s"])
def test_shrinking_stops_at_its_limits(limit: str) -> None:
    failure = found()
    with plant(fault_named(FAULT)):
        assert shrink(failure, TrialRunner(EmbeddedAdapter()), **{limit: 0}) is failure


def test_a_replay_file_brings_the_failure_back(tmp_path: Path) -> None:
    failure = found()
    path = tmp_path / "failure.json"
    replay_file.write(failure, path)
    content = replay_file.read(path)
    assert content.trial == failure.trial
    assert content.expected == failure.codes
    assert content.command == f"preempt-harness replay {path}"
    with plant(fault_named(FAULT)):
        outcome = find_strategy("replay", paths=[path]).explore(
            TrialRunner(EmbeddedAdapter()), SearchTask()
        )
    assert outcome.failure is not None
    assert outcome.failure.codes == failure.codes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is no JSON"),
        ("[]", "format version None"),
        ('{"preempt_replay": 0}', "format version 0; this release reads 1"),
        ('{"preempt_replay": 1}', "damaged replay file"),
    ],
)
def test_a_replay_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "failure.json"
    path.write_text(text)
    with pytest.raises(ReplayError, match=message):
        replay_file.read(path)
    with pytest.raises(ReplayError, match="cannot be read"):
        replay_file.read(tmp_path / "missing.json")


class _Forever(EmbeddedSession):
    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        while True:
            pass


def test_a_step_that_never_returns_is_a_hang() -> None:
    class Adapter(EmbeddedAdapter):
        def open(self, settings: EngineSettings) -> EmbeddedSession:
            return _Forever(settings, EnginePool())

    adapter = Adapter()
    runner = TrialRunner(adapter, open_session=watched(adapter, cpu_s=0.1))
    failure = runner.failure(_plain(random_trial(0, adapter, model="exact")))
    assert failure is not None
    assert "CRASH-HANG" in failure.codes


def test_records_that_differ_are_flaky() -> None:
    adapter = EmbeddedAdapter()
    flip = itertools.cycle((False, True, True))  # trial, baseline, the trial again

    def open_session(settings: EngineSettings) -> EmbeddedSession:
        changed = msgspec.structs.replace(settings, enable_prefix_caching=next(flip))
        return adapter.open(changed)

    trial = _plain(random_trial(0, adapter, model="exact"))
    runner = TrialRunner(adapter, open_session=open_session, repeat=True)
    failure = runner.failure(trial)
    assert failure is not None
    assert "FLAKY" in failure.codes
    assert TrialRunner(adapter, repeat=True).failure(trial) is None


def _plain(trial: Trial) -> Trial:
    return msgspec.structs.replace(trial, plan="")
