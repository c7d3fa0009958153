"""When the head of the queue is let in: each rule from both sides, one block apart."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.admission import place
from preempt_engine.block_manager import BlockManager
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import SequenceKey

BLOCK, POOL = 4, 20
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def engine(watermark: float, num_drafts: int, **options: Any) -> LLM:
    if num_drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": num_drafts}
    return LLM("exact", num_kv_blocks=POOL, block_size=BLOCK, watermark=watermark, **options)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("watermark", "num_kept"), [(0.0, 0), (0.1, 2), (0.15, 3)])
@pytest.mark.parametrize(("num_drafts", "num_lookahead"), [(0, 0), (1, 1), (4, 1), (8, 2)])
def test_a_newcomer_leaves_watermark_and_room_for_its_drafts(
    watermark: float, num_kept: int, num_drafts: int, num_lookahead: int, swapped: bool
) -> None:
    """It has eight tokens, beside one that runs; a swapped one needs as much to come back."""
    needed = 2 + num_kept + num_lookahead
    for num_available, expected in ((needed, True), (needed - 1, False)):
        llm = engine(watermark, num_drafts, swap_space_blocks=8, enable_prefix_caching=False)
        llm.add_request([5], LONG, request_id="old")
        if swapped:
            llm.add_request(list(range(40, 47)), LONG, request_id="new")
            llm.step()
            llm.preempt_request("new", "swap")
            llm.step()
        else:
            llm.step()
            llm.add_request(list(range(40, 48)), LONG, request_id="new")
        llm.hold_blocks(llm.scheduler.blocks.num_available_blocks - num_available)
        llm.step()
        running = [request.request_id for request in llm.scheduler.running]
        assert running == (["old", "new"] if expected else ["old"])
        llm.scheduler.check_integrity()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_branches_come_back_with_the_copies_that_they_will_write_to(n: int, num_steps: int) -> None:
    """After a step they share a block and a half, after two each has a block for itself."""
    for missing in (0, 1):
        llm = engine(0.0, 0, swap_space_blocks=8, enable_prefix_caching=False)
        llm.add_request([5, 6, 7, 8], LONG, request_id="old")
        several = SamplingParams(n=n, seed=3, max_tokens=9, ignore_eos=True)
        llm.add_request(list(range(40, 46)), several, request_id="new")
        for _ in range(num_steps):
            llm.step()
        llm.preempt_request("new", "swap")
        llm.step()
        # Six tokens of the prompt: one full block, and for each branch one with the rest of it.
        needed = 1 + n if num_steps < 3 else 1 + 2 * n
        llm.hold_blocks(llm.scheduler.blocks.num_available_blocks - needed + missing)
        llm.step()
        running = [request.request_id for request in llm.scheduler.running]
        assert running == (["old"] if missing else ["old", "new"]), (needed, running)
        if not missing:
            assert llm.scheduler.blocks.num_available_blocks == 0
        llm.scheduler.check_integrity()


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_alone_it_may_have_all(num_drafts: int) -> None:
    llm = engine(0.15, num_drafts)
    llm.add_request(list(range(1, 9)), LONG)
    llm.hold_blocks(POOL - 1)
    llm.step()
    assert not llm.scheduler.running
    llm.hold_blocks(POOL - 2)
    llm.step()
    assert len(llm.scheduler.running) == 1


@pytest.mark.parametrize(("seats", "expected"), [(3, 1), (4, 2), (5, 2), (6, 3)])
def test_branches_take_a_seat_each_before_they_are_split(seats: int, expected: int) -> None:
    """Three want two seats each."""
    llm = engine(0.0, 0, max_num_seqs=seats)
    several = SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True)
    for first in (10, 20, 30):
        llm.add_request([first, first + 1], several)
    for _ in range(3):
        llm.step()
        assert len(llm.scheduler.running) == expected


@pytest.mark.parametrize(("budget", "expected"), [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_who_gets_no_token_of_the_budget_is_not_let_in(budget: int, expected: int) -> None:
    """Prompts of three tokens each."""
    llm = engine(0.0, 0, max_num_batched_tokens=budget)
    for first in (10, 20, 30):
        llm.add_request([first, first + 1, first + 2], LONG)
    step = llm.schedule()
    assert step is not None
    assert len(llm.scheduler.running) == expected
    assert step.num_scheduled_tokens == min(budget, 9)


def test_a_sequence_shares_with_whom_it_shares_most() -> None:
    """Not with the last that has something in common with it."""
    blocks = BlockManager(POOL, BLOCK)
    request = Request.create(
        request_id="r", arrival_index=0, prompt_token_ids=[1, 2, 3, 4], params=LONG, seed=0
    )
    ends = ([5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [5, 6, 7, 8, 29])
    request.sequences = {
        branch: Sequence(
            SequenceKey("r", branch), [1, 2, 3, 4, *end], num_prompt_tokens=4, first_wanted_logits=8
        )
        for branch, end in enumerate(ends)
    }
    first, second, third = place(request, blocks)
    assert (first.leader, first.num_leader_blocks) == (None, 0)
    assert (second.leader, second.num_leader_blocks) == (first.sequence, 1)
    assert (third.leader, third.num_leader_blocks) == (first.sequence, 2)


def test_who_is_refused_counts_as_finished_once() -> None:
    llm = engine(0.0, 0, max_waiting_requests=1)
    for first in (10, 20, 30):
        llm.add_request([first], LONG)
    llm.add_request([1] * 100, LONG)
    llm.step()
    assert llm.counters.num_finished_requests == 3
