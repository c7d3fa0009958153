"""A replay string repeats a failing trial exactly, wherever it is run."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from preempt_harness import replay
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import EngineError, TokensDelivered, TrialRecord
from preempt_harness.result import TrialResult
from preempt_harness.trial import run_trial
from tests.plugin.conftest import SOURCE_PATHS
from tests.plugin.foreign_adapter import ForeignAdapter

NUM_REPEATS = 20  # in this process, per trial
HASH_SEEDS = ("0", "1", "4711")  # one fresh process each

ADAPTERS: dict[str, type[EngineAdapter]] = {
    "embedded": EmbeddedAdapter,
    "foreign": ForeignAdapter,
}


def failing_result(engine: str) -> TrialResult:
    """A trial that fails an assertion; on the foreign engine a fault fails others, too.

    Its plan draws, its pool preempts by itself as well, and prefixes are found again.
    """
    harness = PreemptHarness(ADAPTERS[engine](), {"block_size": 4}, seed=5)
    workload = harness.workload(requests=4, prompt_tokens=(6, 20), max_tokens=16)
    options = {"bug": "swapped_blocks"} if engine == "foreign" else {}
    result = harness.run(workload, 14, plan="random:p=0.1,max=6,seed=3", options=options)
    assert bool(result.findings) == (engine == "foreign")
    with pytest.raises(AssertionError):
        result.assert_preempted(at_least=1000)
    return result


def replayed(text: str) -> TrialRecord:
    """The whole way of a replay, with a baseline of its own."""
    trial = replay.decode(text)
    harness = PreemptHarness(ADAPTERS[trial.engine](), replayed=trial)
    return harness.run(trial.workload).record


@pytest.mark.parametrize("engine", ADAPTERS)
def test_the_string_of_a_failing_trial_repeats_its_record(engine: str) -> None:
    result = failing_result(engine)
    text = replay.encode(result.trial)
    assert text in result.replay_command()
    assert replay.decode(text) == result.trial
    digests = [replayed(text).digest() for _ in range(NUM_REPEATS)]
    assert digests == [result.record.digest()] * NUM_REPEATS


IN_A_FRESH_PROCESS = """
import sys
sys.path[:0] = sys.argv[2:]
from tests.harness.test_replay import replayed
print(replayed(sys.argv[1]).digest())
"""


@pytest.mark.parametrize("hash_seed", HASH_SEEDS)
def test_a_fresh_process_repeats_the_record(hash_seed: str) -> None:
    """Whatever order its sets have."""
    result = failing_result("foreign")
    completed = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, replay.encode(result.trial), *SOURCE_PATHS],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert completed.stdout.strip() == result.record.digest(), completed.stderr


def test_the_text_of_a_crash_is_no_part_of_the_digest() -> None:
    """It names addresses and process ids; the same crash is the same record all the same."""
    harness = PreemptHarness(ForeignAdapter(), {"block_size": 4})
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=12)
    result = harness.run(workload, plan="preempt:r0@out=3", options={"bug": "exception"})
    again = run_trial(result.trial, ForeignAdapter())
    again.baseline = result.record.baseline
    for index, event in enumerate(again.events):
        if isinstance(event, EngineError):
            again.events[index] = msgspec.structs.replace(
                event, message=f"in process {os.getpid()}", traceback="at 0x7f00"
            )
    assert again != result.record
    assert again.digest() == result.record.digest()


def test_another_token_or_another_step_is_another_digest() -> None:
    record = failing_result("foreign").record
    digest = record.digest()
    delivered = next(
        index for index, event in enumerate(record.events) if isinstance(event, TokensDelivered)
    )
    event = record.events[delivered]
    for changed in ({"token_ids": [31]}, {"step": event.step + 1}):
        record.events[delivered] = msgspec.structs.replace(event, **changed)
        assert record.digest() != digest
    record.events[delivered] = event
    assert record.digest() == digest
