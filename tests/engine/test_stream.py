"""Streams: every delta once, whoever runs the steps, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine, generate_one

from preempt_engine import SamplingParams, StreamDelta
from preempt_engine.errors import ConfigError, InfeasibleRequestError

PROMPT = [3, 4, 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
preemptions = st.lists(st.integers(1, 25), max_size=5, unique=True)


def joined(deltas: Iterable[StreamDelta]) -> tuple[list[int], str, list[dict[int, float]]]:
    """Tokens, text and log probabilities of all deltas; demands that the last one ends."""
    listed = list(deltas)
    assert [delta.finish_reason is not None for delta in listed[:-1]] == [False] * (len(listed) - 1)
    assert listed[-1].finish_reason is not None
    return (
        [token_id for delta in listed for token_id in delta.token_ids],
        "".join(delta.text for delta in listed),
        [row for delta in listed for row in delta.logprobs or []],
    )


@given(preempt_at=preemptions, stop=st.sampled_from([(), ("q",), ("ab", "x")]))
def test_deltas_add_up_to_the_output(preempt_at: list[int], stop: tuple[str, ...]) -> None:
    params = replace(PARAMS, stop=stop)
    expected = generate_one(engine(), PROMPT, params).outputs[0]
    llm = engine(preempt_at)
    token_ids, text, logprobs = joined(llm.stream(PROMPT, params))
    assert (token_ids, text, logprobs) == (expected.token_ids, expected.text, expected.logprobs)
    assert not llm.has_unfinished_requests()


def test_each_token_is_told_when_it_comes() -> None:
    deltas = list(engine().stream(PROMPT, PARAMS))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 10
    assert [delta.finish_reason for delta in deltas] == [None] * 9 + ["length"]


PROMPTS = [PROMPT, [9, 9], list(range(12))]


@lru_cache
def expected() -> list[list[int]]:
    """Outputs of the prompts, each alone and undisturbed."""
    return [generate_one(engine(), prompt, PARAMS).outputs[0].token_ids for prompt in PROMPTS]


@given(order=st.lists(st.integers(0, 2), max_size=60), preempt_at=preemptions)
def test_streams_read_in_any_order_get_all_of_theirs(
    order: list[int], preempt_at: list[int]
) -> None:
    llm = engine(preempt_at, num_kv_blocks=6)
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    got: list[list[int]] = [[], [], []]
    for index in order:
        delta = next(streams[index], None)
        got[index] += delta.token_ids if delta else []
    for index, stream in enumerate(streams):
        got[index] += [token_id for delta in stream for token_id in delta.token_ids]
    assert got == expected()
    assert not llm.has_unfinished_requests()


def test_requests_that_end_meanwhile_are_returned_by_the_next_step() -> None:
    llm = engine()
    other = llm.add_request([7, 7], replace(PARAMS, max_tokens=2))
    joined(llm.stream(PROMPT, PARAMS))
    (output,) = llm.step()
    assert (output.request_id, output.finished) == (other, True)
    assert not llm.has_unfinished_requests()


def test_a_stream_that_is_closed_aborts_its_request() -> None:
    llm = engine()
    for delta in llm.stream(PROMPT, PARAMS):
        assert delta.token_ids
        break
    assert not llm.has_unfinished_requests()
    assert llm.scheduler.pool_counts().used == 0


def test_a_stream_of_which_nothing_was_read_can_be_closed_too() -> None:
    llm = engine()
    llm.stream(PROMPT, PARAMS).close()
    assert not llm.has_unfinished_requests()
    llm.stream(PROMPT, PARAMS)  # dropped
    assert not llm.has_unfinished_requests()


def test_a_stream_that_is_closed_while_its_request_waits_aborts_it_all_the_same() -> None:
    llm = engine()
    deltas = llm.stream(PROMPT, PARAMS, request_id="mine")
    next(deltas)
    llm.preempt_request("mine")
    llm.hold_blocks(llm.num_kv_blocks)
    llm.step()
    assert [request.request_id for request in llm.scheduler.waiting.in_order()] == ["mine"]
    deltas.close()
    assert not llm.has_unfinished_requests()


def test_an_abort_from_outside_ends_the_stream() -> None:
    llm = engine()
    deltas = llm.stream(PROMPT, PARAMS, request_id="mine")
    next(deltas)
    llm.abort_request("mine")
    (last,) = deltas
    assert (last.finish_reason, last.token_ids) == ("abort", [])


def test_an_infeasible_request_raises_its_error_and_wrong_arguments_raise_at_once() -> None:
    llm = engine()
    deltas = llm.stream(list(range(100)) * 9, PARAMS)
    assert next(deltas).finish_reason == "error"
    with pytest.raises(InfeasibleRequestError):
        next(deltas)
    with pytest.raises(ConfigError, match="priority"):
        llm.stream(PROMPT, PARAMS, priority=1)
    assert not llm.has_unfinished_requests()
