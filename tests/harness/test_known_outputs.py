"""Prompts go on behind outputs, and limits lie within them, where the generators say."""

from __future__ import annotations

import random

from preempt_harness.generators import random_tokens, shared_prefix
from preempt_harness.known_outputs import is_plain, with_continuation, with_followers, with_limits
from preempt_harness.workload import SamplingSpec, Workload

SIZE = 4


def drawn(seed: int) -> tuple[Workload, list[int]]:
    """A workload, and a text of its first request with 16 outputs."""
    workload = shared_prefix(vocab_size=64, block_size=SIZE, seed=seed)
    output = random_tokens(64, f"{seed}/output", 16)
    return workload, [*workload.requests[0].prompt_token_ids, *output]


def assert_in_order(workload: Workload) -> None:
    steps = [request.arrival_step for request in workload.requests]
    assert [request.id for request in workload.requests] == [f"r{i}" for i in range(len(steps))]
    assert steps == sorted(steps)


def test_a_continuation_begins_with_another_requests_text() -> None:
    at_its_end = 0
    for seed in range(40):
        workload, text = drawn(seed)
        changed = with_continuation(random.Random(seed), workload, text=text, of=0, block_size=4)
        assert_in_order(changed)
        (late,) = [r for r in changed.requests if r.arrival_step]
        first = changed.requests[0]
        assert late.prompt_token_ids[:-1] == text[: late.num_prompt_tokens - 1]
        assert late.num_prompt_tokens >= first.num_prompt_tokens
        total = first.num_prompt_tokens + first.sampling.max_tokens
        at_its_end += total % 4 == 0 and late.num_prompt_tokens > total
    assert at_its_end


def test_followers_begin_with_a_text_that_ends_with_a_block() -> None:
    ends, beyond = set(), 0
    for seed in range(60):
        workload, text = drawn(seed)
        changed = with_followers(random.Random(seed), workload, text=text, of=0, block_size=SIZE)
        assert_in_order(changed)
        assert len(changed.requests) == len(workload.requests)
        leader = changed.requests[0]
        prompt, sampling = leader.num_prompt_tokens, leader.sampling
        assert is_plain(sampling)
        total = prompt + sampling.max_tokens
        if sampling.stop_token_ids:
            total = prompt + text[prompt:].index(sampling.stop_token_ids[0]) + 1
            assert sampling.max_tokens > total - prompt
        assert total % SIZE == 0
        ends.add(bool(sampling.stop_token_ids))
        followers = [request for request in changed.requests if request.arrival_step]
        assert followers
        for request in followers:
            common = next(
                (
                    i
                    for i, pair in enumerate(zip(request.prompt_token_ids, text, strict=False))
                    if pair[0] != pair[1]
                ),
                min(request.num_prompt_tokens, len(text)),
            )
            assert common >= (prompt // SIZE + 1) * SIZE - 1
            beyond += common >= total and request.num_prompt_tokens > total
    assert ends == {True, False}
    assert beyond > 20


def test_limits_lie_close_together_within_outputs() -> None:
    seen = set()
    for seed in range(60):
        workload, text = drawn(seed)
        prompt = workload.requests[0].num_prompt_tokens
        output = text[prompt:]
        changed = with_limits(random.Random(seed), workload, outputs={0: output}, block_size=SIZE)
        assert changed.requests[1:] == workload.requests[1:]
        sampling = changed.requests[0].sampling
        (stop,) = sampling.stop_token_ids
        place = output.index(stop)
        assert 0 <= sampling.min_tokens <= sampling.max_tokens <= len(output) + 1
        seen.add(("least", sampling.min_tokens - place))
        seen.add(("most", sampling.max_tokens - place))
        seen.add(("boundary", (prompt + place + 1) % SIZE == 0))
    assert {("least", 0), ("least", 1), ("most", 0), ("most", 1), ("boundary", True)} <= seen
    assert any(name == "most" and distance > 2 for name, distance in seen)


def test_an_output_that_repeats_one_token_has_no_place_for_a_stop() -> None:
    workload, _ = drawn(0)
    changed = with_limits(random.Random(0), workload, outputs={0: [7] * 9}, block_size=SIZE)
    assert changed == workload


def test_plain_is_what_only_the_model_decides() -> None:
    assert is_plain(SamplingSpec(stop_token_ids=(5,)))
    assert not is_plain(SamplingSpec(temperature=0.5))
    assert not is_plain(SamplingSpec(min_tokens=1))
