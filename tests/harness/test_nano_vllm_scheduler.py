"""Adapter "nano-vllm-scheduler", on a stand-in, and on the released package where there is one."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from preempt_harness.adapters.nano_vllm_issues import ISSUES, VERSION
from preempt_harness.adapters.nano_vllm_scheduler import NanoVllmSchedulerAdapter
from preempt_harness.adapters.nano_vllm_source import PATH_VARIABLE, NanoVllmSourceError
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.checks import run_checks
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import Computed, TokensDelivered, TrialRecord
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload
from tests.harness.nano_stand_in import write_checkout

WHEN_IT_PREFILLS = "self.prefills"
UNTIL_IT_DECODES = "self.num_completion_tokens == 0"


def trial(
    prompts: list[int],
    max_tokens: list[int],
    *,
    num_blocks: int,
    plan: str = "",
    ranks: int = 1,
    block_size: int = 4,
) -> Trial:
    """Requests r0, r1, ... of these lengths."""
    return Trial(
        engine="nano-vllm-scheduler",
        settings=EngineSettings(
            num_blocks=num_blocks, block_size=block_size, tensor_parallel_size=ranks
        ),
        workload=Workload(
            requests=[
                RequestSpec(
                    id=f"r{index}",
                    prompt_token_ids=[index + 4, *range(10, 9 + length)],
                    sampling=SamplingSpec(max_tokens=tokens),
                )
                for index, (length, tokens) in enumerate(zip(prompts, max_tokens, strict=True))
            ]
        ),
        plan=plan,
    )


def findings(record: TrialRecord) -> list[str]:
    """As text."""
    return [str(finding) for finding in run_checks(record).findings]


# A stand-in -----------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NanoVllmSchedulerAdapter:
    write_checkout(tmp_path, sends_all=WHEN_IT_PREFILLS)
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    return NanoVllmSchedulerAdapter()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_clean_engine_in_a_tight_pool(stand_in: NanoVllmSchedulerAdapter, ranks: int) -> None:
    harness = PreemptHarness(stand_in)
    workload = harness.workload(requests=3, prompt_tokens=(5, 9), max_tokens=8)
    result = harness.run(workload, "tight", block_size=4, tensor_parallel_size=ranks)
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "progress"])


def test_forced_preemptions_and_held_blocks(stand_in: NanoVllmSchedulerAdapter) -> None:
    harness = PreemptHarness(stand_in)
    workload = harness.workload(requests=3, prompt_tokens=(5, 9), max_tokens=8)
    result = harness.run(workload, plan="preempt-all@out=2/squeeze:all@5..8", block_size=4)
    result.assert_preempted(at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


def test_what_a_message_leaves_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nano-vllm sent no token ids once decode had begun, and prefilled from them after all."""
    write_checkout(tmp_path, sends_all=UNTIL_IT_DECODES)
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    wanted = trial([3], [4], num_blocks=4, plan="preempt:r0@out=2", ranks=2)
    (found,) = findings(run_trial(wanted, NanoVllmSchedulerAdapter()))
    assert "no attribute 'token_ids': rank 1 cannot prepare r0 in step 2" in found
    assert "comes to it for prefill with 5 tokens, 2 of them outputs" in found
    assert "left out: token_ids" in found


def test_each_rank_has_modules_of_its_own(stand_in: NanoVllmSchedulerAdapter) -> None:
    """An engine's other processes keep its default block size unless they are told."""
    settings = EngineSettings(
        num_blocks=4,
        block_size=4,
        tensor_parallel_size=2,
        options={"worker_block_size": "default"},
    )
    session = stand_in.open(settings)
    first, second = (copy.sequence_class for copy in session.ranks.copies)
    assert (first.block_size, second.block_size) == (4, 256)


def test_nothing_of_it_stays_imported(stand_in: NanoVllmSchedulerAdapter) -> None:
    stand_in.open(EngineSettings(num_blocks=4, block_size=4, tensor_parallel_size=2))
    assert not [name for name in sys.modules if name.startswith("nanovllm")]


def test_nothing_is_known_of_a_checkout(stand_in: NanoVllmSchedulerAdapter) -> None:
    assert stand_in.known_issues == ()
    assert "chunked_prefill" not in stand_in.capabilities


def test_a_folder_that_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    with pytest.raises(NanoVllmSourceError, match="no nano-vllm that can be loaded"):
        NanoVllmSchedulerAdapter().open(EngineSettings(num_blocks=4, block_size=4))


def test_a_missing_package_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    missing = NanoVllmSchedulerAdapter().missing()
    try:
        version("nano-vllm-fork")
    except PackageNotFoundError:
        assert missing is not None
        assert missing.startswith("pip install --no-deps nano-vllm-fork")
        assert "\n" not in missing


# The released package -------------------------------------------------------------------------


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> NanoVllmSchedulerAdapter:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    try:
        installed = version("nano-vllm-fork")
    except PackageNotFoundError:
        pytest.skip(f"pip install --no-deps nano-vllm-fork=={VERSION} numpy xxhash")
    if installed != VERSION:
        pytest.skip(f"nano-vllm-fork {installed} is installed; what is expected is of {VERSION}")
    return NanoVllmSchedulerAdapter()


def test_the_lost_token_ids(fork: NanoVllmSchedulerAdapter) -> None:
    """The smallest plan: one request of one token, preempted in decode; two ranks."""
    record = run_trial(
        trial([1], [2], num_blocks=2, plan="preempt:r0@out=1", ranks=2, block_size=8), fork
    )
    (found,) = findings(record)
    assert found.startswith("CRASH-EXCEPTION: Step 1")
    assert "'Sequence' object has no attribute 'token_ids': rank 1 cannot prepare r0" in found
    assert "left out: token_ids" in found


def test_a_victim_that_still_runs(fork: NanoVllmSchedulerAdapter) -> None:
    """It stands in both queues, and grows without a block table."""
    found = findings(run_trial(trial([5, 5, 5], [8, 8, 8], num_blocks=7), fork))
    assert any("ACC-QUEUE" in text and "stands in the queues 2 times" in text for text in found)
    assert any("IndexError" in text and "in may_append of r" in text for text in found)


def test_a_victim_that_runs_twice(fork: NanoVllmSchedulerAdapter) -> None:
    """Two rows of one request in one step, and a token that the user gets twice."""
    record = run_trial(trial([8, 1], [2, 4], num_blocks=2, block_size=8), fork)
    rows = [(event.step, event.seq) for event in record.events if isinstance(event, Computed)]
    assert len(rows) > len(set(rows))
    pairs = [
        event.token_ids
        for event in record.events
        if isinstance(event, TokensDelivered) and len(event.token_ids) == 2
    ]
    assert pairs
    assert all(first == second for first, second in pairs)


def test_nothing_to_schedule(fork: NanoVllmSchedulerAdapter) -> None:
    """A prompt larger than the pool waits until nobody else is left, and stops the engine."""
    (found,) = findings(run_trial(trial([9, 2], [1, 3], num_blocks=2), fork))
    assert "at `assert scheduled_seqs` in schedule; waiting: r0, r1" in found


def test_a_prompt_that_is_cached_whole_has_no_logits(fork: NanoVllmSchedulerAdapter) -> None:
    prompt = list(range(10, 18))
    requests = [
        RequestSpec(id=name, prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=3))
        for name in ("r0", "r1")
    ]
    requests[1:] = [
        RequestSpec(
            id="r1", prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=3), arrival_step=1
        )
    ]
    wanted = Trial(
        engine=fork.name,
        settings=EngineSettings(num_blocks=8, block_size=4),
        workload=Workload(requests=requests),
    )
    (found,) = findings(run_trial(wanted, fork))
    assert "the prefix cache holds all tokens of r1" in found


def test_known_issues_are_of_this_version(fork: NanoVllmSchedulerAdapter) -> None:
    assert fork.known_issues == ISSUES
