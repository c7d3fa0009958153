"""Adapter "vllm": its own books, on a toy engine; the real one needs a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from preempt_harness.adapters import vllm_llm
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.adapters.vllm import VllmAdapter
from preempt_harness.adapters.vllm_llm import VllmEngineSession, engine_arguments
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import AnyEvent, Preempted, TokensDelivered
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload
from tests.harness.toy_engines import COUNTED_BEFORE, Spoil, ToyLLMEngine, toy_vllm

BLOCK = 16
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a toy module where vLLM would be."""
    for name in (*vllm_llm.ENVIRONMENT, "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "1")  # given back afterwards

    def put(*spoil: Spoil) -> None:
        monkeypatch.setitem(sys.modules, "vllm", toy_vllm(*spoil))
        monkeypatch.setattr(vllm_llm, "version", lambda name: "toy")

    return put


@pytest.fixture
def harness(install: Install) -> PreemptHarness:
    install()
    return PreemptHarness(VllmAdapter(), {"block_size": BLOCK, "model": "tiny-llama"})


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(**{"model": "tiny-llama", "num_blocks": 8, "block_size": BLOCK, **more})


def spec(name: str, prompt: int = 20, outputs: int = 4, **sampling: Any) -> RequestSpec:
    return RequestSpec(
        id=name,
        prompt_token_ids=list(range(4, 4 + prompt)),
        sampling=SamplingSpec(max_tokens=outputs, **sampling),
    )


def run_to_end(session: VllmEngineSession) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    while session.unfinished():
        events += session.poll(1.0)
    return [*events, *session.close()]


def test_a_tight_pool_preempts_and_is_clean(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=3, prompt_tokens=(20, 40), max_tokens=30)
    result = harness.run(workload, 8)
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


def test_counters_are_differences(install: Install) -> None:
    install()
    session = VllmEngineSession(settings())
    for name in ("r0", "r1"):
        session.submit(spec(name, prompt=70))
    events = run_to_end(session)
    engine = ToyLLMEngine.made
    assert engine is not None
    counted = sum(isinstance(event, Preempted) for event in events)
    assert counted == engine.num_preemptions - COUNTED_BEFORE > 0
    assert engine.is_shut


def test_events_come_in_order(install: Install) -> None:
    """A preemption is told before what the same step delivers."""
    install()
    session = VllmEngineSession(settings())
    for name in ("r0", "r1"):
        session.submit(spec(name, prompt=70, outputs=2))
    names = [type(event).__name__ for event in session.poll(1.0)]
    assert names == ["Arrived", "Arrived", "Preempted", "TokensDelivered"]
    names = [type(event).__name__ for event in session.poll(1.0)]
    assert names[:2] == ["TokensDelivered", "Finished"]


def test_branches_and_log_probabilities(install: Install) -> None:
    install()
    session = VllmEngineSession(settings(num_blocks=64))
    session.submit(spec("r0", n=2, logprobs=1, prompt_logprobs=1))
    events = run_to_end(session)
    result = session.results()["r0"]
    delivered = [event.seq for event in events if isinstance(event, TokensDelivered)]
    assert set(delivered) == {"r0.0", "r0.1"}
    assert [output.finish_reason for output in result.outputs] == ["length"] * 2
    logprobs = result.outputs[1].logprobs
    assert logprobs is not None
    assert logprobs[0][result.outputs[1].token_ids[0]] == -0.25
    assert result.outputs[1].cumulative_logprob == -0.25 * len(logprobs)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == 20
    assert result.num_cached_tokens == 3


def test_an_aborted_request_keeps_what_it_has(harness: PreemptHarness) -> None:
    requests = harness.workload(requests=2, prompt_tokens=20, max_tokens=8).requests
    workload = Workload(
        requests=requests, operations=[Operation(kind="abort", step=3, request="r1")]
    )
    result = harness.run(workload, "roomy", expect_preemption=False)
    result.assert_matches_baseline()
    result.assert_clean()
    output = result.record.results["r1"].outputs[0]
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 8
    session = VllmEngineSession(settings())
    session.abort("nobody")
    assert ToyLLMEngine.made is not None
    assert ToyLLMEngine.made.aborted == []


def test_a_refused_request_ends_with_the_engines_words(install: Install) -> None:
    install()
    session = VllmEngineSession(settings())
    session.submit(spec("r0", prompt=500))
    assert not session.unfinished()
    assert session.results()["r0"].error == "500 tokens are too many"


def test_scores_are_of_the_continuation(install: Install) -> None:
    from tests.harness.fake_server import next_token

    install()
    session = VllmEngineSession(settings())
    first = next_token([5, 6])
    (right,) = session.score([5, 6], [first])
    assert (right.token_id, right.logprob, right.top_token_id) == (first, -0.25, first)
    assert right.second_logprob == -2.0


def test_resets_reach_the_engine(install: Install) -> None:
    install()
    session = VllmEngineSession(settings())
    session.reset_prefix_cache()
    session.reset_running_requests()
    assert ToyLLMEngine.made is not None
    assert ToyLLMEngine.made.resets == [False, True]


def test_an_output_that_changes_what_was_delivered_is_found(install: Install) -> None:
    """Negative control: the stream and the final output differ."""

    def forgetful(name: str, output: list[int]) -> list[int]:
        return output if len(output) < 5 else [output[0] + 1, *output[1:]]

    install(forgetful)
    harness = PreemptHarness(VllmAdapter(), {"block_size": BLOCK, "model": "tiny-llama"})
    workload = harness.workload(requests=1, prompt_tokens=20, max_tokens=6)
    result = harness.run(workload, "roomy", expect_preemption=False, baseline="solo")
    assert any(str(finding.code).startswith("DEL-") for finding in result.findings)


def test_the_engine_steps_in_this_process(install: Install) -> None:
    install()
    VllmEngineSession(settings())
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_BATCH_INVARIANT"] == "0"
    VllmEngineSession(settings(options={"batch_invariant": True}))
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"


def test_the_pool_is_as_large_as_asked_and_no_request_outgrows_it() -> None:
    arguments = engine_arguments(settings())
    assert arguments["num_gpu_blocks_override"] == 8
    assert arguments["max_model_len"] == 7 * BLOCK
    assert arguments["disable_log_stats"] is False
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    assert engine_arguments(settings(speculative_config=drafts))["speculative_config"] == drafts


@pytest.mark.parametrize(
    "refused",
    [
        {"async_scheduling": 2},
        {"speculative_config": {"method": "scripted", "num_speculative_tokens": 2}},
    ],
)
def test_what_it_cannot_honour_is_refused(harness: PreemptHarness, refused: dict[str, Any]) -> None:
    workload = harness.workload(requests=2, prompt_tokens=20, max_tokens=4)
    with pytest.raises(UnsupportedTrialError, match="refuses"):
        harness.run(workload, "roomy", expect_preemption=False, **refused)


def test_a_missing_engine_gives_one_line() -> None:
    try:
        version("vllm")
    except PackageNotFoundError:
        missing = VllmAdapter().missing()
        assert missing is not None
        assert missing.startswith("pip install vllm")
        assert "\n" not in missing
    else:
        assert VllmAdapter().missing() is None
