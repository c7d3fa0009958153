"""Generators aim: each workload has the property it is named for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from preempt_harness.generators import (
    FEATURES,
    FIRST_ORDINARY_ID,
    LATER_FEATURES,
    GeneratorError,
    PromptShape,
    block_edges,
    bystander,
    equal_later_blocks,
    later_sharer,
    long_prompt,
    random_tokens,
    random_workload,
    shape_prompt,
    shared_prefix,
    unequal_lengths,
)
from preempt_harness.workload import RequestSpec, Workload

SIZES = [1, 2, 4, 16]
AIMED: list[Callable[..., Workload]] = [
    block_edges,
    shared_prefix,
    equal_later_blocks,
    bystander,
    later_sharer,
    unequal_lengths,
]


def prompts(workload: Workload) -> list[list[int]]:
    return [request.prompt_token_ids for request in workload.requests]


@pytest.mark.parametrize("block_size", SIZES)
def test_block_edges_stand_on_both_sides_of_a_boundary(block_size: int) -> None:
    workload = block_edges(vocab_size=64, block_size=block_size, seed=0, blocks=2)
    lengths = [len(prompt) for prompt in prompts(workload)]
    assert lengths == [2 * block_size - 1, 2 * block_size, 2 * block_size + 1]


@pytest.mark.parametrize("block_size", SIZES)
def test_shared_prefixes_are_full_blocks_and_then_differ(block_size: int) -> None:
    first, *others = prompts(shared_prefix(vocab_size=64, block_size=block_size, seed=0))
    assert len(first) == 2 * block_size
    assert all(other[: len(first)] == first and len(other) > len(first) for other in others)


@pytest.mark.parametrize("block_size", SIZES)
def test_equal_later_blocks_stand_under_different_first_blocks(block_size: int) -> None:
    for seed in range(20):  # a small vocabulary, so that first tokens would collide by chance
        one, other, again = prompts(
            equal_later_blocks(vocab_size=8, block_size=block_size, seed=seed)
        )
        assert one == again
        assert one[0] != other[0]
        assert one[block_size:] == other[block_size:]
        assert len(one) == 3 * block_size + 1


def test_a_bystander_arrives_later_and_needs_what_the_victim_frees() -> None:
    workload = bystander(vocab_size=64, block_size=4, seed=0)
    _, victim, late = workload.requests
    assert victim.arrival_step < late.arrival_step
    assert victim.num_prompt_tokens == late.num_prompt_tokens
    assert victim.prompt_token_ids != late.prompt_token_ids


def test_a_later_sharer_begins_with_the_victims_full_blocks() -> None:
    other, victim, sharer = later_sharer(vocab_size=64, block_size=4, seed=0).requests
    assert sharer.arrival_step > victim.arrival_step
    assert sharer.prompt_token_ids[:8] == victim.prompt_token_ids[:8]
    assert sharer.prompt_token_ids != victim.prompt_token_ids
    assert other.prompt_token_ids[:4] != victim.prompt_token_ids[:4]


def test_unequal_lengths_differ_several_times_over() -> None:
    lengths = [
        len(prompt) for prompt in prompts(unequal_lengths(vocab_size=64, block_size=8, seed=0))
    ]
    assert min(lengths[0::2]) > 3 * max(lengths[1::2]) / 2


def test_a_long_prompt_takes_several_chunks() -> None:
    short, long = long_prompt(vocab_size=64, seed=0, max_num_batched_tokens=16, chunks=3).requests
    assert short.num_prompt_tokens == 1
    assert long.num_prompt_tokens == 49
    assert short.sampling.max_tokens > 3  # it decodes beside every chunk


@pytest.mark.parametrize("generator", AIMED)
@pytest.mark.parametrize("block_size", SIZES)
def test_aimed_workloads_repeat_for_a_seed_and_name_requests_in_order(
    generator: Callable[..., Workload], block_size: int
) -> None:
    workload = generator(vocab_size=64, block_size=block_size, seed=3)
    assert workload == generator(vocab_size=64, block_size=block_size, seed=3)
    assert workload != generator(vocab_size=64, block_size=block_size, seed=4)
    assert_well_formed(workload, 64)


def test_random_workloads_are_well_formed_repeat_and_differ() -> None:
    drawn = [random_workload(seed, vocab_size=64, block_size=4) for seed in range(200)]
    assert drawn == [random_workload(seed, vocab_size=64, block_size=4) for seed in range(200)]
    assert all(one != other for one, other in pairwise(drawn))
    for workload in drawn:
        assert_well_formed(workload, 64)


def test_random_workloads_have_what_their_features_say_and_nothing_else() -> None:
    def drawn(*features: str) -> list[Workload]:
        return [
            random_workload(seed, vocab_size=64, block_size=4, features=features)
            for seed in range(60)
        ]

    def requests_of(workloads: list[Workload]) -> list[RequestSpec]:
        return [request for workload in workloads for request in workload.requests]

    plain = drawn()
    assert not any(workload.operations for workload in plain)
    for request in requests_of(plain):
        assert request.arrival_step == 0
        assert request.sampling.temperature == 0
        assert not request.sampling.stop_token_ids
    assert any(workload.operations for workload in drawn("operations"))
    assert any(r.arrival_step for r in requests_of(drawn("late_arrivals")))
    assert any(r.sampling.temperature for r in requests_of(drawn("sampling")))
    assert any(r.sampling.stop_token_ids for r in requests_of(drawn("stops")))
    assert any(r.num_prompt_tokens > 20 for r in requests_of(drawn("long_prompts")))


def test_later_features_change_a_workload_that_is_drawn_already() -> None:
    def drawn(*features: str) -> list[Workload]:
        return [
            random_workload(seed, vocab_size=64, block_size=4, features=features)
            for seed in range(60)
        ]

    plain = drawn("sampling", "beams")
    for name in LATER_FEATURES:
        changed = drawn("sampling", "beams", name)
        assert changed != plain
        for one, other in zip(plain, changed, strict=True):
            assert_well_formed(other, 64)
            assert prompts(one) == prompts(other)
    few = {r.sampling.max_tokens for w in drawn("few_tokens") for r in w.requests}
    assert {0, 1} < few
    assert {r.sampling.ignore_eos for w in drawn("eos") for r in w.requests} == {False, True}
    for name, field in (
        ("bad_words", "bad_words"),
        ("stop_strings", "stop"),
        ("grammars", "regex"),
    ):
        specs = [r.sampling for w in drawn("beams", name) for r in w.requests]
        assert all(bool(getattr(spec, field)) != (spec.beam is not None) for spec in specs)


def test_a_second_batch_arrives_when_the_first_has_ended() -> None:
    for seed in range(30):
        workload = random_workload(seed, vocab_size=64, block_size=4, features=["second_batch"])
        requests = workload.requests
        half = (len(requests) + 1) // 2
        tokens = sum(r.num_prompt_tokens + r.sampling.max_tokens for r in requests[:half])
        assert all(r.arrival_step > tokens for r in requests[half:])


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(GeneratorError, match=r"'stop' is unknown\. Known: .*stops"):
        random_workload(0, vocab_size=64, block_size=4, features=["stop"])
    assert len(set(FEATURES)) == len(FEATURES)


def test_a_vocabulary_without_ordinary_ids_is_refused() -> None:
    with pytest.raises(GeneratorError, match="vocab_size=7 leaves too few"):
        random_tokens(7, "text", 3)


def test_a_shape_decides_length_and_sharing() -> None:
    def prompt(index: int, **shape: int | bool) -> list[int]:
        return shape_prompt(
            PromptShape(num_tokens=10, **shape),  # type: ignore[arg-type]
            vocab_size=64,
            block_size=4,
            seed=0,
            index=index,
        )

    shared = prompt(0, num_shared_tokens=6), prompt(1, num_shared_tokens=6)
    assert shared[0][:6] == shared[1][:6]
    assert shared[0][6:] != shared[1][6:]
    assert prompt(1, num_shared_tokens=6, group=1)[:6] != shared[0][:6]
    assert prompt(0, num_shared_tokens=99) == prompt(1, num_shared_tokens=99)
    assert {len(prompt(0, num_shared_tokens=count)) for count in (0, 6, 99)} == {10}


def assert_well_formed(workload: Workload, vocab_size: int) -> None:
    ids = [request.id for request in workload.requests]
    steps = [request.arrival_step for request in workload.requests]
    assert ids == [f"r{index}" for index in range(len(ids))]
    assert steps == sorted(steps)
    for request in workload.requests:
        assert request.prompt_token_ids
        assert all(FIRST_ORDINARY_ID <= token < vocab_size for token in request.prompt_token_ids)
        assert 0 <= request.sampling.min_tokens <= request.sampling.max_tokens
    for operation in workload.operations:
        kinds = ("abort", "reset_prefix_cache", "reset_running_requests", "set_priority")
        assert operation.kind in kinds
        assert (operation.request in ids) == (operation.kind in ("abort", "set_priority"))
