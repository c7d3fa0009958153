"""Adapter "nano-vllm": its own books, on a stand-in whose model runner is a toy; it needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preempt_harness.adapters.nano_vllm import (
    NanoVllmAdapter,
    NanoVllmEngineSession,
    PoolTooLargeError,
    engine_arguments,
)
from preempt_harness.adapters.nano_vllm_source import PATH_VARIABLE
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.harness import PreemptHarness
from preempt_harness.verdict import Verdict
from preempt_harness.workload import RequestSpec
from tests.harness.nano_stand_in import write_checkout

BLOCK = 256
PACKAGE = """
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
"""
CONFIG = """
class Config:
    eos = 2
    num_kvcache_blocks = 40  # as many as the device has memory for
    kvcache_block_size = 256
"""
LLM = """
from nanovllm.config import Config
from nanovllm.engine.scheduler import Scheduler
from tests.harness.fake_server import next_token


class Runner:
    def call(self, name, sequences, is_prefill):
        assert name == "run"
        return [next_token(sequence.token_ids) {spoiled} for sequence in sequences]


class LLM:
    made = None

    def __init__(self, model, **arguments):
        self.arguments = arguments
        self.scheduler, self.model_runner = Scheduler(Config()), Runner()
        self.has_ended = False
        LLM.made = self

    def exit(self):
        self.has_ended = True
"""


def write_engine(folder: Path, spoiled: str = "") -> None:
    """A checkout with an engine; `spoiled` changes a sampled token."""
    write_checkout(folder, sends_all="True")
    for name, text in (("__init__", PACKAGE), ("config", CONFIG), ("llm", LLM)):
        text = text.replace("{spoiled}", spoiled)
        (folder / "nanovllm" / f"{name}.py").write_text(text)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_engine(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
        del sys.modules[name]


@pytest.fixture
def harness(checkout: Path) -> PreemptHarness:
    return PreemptHarness(NanoVllmAdapter(), {"model": "tiny-qwen3", "block_size": BLOCK})


def made() -> Any:
    return sys.modules["nanovllm.llm"].LLM.made  # type: ignore[attr-defined]  # the stand-in


def test_a_tight_pool_preempts_and_is_clean(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=3, prompt_tokens=(240, 250), max_tokens=30)
    result = harness.run(workload, 4)
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["progress", "delivery"])
    assert made().has_ended


def test_forced_preemptions_and_held_blocks(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=(100, 120), max_tokens=8)
    result = harness.run(workload, plan="preempt-all@out=2/squeeze:all@5..8")
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


def test_the_pool_is_replaced_by_one_of_the_size_that_is_asked_for(checkout: Path) -> None:
    settings = EngineSettings(model="tiny-qwen3", num_blocks=7, block_size=BLOCK)
    session = NanoVllmAdapter().open(settings)
    assert len(made().scheduler.block_manager.blocks) == 7
    assert session.info.num_blocks == 7
    assert "Computed" not in session.info.observed
    session.close()


def test_more_blocks_than_the_device_has_are_refused(checkout: Path) -> None:
    settings = EngineSettings(model="tiny-qwen3", num_blocks=41, block_size=BLOCK)
    with pytest.raises(PoolTooLargeError, match=r"asks for 41 blocks of 256, .* room for 40"):
        NanoVllmAdapter().open(settings)


def test_the_engine_samples_as_cold_as_it_lets_one(checkout: Path) -> None:
    settings = EngineSettings(model="tiny-qwen3", num_blocks=7, block_size=BLOCK)
    session = NanoVllmAdapter().open(settings)
    assert isinstance(session, NanoVllmEngineSession)
    params = sys.modules["nanovllm"].SamplingParams  # type: ignore[attr-defined]  # the stand-in
    seen: list[float] = []

    class Noting(params):  # type: ignore[misc]  # a class of the stand-in
        def __init__(self, temperature: float, **more: Any) -> None:
            seen.append(temperature)
            super().__init__(**more)

    sys.modules["nanovllm"].SamplingParams = Noting  # type: ignore[attr-defined]  # the stand-in
    session.submit(RequestSpec(id="r0", prompt_token_ids=[5, 6, 7]))
    session.close()
    assert seen == [1e-9]


def test_a_step_has_room_for_the_longest_prompt() -> None:
    settings = EngineSettings(model="tiny-qwen3", num_blocks=4, max_num_batched_tokens=100)
    assert engine_arguments(settings)["max_model_len"] == 100


def test_a_token_that_changes_on_the_way_back_is_found(
    harness: PreemptHarness, checkout: Path
) -> None:
    """Negative control: what a request says depends on how often it was prefilled."""
    text = (checkout / "nanovllm" / "llm.py").read_text()
    spoiled = text.replace(
        "for sequence in sequences]",
        "+ (is_prefill and sequence.num_completion_tokens > 0) for sequence in sequences]",
    )
    (checkout / "nanovllm" / "llm.py").write_text(spoiled)
    workload = harness.workload(requests=1, prompt_tokens=20, max_tokens=8)
    result = harness.run(workload, plan="preempt:r0@out=3")
    assert result.verdict is Verdict.DIVERGED


def test_a_missing_package_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    missing = NanoVllmAdapter().missing()
    if missing is not None:
        assert missing.startswith("pip install")
        assert "\n" not in missing
