"""Steps decided ahead of the one that runs: every token once, and an end where it should be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from async_trials import compare, draw_trial

from preempt_engine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from preempt_engine.async_scheduler import AsyncScheduler
from preempt_engine.errors import ConfigError
from preempt_engine.exact import reference_generate
from preempt_engine.observer import EngineObserver
from preempt_engine.sequence import PLACEHOLDER
from preempt_engine.step import SequenceKey

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[(7 * j + i) % 50 + 1 for j in range(9 + 3 * i)] for i in range(4)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def engine(depth: int, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_kv_blocks": 64,
        "debug_worker_state": True,
        "async_scheduling": depth,
    }
    return LLM("exact", **(settings | options))


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    names = [llm.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()
    return [outputs[name] for name in names]


def assert_all_free(llm: LLM) -> None:
    counts = llm.scheduler.pool_counts()
    assert counts.free + counts.cached == counts.num_blocks
    assert isinstance(llm.scheduler, AsyncScheduler)
    assert llm.scheduler.is_idle


class Order(EngineObserver):
    """What happens, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.tokens: Counter[SequenceKey] = Counter()

    def blocks_allocated(self, step_id: int, *_: Any) -> None:
        self.events.append(("decided", step_id))

    def step_launched(self, step_id: int) -> None:
        self.events.append(("launched", step_id))

    def tokens_delivered(self, step_id: int, key: SequenceKey, token_ids: Any, *_: Any) -> None:
        self.events.append(("delivered", step_id))
        self.tokens[key] += len(token_ids)

    def computed(self, step_id: int, rank: int, key: Any, start: int, ids: Any, *_: Any) -> None:
        assert PLACEHOLDER not in ids


@DEPTHS
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [64, 14, 11])
def test_greedy_output_is_the_closed_form(num_blocks: int, mode: str, depth: int) -> None:
    options = {"num_kv_blocks": num_blocks, "preemption_mode": mode, "swap_space_blocks": 32}
    with engine(depth, **options) as llm:
        outputs = run(llm, PROMPTS, GREEDY)
        assert (llm.counters.num_preemptions > 0) == (num_blocks < 64)
        assert_all_free(llm)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.outputs[0].token_ids == reference_generate(prompt, 20, 64)


@DEPTHS
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, prompt_logprobs=1)])
def test_steps_are_decided_before_the_tokens_that_they_need_are_known(
    params: SamplingParams, depth: int
) -> None:
    order = Order()
    with engine(depth, block_size=1) as llm:  # every step needs a block
        llm.set_observer(order)
        run(llm, PROMPTS[:1], params)
    index = {event: place for place, event in reversed(list(enumerate(order.events)))}
    for step in range(1, 12):
        assert index["decided", step + depth] < index["delivered", step]
        assert index["delivered", step - 1] < index["launched", step]


@DEPTHS
def test_nothing_is_computed_behind_an_end(depth: int) -> None:
    """A stop is known before the step that was decided ahead of it is launched."""
    params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=range(4, 20))
    with engine(0) as llm:
        expected = run(llm, PROMPTS, params)
        num_computed = llm.counters.num_computed_tokens
    with engine(depth) as llm:
        outputs = run(llm, PROMPTS, params)
        assert llm.counters.num_computed_tokens == num_computed
        assert_all_free(llm)
    assert [item.outputs for item in outputs] == [item.outputs for item in expected]


@DEPTHS
@pytest.mark.parametrize("after", [1, 2, 3, 7])
def test_an_abort_gives_back_what_was_delivered(after: int, depth: int) -> None:
    order = Order()
    with engine(depth) as llm:
        llm.set_observer(order)
        name = llm.add_request(PROMPTS[0], GREEDY)
        for _ in range(after):
            llm.step()
        output = llm.abort_request(name)
        assert output is not None
        assert output.outputs[0].token_ids == reference_generate(PROMPTS[0], 20, 64)[:after]
        assert order.tokens[SequenceKey(name)] == after
        assert_all_free(llm)
        (other,) = run(llm, PROMPTS[1:2], GREEDY)
    assert other.outputs[0].token_ids == reference_generate(PROMPTS[1], 20, 64)


class Poison(EngineObserver):
    """Blocks that were poisoned, and that were handed out."""

    def __init__(self) -> None:
        self.poisoned: set[int] = set()
        self.taken: set[int] = set()

    def blocks_poisoned(self, step_id: int, rank: int, block_ids: Any) -> None:
        self.poisoned.update(block_ids)

    def blocks_allocated(self, step_id: int, key: Any, block_ids: Any, *_: Any) -> None:
        self.taken.update(block_ids)


@DEPTHS
@pytest.mark.parametrize("end", range(1, 7))
def test_what_a_step_that_is_not_run_was_to_poison_is_poisoned_by_the_next(
    end: int, depth: int
) -> None:
    """One is aborted, and another ends by itself a little later, with steps decided ahead."""
    last = reference_generate(PROMPTS[1], end, 64)[-1]
    stopped = replace(GREEDY, stop_token_ids=[last])
    with engine(depth, poison=True, enable_prefix_caching=False) as llm:
        name = llm.add_request(PROMPTS[3], GREEDY)
        llm.add_request(PROMPTS[1], stopped)
        llm.step()
        freed = set(llm.scheduler.requests[name].sequence.block_table)
        poison = Poison()
        llm.set_observer(poison)
        llm.abort_request(name)
        while llm.has_unfinished_requests():
            llm.step()
        run(llm, PROMPTS[:1], GREEDY)
        assert freed <= poison.poisoned | poison.taken


@DEPTHS
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_request_preempted_with_an_output_under_way_gets_every_token_once(
    mode: str, depth: int
) -> None:
    order = Order()
    with engine(depth, swap_space_blocks=32) as llm:
        llm.set_observer(order)
        names = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        outputs: dict[str, RequestOutput] = {}
        step = 0
        while llm.has_unfinished_requests():
            if step % 3 == 1 and step < 30:
                llm.preempt_request(names[step % 4], mode)  # type: ignore[arg-type]
            for output in llm.step():
                outputs[output.request_id] = output
            llm.scheduler.check_integrity()
            step += 1
        assert llm.counters.num_preemptions >= 5
        assert_all_free(llm)
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert outputs[name].outputs[0].token_ids == reference_generate(prompt, 20, 64)
        assert order.tokens[SequenceKey(name)] == 20


class Figures(EngineObserver):
    """Tokens computed, and computed again, by what is launched."""

    def __init__(self) -> None:
        self.computed_tokens = self.recomputed_tokens = 0
        self.steps: set[int] = set()
        self.farthest: Counter[SequenceKey] = Counter()

    def scheduled(self, step_id: int, key: SequenceKey, start: int, end: int) -> None:
        self.steps.add(step_id)
        self.computed_tokens += end - start
        self.recomputed_tokens += max(0, min(end, self.farthest[key]) - start)
        self.farthest[key] = max(self.farthest[key], end)


@DEPTHS
@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 64), (14, 64), (14, 5), (16, 3)])
def test_counters_are_of_what_is_launched(num_blocks: int, budget: int, depth: int) -> None:
    with engine(depth, num_kv_blocks=num_blocks, max_num_batched_tokens=budget) as llm:
        figures = Figures()
        llm.set_observer(figures)
        run(llm, PROMPTS, GREEDY)
        counters = llm.counters
    assert bool(figures.recomputed_tokens) == bool(counters.num_preemptions)
    assert bool(counters.num_preemptions) == (num_blocks < 64)
    assert counters.num_computed_tokens == figures.computed_tokens
    assert counters.num_recomputed_tokens == figures.recomputed_tokens
    assert counters.num_steps == len(figures.steps)


@DEPTHS
def test_steps_are_counted_while_nobody_can_run(depth: int) -> None:
    """A number is used again only while another step is under way: who waits sees time pass."""
    with engine(depth) as llm:
        llm.add_request(PROMPTS[0], GREEDY)
        llm.hold_blocks(64)
        for count in range(1, 4):
            llm.step()
            assert llm.scheduler.next_step_id == count
        llm.hold_blocks(0)
        llm.step()
        assert llm.scheduler.running


@DEPTHS
def test_beams_wait_for_their_logits(depth: int) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    with engine(0) as llm:
        expected = llm.beam_search(PROMPTS, params, use_tqdm=False)
    with engine(depth, num_kv_blocks=24) as llm:
        outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    assert [item.outputs for item in outputs] == [item.outputs for item in expected]


@DEPTHS
def test_scores_and_prompts_without_output(depth: int) -> None:
    with engine(0) as llm:
        scores = llm.score(PROMPTS[0], PROMPTS[1])
    with engine(depth) as llm:
        assert llm.score(PROMPTS[0], PROMPTS[1]) == scores
        before = llm.scheduler.next_step_id
        llm.score([5], [6, 7, 8])
        assert llm.scheduler.next_step_id == before + 1, "nothing is decided behind a score"
        (output,) = run(llm, PROMPTS[:1], SamplingParams(max_tokens=0))
        assert output.outputs[0].finish_reason == "length"
        assert_all_free(llm)


@DEPTHS
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_in_processes_of_their_own(num_ranks: int, depth: int) -> None:
    with engine(depth, tensor_parallel_size=num_ranks, num_kv_blocks=14) as llm:
        outputs = run(llm, PROMPTS, GREEDY)
        assert llm.counters.num_preemptions > 0
        assert_all_free(llm)
        llm.reset()
        again = run(llm, PROMPTS, GREEDY)
    for output, other, prompt in zip(outputs, again, PROMPTS, strict=True):
        expected = reference_generate(prompt, 20, 64, num_ranks=num_ranks)
        assert output.outputs[0].token_ids == other.outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"async_scheduling": 3}, "async_scheduling=3 is no depth"),
        ({"async_scheduling": True}, "async_scheduling=True is no depth"),
        (
            {
                "speculative_config": {
                    "method": "draft_model",
                    "model": "exact",
                    "num_speculative_tokens": 2,
                }
            },
            "async_scheduling=1 with a draft model",
        ),
        ({"scheduling_policy": "priority"}, "async_scheduling=1 with scheduling_policy"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("exact", **({"async_scheduling": 1} | options))


@pytest.mark.parametrize("seed", range(30))
def test_drawn_trials(seed: int) -> None:
    problems, _ = compare(draw_trial(seed))
    assert problems == []
