"""Drafts in steps that are decided ahead: right ones save steps, wrong ones leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
from async_trials import compare, draw_trial, with_drafts

from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.exact import reference_generate
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SequenceKey

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * j + i) % 50 + 1 for j in range(9 + 3 * i)] for i in range(4)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def engine(depth: int, rate: float, count: int = 3, **options: Any) -> LLM:
    drafts = {
        "method": "scripted",
        "num_speculative_tokens": count,
        "acceptance_rate": rate,
    }
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_kv_blocks": 64,
        "debug_worker_state": True,
        "async_scheduling": depth,
        "speculative_config": drafts,
    }
    return LLM("exact", **(settings | options))


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """All outputs; integrity is asserted after every step, and that every draft was judged."""
    names = [llm.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()
    counters = llm.counters
    judged = counters.num_accepted_tokens + counters.num_rejected_tokens
    assert judged == counters.num_drafted_tokens > 0
    return [outputs[name] for name in names]


@DEPTHS
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [64, 14, 11])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_greedy_output_is_the_closed_form(
    mode: str, num_blocks: int, rate: float, depth: int
) -> None:
    options = {"preemption_mode": mode, "swap_space_blocks": 64, "poison": True}
    with engine(depth, rate, num_kv_blocks=num_blocks, **options) as llm:
        outputs = run(llm, PROMPTS)
        assert bool(llm.counters.num_preemptions) == (num_blocks < 64)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.outputs[0].token_ids == reference_generate(prompt, 24, 64)


@DEPTHS
def test_right_drafts_save_steps(depth: int) -> None:
    steps = {}
    for rate in (0.0, 1.0):
        with engine(depth, rate) as llm:
            run(llm, PROMPTS)
            steps[rate] = llm.counters.num_steps
    # A decision that is made before its drafts are known computes one token of its own as well.
    assert steps[1.0] < 0.5 * steps[0.0]


@DEPTHS
def test_drafts_do_not_end_with_a_short_text(depth: int) -> None:
    """Behind some length nothing is drafted any more, and every token takes a step."""
    steps = {}
    for num_prompt in (20, 300):
        with engine(depth, 1.0, num_kv_blocks=128) as llm:
            run(llm, [[7 * position % 50 + 1 for position in range(num_prompt)]])
            steps[num_prompt] = llm.counters.num_steps
    assert steps[300] <= steps[20] + 300 // llm.config.max_num_batched_tokens + 1


class Computed(EngineObserver):
    """What was computed, and what was delivered."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, list[int]]] = []
        self.delivered: list[int] = []

    def computed(
        self, step_id: int, rank: int, key: SequenceKey, start: int, token_ids: Any, *_: Any
    ) -> None:
        self.rows.append((step_id, start, list(token_ids)))

    def tokens_delivered(self, step_id: int, key: SequenceKey, token_ids: Any, *_: Any) -> None:
        self.delivered += token_ids


@DEPTHS
def test_what_was_decided_follows_what_came_true(depth: int) -> None:
    """Every position is computed with its own token in the end, and none is left out."""
    observer = Computed()
    with engine(depth, 0.6) as llm:
        llm.set_observer(observer)
        (output,) = run(llm, PROMPTS[:1])
    text = PROMPTS[0] + output.outputs[0].token_ids
    at: dict[int, int] = {}
    reached = 0
    for _, start, token_ids in observer.rows:
        assert start <= reached, "a position was skipped"
        at |= {start + index: token for index, token in enumerate(token_ids)}
        reached = start + len(token_ids)
    assert [at[position] for position in range(len(text) - 1)] == text[:-1]
    assert observer.delivered == output.outputs[0].token_ids


@DEPTHS
def test_no_step_exceeds_the_token_budget(depth: int) -> None:
    observer = Computed()
    with engine(depth, 1.0, count=8, max_num_batched_tokens=6) as llm:
        llm.set_observer(observer)
        run(llm, PROMPTS)
    widths: dict[int, int] = {}
    for step, _, token_ids in observer.rows:
        widths[step] = widths.get(step, 0) + len(token_ids)
    assert max(widths.values()) == 6


@DEPTHS
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("after", [3, 4, 5, 6])
def test_preempted_with_drafts_under_way(after: int, mode: Any, depth: int) -> None:
    with engine(depth, 0.7, swap_space_blocks=64) as llm:
        names = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        outputs: dict[str, RequestOutput] = {}
        step = 0
        while llm.has_unfinished_requests():
            if step >= after and step % 2 == 0:
                llm.preempt_request(names[step % 4], mode)
            for output in llm.step():
                outputs[output.request_id] = output
            llm.scheduler.check_integrity()
            step += 1
        assert llm.counters.num_preemptions > 1
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert outputs[name].outputs[0].token_ids == reference_generate(prompt, 24, 64)


@DEPTHS
def test_drafts_travel_to_every_rank(depth: int) -> None:
    with engine(depth, 0.6, tensor_parallel_size=2, num_kv_blocks=14) as llm:
        outputs = run(llm, PROMPTS)
        assert llm.counters.num_preemptions > 0
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.outputs[0].token_ids == reference_generate(prompt, 24, 64, num_ranks=2)


@pytest.mark.parametrize("seed", range(30))
def test_drawn_trials(seed: int) -> None:
    problems, _ = compare(with_drafts(draw_trial(seed), seed))
    assert problems == []
