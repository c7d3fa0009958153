"""Ranks in the driver's process do and say what ranks in processes do and say."""

from __future__ import annotations

import msgspec
import psutil
import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.config import EngineConfig
from preempt_engine.errors import (
    ConfigError,
    EngineClosedError,
    WorkerFailedError,
    WorkerStateDriftError,
)
from preempt_engine.executor.rank import Rank
from preempt_engine.executor.wire import Frame, MessageKind
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.trial import Trial, run_trial

_FAULTS = "benchmarks.worker_faults"
_PROMPTS = [[index + 1] * (5 + index) for index in range(6)]


def make_llm(*hooks: str, **options: object) -> LLM:
    """Two exact ranks with a pool in which requests preempt each other."""
    settings: dict[str, object] = {
        "tensor_parallel_size": 2,
        "worker_processes": False,
        "num_kv_blocks": 10,
        "block_size": 4,
        "worker_hooks": tuple(f"{_FAULTS}:{hook}" for hook in hooks),
        **options,
    }
    return LLM("exact", **settings)


def generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm.generate(_PROMPTS, params, use_tqdm=False)


def drawn_with_ranks(count: int, *, processes: bool) -> list[Trial]:
    """Drawn trials on two ranks, with whatever else they have."""
    adapter = EmbeddedAdapter()
    trials = []
    for seed in range(count):
        trial = random_trial(seed, adapter, model="exact")
        options = {**trial.settings.options, "worker_processes": processes}
        settings = msgspec.structs.replace(trial.settings, tensor_parallel_size=2, options=options)
        trials.append(msgspec.structs.replace(trial, settings=settings))
    return trials


def test_trials_leave_the_same_record_wherever_the_ranks_are() -> None:
    adapter = EmbeddedAdapter()
    num_preemptions = 0
    try:
        for inline, apart in zip(
            drawn_with_ranks(12, processes=False),
            drawn_with_ranks(12, processes=True),
            strict=True,
        ):
            here, there = run_trial(inline, adapter), run_trial(apart, adapter)
            assert here.events == there.events
            assert here.results == there.results
            num_preemptions += sum(type(event).__name__ == "Preempted" for event in here.events)
    finally:
        adapter.close_kept()
    assert num_preemptions > 5


def test_no_process_is_started() -> None:
    before = psutil.Process().children()
    with make_llm() as llm:
        generate(llm)
        assert llm.counters.num_preemptions
        assert llm.worker_process_ids == []
        assert psutil.Process().children() == before


def test_a_rank_that_goes_wrong_is_named() -> None:
    llm = make_llm("at_step:fail 1 2")
    with pytest.raises(WorkerFailedError, match="ValueError: planted in this rank") as caught:
        generate(llm)
    assert caught.value.rank == 1
    assert "in fail" in caught.value.worker_traceback
    with pytest.raises(EngineClosedError, match="Rank 1"):
        generate(llm)
    llm.close()


def test_an_interrupt_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them have done the step, and the others have not."""

    def interrupted(rank: Rank, frame: Frame) -> Frame | None:
        if rank._rank == 1 and frame.kind is MessageKind.STEP:
            raise KeyboardInterrupt
        return answer(rank, frame)

    answer = Rank.answer
    with make_llm() as llm:
        monkeypatch.setattr(Rank, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        monkeypatch.undo()
        with pytest.raises(EngineClosedError, match="KeyboardInterrupt"):
            generate(llm)


def test_a_rank_that_drifts_is_found_where_it_drifts() -> None:
    with (
        make_llm("lost_block:1 2", debug_worker_state=True) as llm,
        pytest.raises(WorkerStateDriftError, match="Step 2") as caught,
    ):
        generate(llm)
    assert caught.value.rank == 1


def test_ids_that_are_left_out_on_resume_are_missed_by_the_rank() -> None:
    """A rank in the driver's process has no other way to know them either."""
    with (
        make_llm("no_ids_on_resume") as llm,
        pytest.raises(WorkerFailedError, match="the worker knows 0 tokens"),
    ):
        generate(llm)


def test_a_rank_that_fails_to_start_is_named() -> None:
    with pytest.raises(WorkerFailedError, match="planted") as caught:
        make_llm("at_start:fail 1")
    assert caught.value.rank == 1


def test_a_real_model_needs_processes() -> None:
    with pytest.raises(ConfigError, match="processes of their own"):
        EngineConfig(model="tiny-llama", tensor_parallel_size=2, worker_processes=False)
