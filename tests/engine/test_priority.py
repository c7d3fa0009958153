"""Priority scheduling: who is served, who is evicted, and who never is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine, generate_one
from priority_steps import Simulation

from preempt_engine import LLM, SamplingParams
from preempt_engine.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def priority_engine(num_blocks: int, **options: object) -> LLM:
    """Blocks of four tokens."""
    return engine(num_kv_blocks=num_blocks, scheduling_policy="priority", **options)


def running(llm: LLM) -> list[str]:
    return [request.request_id for request in llm.scheduler.running]


def waiting(llm: LLM) -> list[str]:
    return [request.request_id for request in llm.scheduler.waiting.in_order()]


def add(llm: LLM, name: str, num_tokens: int, priority: int) -> None:
    # Unlike prompts: no request finds another's blocks in the prefix cache.
    prompt = [ord(name[0]) - ord("a") + 1] * num_tokens
    llm.add_request(prompt, GREEDY, request_id=name, priority=priority)


@pytest.mark.parametrize("swaps", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(3))
def test_every_rule_holds_in_random_steps(seed: int, swaps: bool) -> None:
    Simulation(seed, swaps=swaps).run(250)


def test_lower_values_go_first_and_equals_by_arrival() -> None:
    llm = priority_engine(64, max_num_seqs=1)
    for name, priority in [("a", 2), ("b", 1), ("c", 2), ("d", 0), ("e", 1)]:
        add(llm, name, 3, priority)
    finished = []
    while llm.has_unfinished_requests():
        finished += [output.request_id for output in llm.step() if output.finished]
    assert finished == ["d", "b", "e", "a", "c"]


def test_an_urgent_arrival_evicts_the_least_urgent_and_no_more_than_needed() -> None:
    llm = priority_engine(6)
    for name, priority in [("a", 2), ("b", 3), ("c", 1)]:
        add(llm, name, 7, priority)
    llm.step()
    assert running(llm) == ["c", "a", "b"]
    add(llm, "d", 7, 0)
    llm.step()
    assert running(llm) == ["d", "c", "a"]
    assert waiting(llm) == ["b"]


@pytest.mark.parametrize(
    ("num_tokens", "priority"), [(16, 2), (4, 3)], ids=["too large", "an equal"]
)
def test_nobody_is_evicted_in_vain(num_tokens: int, priority: int) -> None:
    # Two blocks are the less urgent b's and none is free: 16 tokens need four.
    llm = priority_engine(4)
    add(llm, "a", 7, 1)
    add(llm, "b", 7, 3)
    llm.step()
    add(llm, "c", num_tokens, priority)
    llm.step()
    assert llm.counters.num_preemptions == 0
    assert running(llm) == ["a", "b"]
    assert waiting(llm) == ["c"]


def test_blocks_that_survivors_need_in_this_step_do_not_count() -> None:
    # b's eviction frees two blocks; a takes one of them for its next token, so c would not fit.
    llm = priority_engine(4)
    add(llm, "a", 8, 1)
    add(llm, "b", 7, 3)
    llm.step()
    add(llm, "c", 7, 2)
    llm.step()
    assert llm.counters.num_preemptions == 1
    assert running(llm) == ["a"]
    assert waiting(llm) == ["c", "b"]


def test_blocks_that_survivors_need_until_the_victims_are_copied_do_not_count_either() -> None:
    # b's blocks are free when they are copied, a step later; by then a takes one of the two.
    llm = priority_engine(4, preemption_mode="swap", swap_space_blocks=4)
    add(llm, "a", 7, 1)
    add(llm, "b", 7, 3)
    llm.step()
    add(llm, "c", 7, 2)
    llm.step()
    assert llm.counters.num_preemptions == 0
    assert running(llm) == ["a", "b"]
    assert waiting(llm) == ["c"]


def test_shared_blocks_are_not_freed_by_evicting_one_of_two() -> None:
    llm = priority_engine(4)
    llm.add_request([1] * 9, GREEDY, request_id="a", priority=1)
    llm.step()
    llm.add_request([1] * 9, GREEDY, request_id="b", priority=3)  # shares two blocks, owns one
    llm.step()
    assert running(llm) == ["a", "b"]
    add(llm, "c", 7, 2)  # needs two; to evict b would free one
    llm.step()
    assert llm.counters.num_preemptions == 0


@pytest.mark.parametrize("found", [True, False])
def test_nobody_is_evicted_for_blocks_that_the_newcomer_finds(found: bool) -> None:
    """It shares two blocks that are in use, and needs one of its own, which is free."""
    llm = priority_engine(6)
    llm.add_request([1] * 9, GREEDY, request_id="a", priority=1)
    add(llm, "b", 7, 3)
    llm.step()
    llm.add_request([1 if found else 9] * 9, GREEDY, request_id="c", priority=2)
    llm.step()
    assert running(llm) == (["a", "c", "b"] if found else ["a", "c"])
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("num_held", [0, 1, 2, 3])
def test_an_urgent_request_comes_back_from_the_host_at_the_cost_of_others(num_held: int) -> None:
    """It needs two blocks, of six; b has two, and goes if fewer are free and they are enough."""
    llm = priority_engine(6, swap_space_blocks=6, enable_prefix_caching=False)
    add(llm, "c", 6, 1)
    llm.step()
    llm.preempt_request("c", "swap")
    llm.step()
    llm.set_priority("c", 9)
    add(llm, "a", 6, 0)
    add(llm, "b", 6, 5)
    llm.hold_blocks(2)
    llm.step()
    assert running(llm) == ["a", "b"]
    llm.set_priority("c", 2)
    llm.hold_blocks(num_held)
    llm.step()
    assert running(llm) == (["a", "c", "b"] if num_held == 0 else ["a", "c"])
    llm.scheduler.check_integrity()


def test_a_seat_is_taken_from_the_least_urgent() -> None:
    llm = priority_engine(64, max_num_seqs=2)
    add(llm, "a", 3, 1)
    add(llm, "b", 3, 2)
    llm.step()
    add(llm, "c", 3, 0)
    llm.step()
    assert running(llm) == ["c", "a"]


def test_the_victim_of_growth_is_the_least_urgent_though_it_came_first() -> None:
    llm = priority_engine(4)
    add(llm, "a", 7, 5)
    add(llm, "b", 7, 1)
    for _ in range(4):
        llm.step()
    assert running(llm) == ["b"]
    assert waiting(llm) == ["a"]


def test_a_preempted_request_keeps_its_place_among_equals() -> None:
    llm = priority_engine(64, max_num_seqs=2)
    for name in "abcd":
        add(llm, name, 3, 1)
    llm.step()
    llm.preempt_request("a")
    llm.step()
    assert waiting(llm)[0] == "a"
    llm.step()
    assert running(llm) == ["a", "b"]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_changed_priority_counts_from_the_next_step(is_running: bool) -> None:
    llm = priority_engine(64, max_num_seqs=1)
    add(llm, "a", 3, 1)
    add(llm, "b", 3, 1)
    llm.step()
    assert llm.set_priority(*(("a", 2) if is_running else ("b", 0)))
    llm.step()
    assert running(llm) == ["b"]
    assert waiting(llm) == ["a"]
    assert not llm.set_priority("gone", 1)


def test_scores_and_streams_have_a_place_too() -> None:
    llm = priority_engine(8)
    add(llm, "a", 9, 4)
    expected = engine().score([1, 2, 3], [4, 5, 6])
    assert llm.score([1, 2, 3], [4, 5, 6]) == expected
    tokens = [token for delta in llm.stream([9], GREEDY, priority=1) for token in delta.token_ids]
    assert tokens == generate_one(engine(), [9], GREEDY)["token_ids"]


@given(
    priorities=st.lists(st.integers(-3, 3), min_size=2, max_size=6), num_blocks=st.integers(5, 9)
)
def test_outputs_do_not_depend_on_priorities(priorities: list[int], num_blocks: int) -> None:
    prompts = [[index + 1] * (5 + index) for index in range(len(priorities))]
    llm = priority_engine(num_blocks)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=priorities)
    plain = engine().generate(prompts, GREEDY, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in plain]


def test_equal_priorities_are_first_come_first_served() -> None:
    prompts = [[index + 1] * 6 for index in range(5)]
    counters = []
    for policy in ("fcfs", "priority"):
        llm = engine(num_kv_blocks=6, scheduling_policy=policy)
        llm.generate(prompts, GREEDY, use_tqdm=False)
        counters.append(llm.counters)
    assert counters[0].num_preemptions > 0
    assert counters[0] == counters[1]


def test_a_priority_needs_the_policy() -> None:
    llm = engine()
    with pytest.raises(ConfigError, match='scheduling_policy="priority"'):
        llm.add_request([1], GREEDY, priority=1)
    with pytest.raises(ConfigError, match="scheduling_policy"):
        engine(scheduling_policy="fair")
    with pytest.raises(ConfigError, match="priorities"):
        priority_engine(9).generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1])


@pytest.mark.parametrize("space", [3, 4], ids=["recomputed", "copied"])
def test_room_to_grow_meanwhile_is_kept_only_where_blocks_are_copied(space: int) -> None:
    """The last of three has four blocks. Where the swap space takes them, they are free a step
    later, when the others will have begun a block each; else they are free at once."""
    llm = priority_engine(9, preemption_mode="swap", swap_space_blocks=space)
    for name, num_tokens in [("a", 7), ("b", 7), ("c", 15)]:
        add(llm, name, num_tokens, 2)
    llm.step()
    assert running(llm) == ["a", "b", "c"]
    add(llm, "d", 15, 1)
    llm.step()
    assert running(llm) == (["d", "a", "b"] if space < 4 else ["a"])


@pytest.mark.parametrize("num_blocks", [9, 10])
def test_who_finds_no_block_does_not_grow_until_the_victims_are_copied(num_blocks: int) -> None:
    """a and b begin a block in each step. With one free block only a gets on while c's four are
    copied, and d's two fit beside the three that they take in all; with two, d would need one more
    than that."""
    llm = engine(
        block_size=1,
        num_kv_blocks=num_blocks,
        scheduling_policy="priority",
        preemption_mode="swap",
        swap_space_blocks=8,
    )
    for name, num_tokens in [("a", 2), ("b", 2), ("c", 4)]:
        add(llm, name, num_tokens, 2)
    llm.step()
    add(llm, "d", 2, 1)
    llm.step()
    assert running(llm) == ["a", "b"]
    llm.step()
    assert running(llm) == ["d", "a", "b"]
