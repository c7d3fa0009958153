"""Worker processes: what they may leave behind (nothing), and what is said when one goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.config import EngineConfig
from preempt_engine.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    WorkerDiedError,
    WorkerError,
    WorkerFailedError,
    WorkerOutOfMemoryError,
    WorkerStateDriftError,
    WorkerTimeoutError,
)
from preempt_engine.exact import reference_generate
from preempt_engine.executor.multiproc import MultiprocExecutor
from preempt_engine.observer import EngineObserver
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey

_GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_PROMPTS = [[index + 1] * (5 + index) for index in range(6)]
_FAULTS = "benchmarks.worker_faults"


def make_llm(*hooks: str, **options: object) -> LLM:
    """Two exact ranks with a pool in which requests preempt each other."""
    settings: dict[str, object] = {
        "tensor_parallel_size": 2,
        "num_kv_blocks": 10,
        "block_size": 4,
        "worker_hooks": tuple(f"{_FAULTS}:{hook}" for hook in hooks),
        **options,
    }
    return LLM("exact", **settings)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(_PROMPTS, _GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def expected(num_ranks: int) -> list[list[int]]:
    return [reference_generate(prompt, 12, 64, num_ranks=num_ranks) for prompt in _PROMPTS]


def runs(process: psutil.Process) -> bool:
    """False also for a dead process that nobody has waited for yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def open_files() -> int:
    return psutil.Process().num_fds()


# Faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error_class", "text"),
    [
        ("kill", WorkerDiedError, "was killed by SIGKILL"),
        ("abort", WorkerDiedError, "was killed by SIGABRT"),
        ("leave", WorkerDiedError, "exited with code 3"),
        ("fail", WorkerFailedError, "ValueError: planted in this rank"),
        ("exhaust_memory", WorkerOutOfMemoryError, "ran out of memory"),
        ("stall", WorkerTimeoutError, "computing step 2"),
        ("spin", WorkerTimeoutError, "computing step 2"),
    ],
)
def test_a_rank_that_goes_wrong_is_named_and_nothing_is_left(
    kind: str, error_class: type[WorkerError], text: str
) -> None:
    """Each way for rank 1 to go wrong gives its own error, and ends every process."""
    before = open_files()
    llm = make_llm(f"at_step:{kind} 1 2", worker_timeout_s=0.5)
    processes = llm.worker_process_ids
    with pytest.raises(error_class, match=text) as caught:
        generate(llm)
    assert caught.value.rank == 1
    if kind not in ("kill", "leave"):  # these two end without a word
        assert f"in {kind}" in caught.value.worker_traceback
    assert not any(psutil.pid_exists(pid) for pid in processes)
    assert open_files() == before
    with pytest.raises(EngineClosedError, match="Rank 1"):
        generate(llm)
    llm.close()


def test_a_rank_that_fails_to_start_is_named() -> None:
    before = open_files()
    with pytest.raises(WorkerFailedError, match="planted") as caught:
        make_llm("at_start:fail 1")
    assert caught.value.rank == 1
    assert open_files() == before


def test_an_error_of_the_engine_keeps_its_class_across_processes() -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        make_llm("no_such_fault")
    assert any("Traceback of rank" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "hook", ["lost_block:1 2", "exchanged_blocks:1 2", "late_frees:1 1"], ids=lambda hook: hook[:9]
)
def test_a_rank_that_drifts_is_found_where_it_drifts(hook: str) -> None:
    """With `debug_worker_state`, by its checksum and in that very step; without, by nobody here."""
    with (
        make_llm(hook, debug_worker_state=True) as llm,
        pytest.raises(WorkerStateDriftError) as caught,
    ):
        generate(llm)
    assert caught.value.rank == 1
    if hook.endswith("1 2"):
        assert "Step 2" in str(caught.value)
        assert "sequence 0.0" in str(caught.value)


@pytest.mark.parametrize("hook", ["exchanged_blocks:1 2", "default_block_size:1"])
def test_one_wrong_rank_changes_the_output_of_the_exact_model(hook: str) -> None:
    """The pool is large enough for a wrong slot to be inside it."""
    with make_llm(hook, num_kv_blocks=200) as llm:
        assert generate(llm) != expected(num_ranks=2)


def test_ids_that_are_left_out_on_resume_are_missed_by_the_rank() -> None:
    """nano-vllm PR 103: after a preemption the token ids were not sent again."""
    with (
        make_llm("no_ids_on_resume") as llm,
        pytest.raises(WorkerFailedError, match="the worker knows 0 tokens"),
    ):
        generate(llm)


# Life and death -----------------------------------------------------------------------------------


def test_close_ends_the_workers_and_may_be_repeated() -> None:
    before = open_files()
    llm = make_llm()
    processes = llm.worker_process_ids
    llm.close()
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in processes)
    assert open_files() == before


def test_an_engine_that_is_forgotten_leaves_no_process() -> None:
    llm = make_llm()
    processes = llm.worker_process_ids
    del llm
    assert not any(psutil.pid_exists(pid) for pid in processes)


def test_two_engines_live_side_by_side() -> None:
    with make_llm() as first, make_llm(tensor_parallel_size=3) as second:
        assert generate(first) == expected(2)
        assert generate(second) == expected(3)
        assert generate(first) == expected(2)


def test_workers_ignore_an_interrupt() -> None:
    with make_llm() as llm:
        for pid in llm.worker_process_ids:
            os.kill(pid, signal.SIGINT)
        assert generate(llm) == expected(2)


_DRIVER = """
import signal
from preempt_engine import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts us may ignore it
hook = "benchmarks.worker_faults:slow_steps:0.01"
llm = LLM("exact", tensor_parallel_size=2, worker_hooks=(hook,))
print(*llm.worker_process_ids, flush=True)
llm.generate([[1]], SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True), False)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_driver(signal_number: signal.Signals) -> None:
    """The signal goes to the driver's whole process group, as Ctrl-C in a terminal does."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        try:
            workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
            assert len(workers) == 2
            os.killpg(driver.pid, signal_number)
            # The workers hold these pipes too: it ends when the last of them has ended.
            driver.communicate(timeout=30)
        finally:
            driver.kill()  # or leaving it here would wait for it
    # A process that ends closes its pipes a moment before it is gone.
    _, left = psutil.wait_procs(workers, timeout=5)
    assert not any(runs(worker) for worker in left)


def test_a_forked_copy_of_the_driver_leaves_the_workers_alone() -> None:
    with make_llm() as llm:
        pid = os.fork()
        if pid == 0:
            del llm
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert generate(llm) == expected(2)


# Content ------------------------------------------------------------------------------------------


def test_a_message_larger_than_any_socket_buffer_arrives() -> None:
    """Both ways: the prompt goes out in one step, and an observer has it reported back."""
    prompt = [1 + index % 60 for index in range(70_000)]
    settings = {"num_kv_blocks": 1100, "block_size": 64, "max_num_batched_tokens": 70_000}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with make_llm(**settings) as llm:
        llm.set_observer(EngineObserver())
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output["token_ids"] == reference_generate(prompt, 2, 64, num_ranks=2)


def test_workers_of_the_exact_model_import_neither_torch_nor_numpy() -> None:
    with make_llm("refuse_modules:torch numpy pickle") as llm:
        assert generate(llm) == expected(2)


# Reset --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_that_was_reset_does_what_a_new_one_does(num_ranks: int) -> None:
    with make_llm(tensor_parallel_size=num_ranks) as llm:
        runs = []
        for _ in range(5):
            outputs = generate(llm)
            runs.append((outputs, llm.counters))
            llm.reset()
    assert runs[0][0] == expected(num_ranks)
    assert runs[0][1].num_preemptions > 0
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reset_refuses_while_anything_is_left(num_ranks: int) -> None:
    with make_llm(tensor_parallel_size=num_ranks) as llm:
        llm.add_request([1, 2, 3], _GREEDY, request_id="a")
        llm.step()
        with pytest.raises(EngineBusyError, match="1 requests are unfinished"):
            llm.reset()
        llm.abort_request("a")
        llm.hold_blocks(3)
        with pytest.raises(EngineBusyError, match="3 blocks are held"):
            llm.reset()
        llm.hold_blocks(0)
        llm.reset()
        assert generate(llm) == expected(num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reset_can_change_what_only_the_scheduler_knows(num_ranks: int) -> None:
    """A smaller pool and budget, as if the engine had been built with them; and back."""
    small = {"num_kv_blocks": 10, "max_num_batched_tokens": 7, "seed": 3}
    with make_llm(tensor_parallel_size=num_ranks, **small) as llm:
        wanted = generate(llm), llm.counters, llm.num_kv_blocks, llm.max_total_tokens
    with make_llm(tensor_parallel_size=num_ranks, num_kv_blocks=40) as llm:
        assert generate(llm) == wanted[0]
        assert llm.counters.num_preemptions == 0
        llm.reset(**small)
        assert (generate(llm), llm.counters, llm.num_kv_blocks, llm.max_total_tokens) == wanted
        llm.reset(num_kv_blocks=40)
        generate(llm)
        assert llm.counters.num_preemptions == 0
        llm.reset()
        with pytest.raises(ConfigError, match="built for 40"):
            llm.reset(num_kv_blocks=41)
        with pytest.raises(ConfigError, match="cannot change block_size"):
            llm.reset(block_size=8)


def test_several_steps_may_be_under_way() -> None:
    """Answers come in the order of the steps, whenever they are asked for."""
    config = EngineConfig(model="exact", tensor_parallel_size=2, block_size=4)
    steps = [
        SchedulerOutput(
            step_id,
            scheduled=[ScheduledSequence(SequenceKey(f"{step_id}"), 0, 1, 0, True, [7], [step_id])],
        )
        for step_id in range(5)
    ]
    executor = MultiprocExecutor(config)
    try:
        handles = [executor.execute(step) for step in steps]
        tokens = [handle.result().argmax([0]) for handle in handles]
    finally:
        executor.close()
    assert tokens == [reference_generate([7], 1, 64, num_ranks=2)] * 5
