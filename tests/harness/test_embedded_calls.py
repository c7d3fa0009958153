"""Calls of the embedded engine that run the steps, one step a poll."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_engine import LLM
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.embedded_calls import CalledSession, UnknownCallError
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import Aborted, EngineError, StepLaunched
from preempt_harness.workload import RequestSpec, SamplingSpec


def session(call: str, **options: Any) -> CalledSession:
    settings = EngineSettings(num_blocks=40, block_size=4, options={"call": call, **options})
    opened = EmbeddedAdapter().open(settings)
    assert isinstance(opened, CalledSession)
    return opened


def spec(name: str, max_tokens: int = 4) -> RequestSpec:
    sampling = SamplingSpec(max_tokens=max_tokens)
    return RequestSpec(id=name, prompt_token_ids=[len(name), 5, 6], sampling=sampling)


def steps(opened: CalledSession) -> list[int]:
    """Launched in each poll, until all has ended."""
    counts = []
    while opened.unfinished():
        events = opened.poll(1.0)
        counts.append(sum(isinstance(event, StepLaunched) for event in events))
    return counts


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_poll_is_a_step_and_all_get_their_names_and_tokens(call: str) -> None:
    opened = session(call)
    for name in ("a", "bb", "ccc"):
        opened.submit(spec(name))
    assert steps(opened) == [1, 1, 1, 1]
    assert {name: len(item.outputs[0].token_ids) for name, item in opened.results().items()} == {
        "a": 4,
        "bb": 4,
        "ccc": 4,
    }
    assert not [event for event in opened.close() if isinstance(event, EngineError)]


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_who_comes_later_runs_beside_a_call_or_in_the_next(call: str) -> None:
    opened = session(call)
    opened.submit(spec("a"))
    opened.poll(1.0)
    opened.submit(spec("bb"))
    assert steps(opened) == [1, 1, 1, 1]
    opened.submit(spec("ccc"))
    assert steps(opened) == [1, 1, 1, 1]
    assert set(opened.results()) == {"a", "bb", "ccc"}
    assert not [event for event in opened.close() if isinstance(event, EngineError)]


def test_to_abort_a_request_is_to_close_its_stream() -> None:
    opened = session("stream")
    opened.submit(spec("a", 8))
    opened.submit(spec("bb", 8))
    opened.poll(1.0)
    opened.abort("bb")
    aborted = [event for event in opened.poll(1.0) if isinstance(event, Aborted)]
    assert [event.request for event in aborted] == ["bb"]
    steps(opened)
    assert len(opened.results()["a"].outputs[0].token_ids) == 8
    assert not [event for event in opened.close() if isinstance(event, EngineError)]


def test_who_is_aborted_before_its_batch_begins_is_no_part_of_it() -> None:
    opened = session("generate")
    opened.submit(spec("a"))
    opened.submit(spec("bb"))
    opened.abort("a")
    assert steps(opened) == [1, 1, 1, 1]
    assert {name: len(item.outputs[0].token_ids) for name, item in opened.results().items()} == {
        "a": 0,
        "bb": 4,
    }
    assert not [event for event in opened.close() if isinstance(event, EngineError)]


def test_who_is_turned_away_when_nobody_else_is_left_has_ended() -> None:
    settings = EngineSettings(
        num_blocks=40, block_size=4, max_waiting_requests=1, options={"call": "stream"}
    )
    opened = EmbeddedAdapter().open(settings)
    opened.submit(spec("a", 8))
    opened.poll(1.0)
    opened.preempt("a", "recompute")
    opened.hold_blocks(40)
    opened.poll(1.0)
    opened.submit(spec("bb"))  # finds a in the queue
    opened.abort("a")
    opened.poll(1.0)
    assert not opened.unfinished()
    assert "max_waiting_requests" in opened.results()["bb"].error
    opened.hold_blocks(0)
    assert not [event for event in opened.close() if isinstance(event, EngineError)]


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_session_can_be_closed_in_the_middle_of_a_call(call: str) -> None:
    adapter = EmbeddedAdapter()
    settings = EngineSettings(num_blocks=40, block_size=4, options={"call": call})
    for _ in range(2):  # the second time with the same engine
        opened = adapter.open(settings)
        opened.submit(spec("a", 8))
        opened.poll(1.0)
        opened.close()
    adapter.close_kept()


def test_a_batch_that_is_given_back_unfinished_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def shortened(llm: LLM, *arguments: Any, **options: Any) -> Any:
        return generate(llm, *arguments, **options)[:-1]

    monkeypatch.setattr(LLM, "generate", shortened)
    opened = session("generate")
    opened.submit(spec("a"))
    opened.submit(spec("bb"))
    steps(opened)
    (error,) = [event for event in opened.close() if isinstance(event, EngineError)]
    assert "for ['a', 'bb'] it returns ['a']" in error.message


def test_a_call_that_runs_on_when_all_has_ended_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate = LLM.generate

    def lingering(llm: LLM, *arguments: Any, **options: Any) -> Any:
        outputs = generate(llm, *arguments, **options)
        llm.step()
        return outputs

    monkeypatch.setattr(LLM, "generate", lingering)
    opened = session("generate")
    opened.submit(spec("a"))
    steps(opened)
    (error,) = [event for event in opened.close() if isinstance(event, EngineError)]
    assert "it runs another step" in error.message


def test_what_a_call_raises_is_raised_by_the_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(llm: LLM, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such batch")

    monkeypatch.setattr(LLM, "generate", broken)
    opened = session("generate")
    opened.submit(spec("a"))
    with pytest.raises(RuntimeError, match="no such batch"):
        opened.poll(1.0)
    opened.close()


def test_another_call_is_refused_with_advice() -> None:
    preempt = PreemptHarness(EmbeddedAdapter())
    with pytest.raises(UnknownCallError, match="Use one of generate, stream"):
        preempt.run(preempt.workload(), options={"call": "score"}, expect_preemption=False)


def test_what_the_last_step_gave_is_still_to_be_read_when_nothing_is_left_to_do() -> None:
    """A stream that has ended is closed before the one that ran its last step has looked at it.

    While the other's prompt is computed, each of the two runs every second step.
    """
    settings = EngineSettings(
        num_blocks=40, block_size=4, max_num_batched_tokens=7, options={"call": "stream"}
    )
    opened = EmbeddedAdapter().open(settings)
    for name in ("a", "bb"):
        prompt = [len(name), *range(4, 17)]
        opened.submit(
            RequestSpec(id=name, prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=3))
        )
    while not (opened.results() and opened.results()["a"].finished):
        opened.poll(1.0)
    opened.abort("bb")
    assert not opened.unfinished()
    opened.poll(1.0)
    opened.abort("a")
    opened.submit(spec("ccc"))
    while opened.unfinished():
        opened.poll(1.0)
    assert not [event for event in opened.close() if isinstance(event, EngineError)]
