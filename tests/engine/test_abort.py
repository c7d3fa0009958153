"""Aborts and cache resets at any moment, in the middle of a step too."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine, generate_one

from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.errors import ConfigError

PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, presence_penalty=0.5)
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9], [7]]


def drain(llm: LLM) -> dict[str, RequestOutput]:
    """Run to the end; outputs by request."""
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        outputs.update({output.request_id: output for output in llm.step()})
        llm.scheduler.check_integrity()
    assert llm.scheduler.pool_counts().used == 0
    return outputs


@lru_cache
def expected() -> list[list[int]]:
    """Outputs of the prompts, undisturbed."""
    return [generate_one(engine(), prompt, PARAMS).outputs[0].token_ids for prompt in PROMPTS]


@given(
    at=st.integers(0, 20),
    victim=st.integers(0, 2),
    within=st.booleans(),
    num_blocks=st.integers(4, 12),
    budget=st.integers(1, 12),
)
def test_an_abort_at_any_moment_harms_nobody_else(
    at: int, victim: int, within: bool, num_blocks: int, budget: int
) -> None:
    llm = engine((4, 9), num_kv_blocks=num_blocks, max_num_batched_tokens=budget)
    names = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
    outputs: dict[str, RequestOutput] = {}
    for step_id in range(at + 1):
        step = llm.schedule()
        handle = llm.execute(step) if step is not None else None
        if within and step_id == at:  # the step is in flight
            output = llm.abort_request(names[victim])
        if step is not None and handle is not None:
            outputs.update({item.request_id: item for item in llm.update(step, handle.result())})
    if not within:
        output = llm.abort_request(names[victim])
    if output is not None:
        outputs[names[victim]] = output
    outputs.update(drain(llm))
    for index, (name, tokens) in enumerate(zip(names, expected(), strict=True)):
        branch = outputs[name].outputs[0]
        if branch.finish_reason == "abort":
            assert index == victim
            assert branch.token_ids == tokens[: len(branch.token_ids)]
        else:
            assert (branch.token_ids, branch.finish_reason) == (tokens, "length")


def test_the_late_result_of_an_aborted_request_is_not_its_successors() -> None:
    llm = engine()
    llm.add_request(PROMPTS[0], PARAMS, request_id="same")
    step = llm.schedule()
    assert step is not None
    handle = llm.execute(step)
    llm.abort_request("same")
    llm.add_request(PROMPTS[1], PARAMS, request_id="same")
    assert llm.update(step, handle.result()) == []
    assert drain(llm)["same"]["token_ids"] == expected()[1]


@given(
    resets=st.dictionaries(st.integers(0, 20), st.sampled_from(["before", "within"]), max_size=4),
    running_too=st.booleans(),
    budget=st.integers(1, 12),
)
def test_a_cache_reset_at_any_moment_changes_no_output(
    resets: dict[int, str], running_too: bool, budget: int
) -> None:
    llm = engine(num_kv_blocks=8, max_num_batched_tokens=budget)
    names = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
    outputs: dict[str, RequestOutput] = {}
    step_id = 0
    while llm.has_unfinished_requests():
        if resets.get(step_id) == "before":
            llm.reset_prefix_cache(reset_running_requests=running_too)
        step = llm.schedule()
        if step is not None:
            handle = llm.execute(step)
            if resets.get(step_id) == "within":
                llm.reset_prefix_cache(reset_running_requests=running_too)
            outputs.update({item.request_id: item for item in llm.update(step, handle.result())})
        llm.scheduler.check_integrity()
        step_id += 1
    assert [outputs[name]["token_ids"] for name in names] == expected()


def test_after_a_reset_of_running_requests_nothing_old_is_found() -> None:
    llm = engine()
    llm.add_request(PROMPTS[0], PARAMS)
    for _ in range(4):
        llm.step()
    llm.reset_prefix_cache(reset_running_requests=True)
    counts = llm.scheduler.pool_counts()
    assert (counts.used, counts.cached) == (0, 0)
    assert len(llm.scheduler.waiting) == 1
    drain(llm)
    assert llm.counters.num_recomputed_tokens == len(PROMPTS[0]) + 3


def test_a_generate_that_fails_half_way_leaves_nothing_behind() -> None:
    llm = engine(skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="text"):
        llm.generate([PROMPTS[0], "text"], PARAMS, use_tqdm=False)
    assert not llm.has_unfinished_requests()
    assert generate_one(llm, PROMPTS[1], PARAMS)["token_ids"] == expected()[1]


def test_late_arrivals_give_what_early_ones_do() -> None:
    llm = engine((2, 5, 6), num_kv_blocks=5)
    names: list[str] = []
    outputs: dict[str, RequestOutput] = {}
    for prompt in PROMPTS:
        names.append(llm.add_request(prompt, replace(PARAMS)))
        for _ in range(3):
            outputs.update({output.request_id: output for output in llm.step()})
    outputs.update(drain(llm))
    assert [outputs[name]["token_ids"] for name in names] == expected()
