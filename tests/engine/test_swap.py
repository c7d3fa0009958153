"""Preemption by swap: blocks go to the host and come back, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.block_manager import BlockManager
from preempt_engine.errors import ConfigError
from preempt_engine.host_pool import HostPool
from preempt_engine.observer import EngineObserver
from preempt_engine.sequence import Request
from preempt_engine.step import SchedulerOutput
from preempt_engine.swapping import Swapper
from tests.engine.exact_reference import VOCAB_SIZE
from tests.engine.preemption_trials import (
    Case,
    assert_as_expected,
    assert_idle,
    draw_trial,
    run_trial,
)

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10]  # a block and a half


def engine(**options: Any) -> LLM:
    settings = {"num_kv_blocks": 40, "block_size": BLOCK, "poison": True, "swap_space_blocks": 40}
    return LLM("exact", exact_vocab_size=VOCAB_SIZE, **(settings | options))


def params(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, **changes
    )


def steps(llm: LLM, outputs: dict[str, RequestOutput]) -> Iterator[SchedulerOutput]:
    """Step to the end; yields each step before it is executed."""
    while llm.has_unfinished_requests():
        step = llm.schedule()
        if step is None:
            continue
        yield step
        for output in llm.update(step, llm.execute(step).result()):
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()


def run_to_end(llm: LLM) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in steps(llm, outputs):
        pass
    assert_idle(llm)
    return outputs


def advance(llm: LLM, num_steps: int) -> None:
    for _ in range(num_steps):
        llm.step()
        llm.scheduler.check_integrity()


def test_a_swapped_request_continues_where_it_was() -> None:
    llm = engine()
    llm.add_request(PROMPT, params())
    advance(llm, 4)
    llm.preempt_request("0", "swap")
    outputs = run_to_end(llm)
    assert_as_expected(Case(PROMPT, params()), outputs["0"].outputs)
    assert outputs["0"].num_preemptions == 1
    assert llm.counters.num_recomputed_tokens == 0


def test_only_blocks_with_computed_tokens_are_copied_and_each_once() -> None:
    """After 4 steps of 3 branches: 1 full block of the prompt, and per branch 1 of its own."""
    llm = engine()
    llm.add_request(PROMPT, SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True))
    advance(llm, 3)
    request = llm.scheduler.requests["0"]
    assert {sequence.num_computed_tokens for sequence in request.sequences.values()} == {8}
    llm.preempt_request("0", "swap")
    step = llm.schedule()
    assert step is not None
    assert len(step.swap_out) == 1 + 3
    assert len({device for device, _ in step.swap_out}) == 4
    llm.update(step, llm.execute(step).result())
    run_to_end(llm)
    assert llm.counters.num_swapped_out_blocks == llm.counters.num_swapped_in_blocks == 4


def test_reserved_blocks_that_hold_nothing_yet_are_not_copied() -> None:
    llm = engine(max_num_batched_tokens=5)
    llm.add_request(list(range(1, 30)), params())
    advance(llm, 1)
    llm.preempt_request("0", "swap")
    outputs = run_to_end(llm)
    assert llm.counters.num_swapped_out_blocks == 2  # 5 of 29 tokens
    assert llm.counters.num_recomputed_tokens == 0
    assert_as_expected(Case(list(range(1, 30)), params()), outputs["0"].outputs)


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, False), (1, True), (8, True), (9, False)]
)
def test_what_can_be_swapped_out_is_something_and_fits(num_computed: int, expected: bool) -> None:
    """A request of 12 tokens with all its blocks; the host has two."""
    blocks = BlockManager(8, BLOCK)
    swapper = Swapper(blocks, num_host_blocks=2)
    request = Request.create(
        request_id="0",
        arrival_index=0,
        prompt_token_ids=list(range(12)),
        params=params(),
        seed=0,
    )
    blocks.grow(request.sequence, 12)
    request.sequence.set_computed(num_computed)
    assert swapper.can_swap_out(request) == expected


@pytest.mark.parametrize(("n", "available"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
def test_nobody_is_evicted_for_blocks_that_are_on_their_way(n: int, available: int) -> None:
    """All branches of the first need a block; some are there, the others are being copied out."""
    llm = engine(num_kv_blocks=n + 2, enable_prefix_caching=False, max_num_batched_tokens=100)
    several = SamplingParams(n=n, seed=3, max_tokens=6, ignore_eos=True)
    llm.add_request([5, 6, 7, 8], several)
    llm.add_request([9, 10], params(2))
    llm.add_request([11] * (BLOCK * (n - available) - 1), params(2))
    advance(llm, 1)
    assert llm.scheduler.blocks.num_available_blocks == available
    llm.preempt_request("2", "swap")
    outputs = run_to_end(llm)
    assert [outputs[name].num_preemptions for name in ("0", "1", "2")] == [0, 0, 1]


@pytest.mark.parametrize("within", [False, True], ids=["between steps", "in flight"])
def test_a_reset_of_running_requests_takes_back_what_was_swapped_out(within: bool) -> None:
    """Nothing computed before the reset is read after it, from the host neither."""
    llm = engine(debug_worker_state=True)
    case = Case(PROMPT, SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True))
    llm.add_request(case.prompt, case.params)
    advance(llm, 3)
    llm.preempt_request("0", "swap")
    step = llm.schedule()
    assert step is not None
    assert step.swap_out
    handle = llm.execute(step)
    if within:
        llm.reset_prefix_cache(reset_running_requests=True)
    llm.update(step, handle.result())
    if not within:
        llm.reset_prefix_cache(reset_running_requests=True)
    llm.scheduler.check_integrity()
    outputs = run_to_end(llm)
    assert llm.counters.num_swapped_in_blocks == 0
    assert llm.counters.num_preemptions == outputs["0"].num_preemptions == 2
    # Of 8 positions of each branch: the full block of the prompt once, the others each.
    assert llm.counters.num_recomputed_tokens == 4 + 3 * 4
    assert_as_expected(case, outputs["0"].outputs)


def test_tokens_are_not_sent_to_workers_again() -> None:
    llm = engine()
    llm.add_request(PROMPT, params())
    advance(llm, 4)
    llm.preempt_request("0", "swap")
    outputs: dict[str, RequestOutput] = {}
    swapped_out, swapped_in, *_ = list(steps(llm, outputs))
    assert not swapped_out.scheduled
    assert not swapped_out.dropped
    (item,) = swapped_in.scheduled
    assert not item.reset
    assert len(item.new_token_ids) == 1
    assert item.num_stale_blocks == 3
    assert len(item.new_block_ids) == 3


def test_blocks_are_withheld_until_they_are_copied() -> None:
    llm = engine()
    llm.add_request(PROMPT, params())
    advance(llm, 4)
    llm.preempt_request("0", "swap")
    step = llm.schedule()
    assert step is not None
    assert set(llm.scheduler.blocks.fenced_blocks) == {device for device, _ in step.swap_out}
    llm.update(step, llm.execute(step).result())
    assert not llm.scheduler.blocks.fenced_blocks
    step = llm.schedule()
    assert step is not None
    assert set(llm.scheduler.swapper.host.fenced_blocks) == {host for host, _ in step.swap_in}
    llm.update(step, llm.execute(step).result())
    assert not llm.scheduler.swapper.host.fenced_blocks


def test_who_needs_the_blocks_waits_for_the_copy_and_takes_nobody_elses() -> None:
    """With 4 blocks the second request goes; the first gets its block one step later."""
    llm = engine(num_kv_blocks=4, preemption_mode="swap")
    for token in (1, 2):
        llm.add_request([token] * 7, params(max_tokens=8))
    outputs: dict[str, RequestOutput] = {}
    seen = [(len(step.swap_out), len(step.scheduled)) for step in steps(llm, outputs)]
    first = next(index for index, (swapped, _) in enumerate(seen) if swapped)
    assert seen[first] == (2, 0)
    assert seen[first + 1] == (0, 1)
    assert outputs["0"].num_preemptions == 0
    assert outputs["1"].num_preemptions == 1


@pytest.mark.parametrize("space", [0, 1, 2, 3, 4])
def test_without_room_on_the_host_the_request_is_recomputed(space: int) -> None:
    """The request has computed 9 tokens in 3 blocks."""
    llm = engine(swap_space_blocks=space, preemption_mode="swap")
    llm.add_request(PROMPT, params())
    advance(llm, 4)
    llm.preempt_request("0")
    outputs = run_to_end(llm)
    assert_as_expected(Case(PROMPT, params()), outputs["0"].outputs)
    assert llm.counters.num_preemptions == 1
    assert llm.counters.num_swapped_out_blocks == (3 if space >= 3 else 0)
    assert (llm.counters.num_recomputed_tokens == 0) == (space >= 3)


def test_a_request_is_swapped_again_and_again() -> None:
    llm = engine(swap_space_blocks=5)
    llm.add_request(PROMPT, params(max_tokens=10))
    while llm.has_unfinished_requests():
        llm.preempt_request("0", "swap")
        advance(llm, 2)
    assert (
        llm.counters.num_preemptions == 8
    )  # of 10 tokens, the first two and no other came in one stay
    assert llm.counters.num_recomputed_tokens == 0
    assert_idle(llm)


def test_a_request_is_aborted_while_it_is_out() -> None:
    llm = engine(num_kv_blocks=5, preemption_mode="swap")
    for token in (1, 2):
        llm.add_request([token] * 7, params(max_tokens=8))
    while llm.scheduler.requests["1"].host_blocks is None:
        advance(llm, 1)
    output = llm.abort_request("1")
    assert output is not None
    llm.scheduler.check_integrity()
    outputs = run_to_end(llm)
    assert_as_expected(Case([1] * 7, params(max_tokens=8)), outputs["0"].outputs)
    assert_as_expected(Case([2] * 7, params(max_tokens=8)), output.outputs)


def test_the_swapped_one_comes_back_before_a_newcomer_is_admitted() -> None:
    """Else newcomers fill the pool and the swap space with requests that never run."""
    llm = engine(num_kv_blocks=5, preemption_mode="swap")
    for token in (1, 2):
        llm.add_request([token] * 7, params(max_tokens=8))
    while llm.scheduler.requests["1"].host_blocks is None:
        advance(llm, 1)
    llm.add_request([3], params(max_tokens=2))
    order = []

    class Watch(EngineObserver):
        def resumed(self, step_id: int, request_id: str, num_cached_tokens: int) -> None:
            order.append(request_id)

        def blocks_allocated(self, step_id: int, key: Any, *rest: Any) -> None:
            order.append(key.request_id)

    llm.set_observer(Watch())
    run_to_end(llm)
    assert order.index("1") < order.index("2")


def test_two_victims_of_one_step_may_share_blocks() -> None:
    """One is swapped, so the other's blocks are withheld too: they may be the same ones."""
    llm = engine()
    prompt = list(range(1, 11))
    llm.add_request(prompt, params())
    advance(llm, 1)
    llm.add_request(prompt, params())
    advance(llm, 2)
    first, second = (llm.scheduler.requests[name].sequence for name in ("0", "1"))
    assert first.block_table[:2] == second.block_table[:2]
    llm.preempt_request("1", "swap")
    llm.preempt_request("0", "recompute")
    step = llm.schedule()
    assert step is not None
    assert {device for device, _ in step.swap_out} <= set(llm.scheduler.blocks.fenced_blocks)
    llm.update(step, llm.execute(step).result())
    outputs = run_to_end(llm)
    for name in ("0", "1"):
        assert_as_expected(Case(prompt, params()), outputs[name].outputs)


def test_scoring_survives_a_swap() -> None:
    llm = engine(max_num_batched_tokens=4)
    expected = llm.score(PROMPT, [1, 2, 3, 4, 5, 6, 7])

    class SwapEverybody:
        def select_victims(self, step_id: int, running: Any) -> list[Any]:
            from preempt_engine.victims import ForcedPreemption

            odd = step_id % 2
            return [ForcedPreemption(item.request_id, "swap") for item in running if odd]

    other = LLM(
        "exact",
        preemption_controller=SwapEverybody(),
        exact_vocab_size=VOCAB_SIZE,
        block_size=BLOCK,
        num_kv_blocks=40,
        swap_space_blocks=40,
        max_num_batched_tokens=4,
    )
    assert other.score(PROMPT, [1, 2, 3, 4, 5, 6, 7]) == expected
    assert other.counters.num_preemptions
    assert other.counters.num_recomputed_tokens == 0


def test_host_blocks_are_fenced_like_device_blocks() -> None:
    pool = HostPool(3)
    taken = pool.take(2)
    pool.check_integrity(taken)
    pool.release(taken, step_in_flight=5)
    assert len(pool.free_blocks) == 1
    pool.pass_fence(4)
    assert len(pool.free_blocks) == 1
    pool.pass_fence(5)
    assert sorted(pool.free_blocks) == [0, 1, 2]
    pool.check_integrity([])
    with pytest.raises(AssertionError, match="not each of 3 blocks once"):
        pool.check_integrity([0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"preemption_mode": "swop"}, "preemption_mode='swop' is unknown"),
        ({"swap_space_blocks": -1}, "swap_space_blocks=-1 is not a size"),
        ({"swap_space_bytes": 0.5}, "swap_space_bytes=0.5 is not a size"),
        ({"swap_space_bytes": 1}, "both given; each sizes the swap space"),
    ],
)
def test_wrong_swap_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        engine(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"preemption_mode": "swap"}, 40),
        ({"swap_space_bytes": 100}, 3),  # 4 slots of 8 bytes a block
        ({"swap_space_blocks": 7, "preemption_mode": "swap"}, 7),
    ],
)
def test_the_swap_space_is_sized(options: dict[str, Any], expected: int) -> None:
    llm = LLM("exact", num_kv_blocks=40, block_size=BLOCK, **options)
    assert llm.scheduler.swapper.host.num_blocks == expected


@settings(max_examples=120)
@given(st.randoms(use_true_random=False))
def test_any_mix_of_requests_plans_and_modes_gives_the_closed_form(rng: Random) -> None:
    run_trial(draw_trial(rng))


@pytest.mark.parametrize("seed", range(3))
def test_every_rank_swaps_copies_and_forks(seed: int) -> None:
    """The output is the closed form of two ranks only if neither lost anything."""
    rng = Random(seed)
    trial = draw_trial(rng)
    while len({type(case.params) for case in trial.cases}) < 2 or len(trial.forced) < 2:
        trial = draw_trial(rng)
    trial.options["tensor_parallel_size"] = 2
    run_trial(trial)


def test_who_is_too_large_for_the_host_takes_nothing_from_those_behind_it() -> None:
    """Of four that are to be swapped out in turn, with room for three blocks."""
    with engine(swap_space_blocks=3, max_num_batched_tokens=64) as llm:
        for length in (14, 15, 10, 5):
            llm.add_request([length] * length, params())
        llm.step()
        swapper, running = llm.scheduler.residency.swapper, llm.scheduler.running
        assert list(swapper.can_swap_out_in_turn(running)) == [False, False, True, False]
        assert list(swapper.can_swap_out_in_turn(reversed(running))) == [True, False, False, False]
