"""The embedded engine's ranks in a trial: clean ones agree, and one that differs is named."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.worker_faults import send_all_ids
from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.checks import Code
from preempt_harness.checks.kvsan import check_kvsan
from preempt_harness.checks.trace import Trace
from preempt_harness.checks.work import check_bytes
from preempt_harness.record import (
    BlocksPoisoned,
    Computed,
    EngineError,
    Preempted,
    StepSent,
    TrialRecord,
)
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload


def workload() -> Workload:
    """Four requests of which a pool of ten blocks holds two."""
    rng = random.Random(1)
    requests = [
        RequestSpec(
            id=f"r{index}",
            prompt_token_ids=[rng.randrange(1, 64) for _ in range(7 + index)],
            sampling=SamplingSpec(max_tokens=14, ignore_eos=True),
        )
        for index in range(4)
    ]
    return Workload(requests=requests)


def settings_of(*hooks: str, **changes: Any) -> EngineSettings:
    """Two ranks. Without a prefix cache freed blocks are free at once, and poisoned."""
    options: dict[str, Any] = {"poison": True}
    if hooks:
        options["worker_hooks"] = [f"benchmarks.worker_faults:{hook}" for hook in hooks]
    settings = {
        "num_blocks": 10,
        "block_size": 4,
        "max_num_batched_tokens": 9,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "options": options,
    }
    return EngineSettings(**(settings | changes))


def run(*hooks: str, **changes: Any) -> TrialRecord:
    adapter = EmbeddedAdapter()
    trial = Trial(engine=adapter.name, settings=settings_of(*hooks, **changes), workload=workload())
    record = run_trial(trial, adapter)
    adapter.close_kept()
    return record


def test_clean_ranks_agree_although_each_poisons_its_own_blocks() -> None:
    """Poisoning of rank 1 is reported between the rows of rank 0 and its own."""
    record = run()
    for event_type in (BlocksPoisoned, Computed, StepSent):
        ranks = {event.rank for event in record.events if isinstance(event, event_type)}
        assert ranks == {0, 1}, event_type
    assert any(isinstance(event, Preempted) for event in record.events)
    assert check_kvsan(record).findings == ()
    assert check_bytes(Trace(record)).findings == ()


def test_a_rank_that_differs_is_found_in_what_it_computed() -> None:
    found = check_kvsan(run("exchanged_blocks:1 4")).findings
    assert Code.KVSAN_RANKS_DISAGREE in {finding.code for finding in found}
    assert {finding.rank for finding in found} == {1}


@pytest.mark.parametrize("hook", ["lost_block:1 4", "late_frees:1 3"], ids=["lost", "late"])
def test_a_rank_that_cannot_go_on_is_named_by_the_trial(hook: str) -> None:
    """It lacks a block of a table, or forgets a sequence that has come back in the meantime."""
    (error,) = [event for event in run(hook).events if isinstance(event, EngineError)]
    assert error.kind == "WorkerFailedError"
    assert error.message.startswith("Rank 1 raised")


def test_a_block_size_that_only_rank_0_knows_is_found() -> None:
    """The pool is large enough for wrong slots to lie inside it; otherwise the rank crashes."""
    found = check_kvsan(run("default_block_size:1", num_blocks=200)).findings
    assert found
    assert {finding.rank for finding in found} == {1}


def test_ids_left_out_on_resume_end_the_trial_with_the_ranks_own_words() -> None:
    """nano-vllm pull requests 103, 144, 145."""
    (error,) = [e for e in run("no_ids_on_resume").events if isinstance(e, EngineError)]
    assert error.kind == "WorkerFailedError"
    assert "the worker knows 0 tokens" in error.message
    assert "Traceback of rank" in error.traceback


def test_ids_in_every_step_are_found_by_the_size_of_messages() -> None:
    """The first remedy of the same: right, and too costly."""
    adapter = EmbeddedAdapter()

    def open_session(settings: EngineSettings) -> EmbeddedSession:
        session = adapter.open(settings)
        send_all_ids(session.llm)
        return session

    trial = Trial(engine=adapter.name, settings=settings_of(), workload=workload())
    record = run_trial(trial, adapter, open_session=open_session)
    adapter.close_kept()
    assert check_kvsan(record).findings == ()
    found = check_bytes(Trace(record)).findings
    assert {(finding.code, finding.rank) for finding in found} == {
        (Code.WORK_BYTES, 0),
        (Code.WORK_BYTES, 1),
    }
