"""Adapter "sglang": its own books, on a toy engine; the real one needs a GPU."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from preempt_harness.adapters import sglang_session
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.adapters.sglang import SglangAdapter
from preempt_harness.adapters.sglang_session import SWITCHES, SglangSession
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import AnyEvent, Preempted
from preempt_harness.verdict import Verdict
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload
from tests.harness.fake_server import next_token
from tests.harness.toy_engines import ToyEngine, toy_sglang

BLOCK = 16


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> SglangAdapter:
    monkeypatch.setitem(sys.modules, "sglang", toy_sglang())
    monkeypatch.setattr(sglang_session, "version", lambda name: "toy")
    for name in SWITCHES.values():
        monkeypatch.delenv(name, raising=False)
    return SglangAdapter()


@pytest.fixture
def harness(adapter: SglangAdapter) -> PreemptHarness:
    return PreemptHarness(adapter, {"block_size": BLOCK, "model": "tiny-llama"}, poll_timeout_s=5.0)


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(**{"model": "tiny-llama", "num_blocks": 8, "block_size": BLOCK, **more})


def spec(name: str, prompt: int = 20, outputs: int = 7, **sampling: Any) -> RequestSpec:
    return RequestSpec(
        id=name,
        prompt_token_ids=list(range(4, 4 + prompt)),
        sampling=SamplingSpec(max_tokens=outputs, **sampling),
    )


def run_to_end(session: SglangSession) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    while session.unfinished():
        events += session.poll(5.0)
    return [*events, *session.close()]


def test_retractions_are_told_by_request_and_as_differences(adapter: SglangAdapter) -> None:
    session = adapter.open(settings())
    for name in ("r0", "r1"):
        session.submit(spec(name))
    events = run_to_end(session)
    counted = [event.request for event in events if isinstance(event, Preempted)]
    assert sorted(counted) == ["r0", "r0", "r1", "r1"]  # 7 tokens, one in three
    assert ToyEngine.made is not None
    assert ToyEngine.made.is_shut


def test_events_come_in_order(adapter: SglangAdapter) -> None:
    session = adapter.open(settings())
    session.submit(spec("r0", outputs=3))
    names = [type(event).__name__ for event in run_to_end(session)]
    assert names == [
        "Arrived",
        *["TokensDelivered"] * 2,
        "Preempted",
        "TokensDelivered",
        "Finished",
    ]


def test_a_trial_matches_its_baseline(harness: PreemptHarness) -> None:
    """A baseline must not preempt, so the toy's outputs are too short for it there."""
    workload = harness.workload(requests=3, prompt_tokens=(20, 40), max_tokens=2)
    result = harness.run(workload, "roomy", expect_preemption=False)
    result.assert_matches_baseline()
    result.assert_clean()


def test_log_probabilities_are_those_of_the_tokens(adapter: SglangAdapter) -> None:
    session = adapter.open(settings())
    session.submit(spec("r0", logprobs=2))
    run_to_end(session)
    (output,) = session.results()["r0"].outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 7
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token_id] == -0.25
        assert len(entry) == 2


def test_an_aborted_request_leaves_the_others(harness: PreemptHarness) -> None:
    requests = harness.workload(requests=2, prompt_tokens=20, max_tokens=2).requests
    workload = Workload(
        requests=requests, operations=[Operation(kind="abort", step=0, request="r1")]
    )
    result = harness.run(workload, "roomy", expect_preemption=False)
    result.assert_matches_baseline()
    result.assert_clean()
    assert ToyEngine.made is not None
    assert ToyEngine.made.aborted == ["r1"]


def test_a_refused_request_ends_with_the_engines_words(adapter: SglangAdapter) -> None:
    session = adapter.open(settings(num_blocks=1))
    session.submit(spec("r0"))
    run_to_end(session)
    assert session.results()["r0"].error == "the prompt is too long"


def test_what_ends_a_task_is_raised(
    adapter: SglangAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: ToyEngine, **asked: Any) -> None:
        raise RuntimeError("the scheduler has died")

    monkeypatch.setattr(ToyEngine, "async_generate", broken)
    session = adapter.open(settings())
    session.submit(spec("r0"))
    with pytest.raises(RuntimeError, match="the scheduler has died"):
        session.poll(5.0)
    session.close()


def test_an_engine_that_falls_silent_is_waited_for_no_longer_than_asked(
    adapter: SglangAdapter,
) -> None:
    session = adapter.open(settings())
    assert list(session.poll(0.01)) == []
    session.close()


def test_scores_are_of_the_continuation(adapter: SglangAdapter) -> None:
    session = adapter.open(settings())
    first = next_token([1, 2])
    right, wrong = session.score([1, 2], [first, 63 - next_token([1, 2, first])])
    session.close()
    assert (right.top_token_id, right.logprob, right.second_logprob) == (first, -0.25, -2.0)
    assert wrong.top_token_id == next_token([1, 2, first])
    assert wrong.logprob in (-9.0, -2.0)


def test_switches_are_set_before_the_engine_is_made_and_do_not_stay(
    adapter: SglangAdapter,
) -> None:
    options = {"test_retract": True, "test_retract_interval": 5}
    session = adapter.open(settings(options=options))
    assert os.environ["SGLANG_TEST_RETRACT"] == "1"
    assert os.environ["SGLANG_TEST_RETRACT_INTERVAL"] == "5"
    assert ToyEngine.made is not None
    assert not set(SWITCHES) & set(ToyEngine.made.arguments)
    session.submit(spec("r0"))
    events = run_to_end(session)
    assert {event.reason for event in events if isinstance(event, Preempted)} == {"forced"}
    adapter.open(settings()).close()
    assert "SGLANG_TEST_RETRACT" not in os.environ


def test_the_pool_is_counted_in_tokens(adapter: SglangAdapter) -> None:
    adapter.open(settings(num_blocks=9, max_model_len=100)).close()
    assert ToyEngine.made is not None
    asked = ToyEngine.made.arguments
    assert (asked["max_total_tokens"], asked["page_size"]) == (9 * BLOCK, BLOCK)
    assert asked["context_length"] == 100


def test_a_token_that_the_engine_loses_is_found(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""

    def losing(name: str, output: list[int]) -> list[int]:
        return output[:-1] if name == "r1" and len(output) == 2 else list(output)

    workload = harness.workload(requests=2, prompt_tokens=20, max_tokens=2)
    baseline = harness.baselines.get(
        harness.settings(num_blocks=1), workload, harness.adapter, "same-config"
    )
    assert not baseline.problems
    monkeypatch.setattr(ToyEngine, "spoil", staticmethod(losing))
    result = harness.run(workload, "roomy", expect_preemption=False)
    assert result.verdict is Verdict.DIVERGED


def test_a_missing_engine_gives_one_line() -> None:
    if find_spec("sglang") is None:
        missing = SglangAdapter().missing()
        assert missing is not None
        assert missing.startswith("pip install sglang")
        assert "\n" not in missing
