"""Tensor-parallel engines are kept between trials, and a kept one is as good as a new one."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from test_embedded_ranks import settings_of, workload

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings, KeepsEngines
from preempt_harness.record import TrialRecord
from preempt_harness.trial import Trial, run_trial


@pytest.fixture
def adapter() -> Iterator[EmbeddedAdapter]:
    adapter = EmbeddedAdapter()
    yield adapter
    adapter.close_kept()
    assert not adapter.kept_process_ids()


def run(adapter: EmbeddedAdapter, settings: EngineSettings) -> TrialRecord:
    trial = Trial(engine=adapter.name, settings=settings, workload=workload())
    return run_trial(trial, adapter)


def test_trials_of_other_pools_and_budgets_share_workers(adapter: EmbeddedAdapter) -> None:
    assert isinstance(adapter, KeepsEngines)
    variants = [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 5}, {"seed": 4}, {}]
    settings = [settings_of(**variant) for variant in variants]
    records = [run(adapter, each) for each in settings]
    processes = adapter.kept_process_ids()
    assert len(processes) == 2
    assert [record.header.num_blocks for record in records] == [10, 12, 10, 10, 10]
    assert records[0].digest() == records[-1].digest()
    for each, record in zip(settings, records, strict=True):
        fresh = EmbeddedAdapter()
        assert run(fresh, each).digest() == record.digest()
        fresh.close_kept()
    assert adapter.kept_process_ids() == processes


def test_another_block_size_takes_other_workers(adapter: EmbeddedAdapter) -> None:
    run(adapter, settings_of())
    first = adapter.kept_process_ids()
    run(adapter, settings_of(block_size=2, num_blocks=20))
    assert len(adapter.kept_process_ids() - first) == 2
    for block_size in (1, 3, 8):
        run(adapter, settings_of(block_size=block_size, num_blocks=60 // block_size))
    assert len(adapter.kept_process_ids()) == 8
    assert not first & adapter.kept_process_ids()
    assert not any(psutil.pid_exists(pid) for pid in first)


def test_an_engine_with_hooks_or_with_a_dead_worker_is_not_kept(adapter: EmbeddedAdapter) -> None:
    run(adapter, settings_of("slow_steps:0"))
    assert not adapter.kept_process_ids()
    session = adapter.open(settings_of())
    (first, _) = session.llm.worker_process_ids
    psutil.Process(first).kill()
    session.close()
    assert not adapter.kept_process_ids()


def test_a_session_that_is_closed_in_the_middle_keeps_no_engine(adapter: EmbeddedAdapter) -> None:
    session = adapter.open(settings_of())
    session.submit(workload().requests[0])
    session.poll(1.0)
    session.close()
    assert not adapter.kept_process_ids()
