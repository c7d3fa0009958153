"""What a running request holds is not computed again: what is certain to be found, and what not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.record import (
    AnyEvent,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    Header,
    Preempted,
    Scheduled,
    TokensDelivered,
    TrialRecord,
    event_names,
)
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

PROMPT = list(range(10, 21))  # two blocks of four, and three tokens

OLD = [
    Arrived(0, "r0", PROMPT, 8),
    BlocksAllocated(0, "r0.0", [0, 1, 2]),
    Scheduled(0, "r0.0", 0, 11),
    TokensDelivered(0, "r0.0", [30]),
    Scheduled(1, "r0.0", 11, 12),
    TokensDelivered(1, "r0.0", [31]),
]


def new(prompt: list[int], blocks: list[int], num_cached: int, *, step: int = 4) -> list[AnyEvent]:
    return [Arrived(step, "r1", prompt, 8), BlocksAllocated(step, "r1.0", blocks, num_cached)]


def judge(
    events: list[AnyEvent],
    *,
    config: Any = None,
    promise: str = "",
    plan: str = "",
    **sampling: Any,
) -> list[Finding]:
    prompts = {item.request: item.prompt_token_ids for item in events if isinstance(item, Arrived)}
    workload = Workload(
        requests=[
            RequestSpec(id=name, prompt_token_ids=prompt, sampling=SamplingSpec(**sampling))
            for name, prompt in prompts.items()
        ]
    )
    header = Header(
        workload=workload.to_builtins(),
        engine="by hand",
        model="none",
        config={"enable_prefix_caching": True} if config is None else config,
        capabilities=[promise] if promise else [],
        plan=plan,
        block_size=4,
        num_blocks=20,
        observed=sorted(event_names()),
    )
    found = run_checks(TrialRecord(header=header, events=events), ["work"]).findings
    return [finding for finding in found if finding.code == Code.WORK_CACHE_MISS]


@pytest.mark.parametrize("num_cached", [0, 1])
def test_fewer_hits_than_a_running_request_has_blocks_are_found(num_cached: int) -> None:
    blocks = [*range(num_cached), *range(10, 14 - num_cached)]
    (finding,) = judge([*OLD, *new([*PROMPT, 5], blocks, num_cached)])
    assert (finding.step, finding.sequence) == (4, "r1.0")
    assert f"{num_cached} blocks of the prefix cache" in finding.message
    assert "first 2 blocks" in finding.message


def test_as_many_hits_are_enough() -> None:
    assert not judge([*OLD, *new([*PROMPT, 5], [0, 1, 10], 2)])


def test_blocks_of_outputs_count() -> None:
    prompt = [*PROMPT, 30, 5]
    assert judge([*OLD, *new(prompt, [0, 1, 10, 11], 2)])
    assert not judge([*OLD, *new(prompt, [0, 1, 2, 10], 3)])


def test_a_token_is_left_to_be_computed() -> None:
    assert not judge([*OLD, *new(PROMPT[:8], [0, 10], 1)])
    assert judge([*OLD, *new(PROMPT[:9], [0, 10, 11], 1)])


@pytest.mark.parametrize(
    "between",
    [
        [BlocksFreed(3, "r0.0", [2, 1, 0])],
        [CacheReset(3)],
        # Somebody else computed the same content: which of the blocks is found is not known.
        [
            Arrived(2, "r2", PROMPT[:4], 8),
            BlocksAllocated(2, "r2.0", [7]),
            Scheduled(2, "r2.0", 0, 4),
            TokensDelivered(2, "r2.0", [99]),
        ],
    ],
    ids=["freed", "reset", "twice"],
)
def test_what_is_not_certain_need_not_be_found(between: list[AnyEvent]) -> None:
    assert not judge([*OLD, *between, *new([*PROMPT, 5], [10, 11, 12], 0)])


def test_what_goes_on_after_a_reset_need_not_be_offered() -> None:
    first = [
        Arrived(2, "r2", PROMPT[:5], 8),
        CacheReset(2),
        BlocksAllocated(2, "r2.0", [7, 8]),
        Scheduled(2, "r2.0", 0, 5),
    ]
    whole = [Arrived(0, "r0", PROMPT, 8), BlocksAllocated(0, "r0.0", [0, 1, 2])]
    halves = [Scheduled(0, "r0.0", 0, 4), *first, Scheduled(2, "r0.0", 4, 11)]
    miss = new([*PROMPT, 5], [7, 10, 11], 1, step=6)
    assert not judge([*whole, *halves, *miss])
    halves.remove(first[1])
    first[1:3] = [BlocksAllocated(2, "r2.0", [0, 8], 1), Scheduled(2, "r2.0", 4, 5)]
    assert judge([*whole, Scheduled(0, "r0.0", 0, 4), *first[:3], *halves[-1:], *miss])


def test_who_comes_too_soon_finds_nothing() -> None:
    assert not judge([*OLD[:4], *new([*PROMPT, 5], [10, 11, 12], 0, step=1)])
    assert judge([*OLD[:4], *new([*PROMPT, 5], [10, 11, 12], 0, step=2)])
    ahead = {"enable_prefix_caching": True, "async_scheduling": 1}
    late = [*OLD[:4], *new([*PROMPT, 5], [10, 11, 12], 0, step=3)]
    assert not judge(late, config=ahead)


def test_whose_blocks_come_back_from_the_host_needs_no_hits() -> None:
    lost = Preempted(4, "r1", "swap", "decode", "forced", 4, 12)
    back = [*new([*PROMPT, 5], [10, 11, 12], 0)]
    assert not judge([*OLD, lost, *back])
    recompute = msgspec.structs.replace(lost, mode="recompute")  # its host blocks are lost, too
    assert judge([*OLD, lost, recompute, *back])


def test_what_goes_on_after_a_swap_need_not_be_offered() -> None:
    whole = [Arrived(0, "r0", PROMPT, 8), BlocksAllocated(0, "r0.0", [0, 1, 2])]
    begun = [*whole, Scheduled(0, "r0.0", 0, 2)]
    swapped = [
        Preempted(1, "r0", "swap", "prefill_first", "forced", 2, 11),
        BlocksFreed(1, "r0.0", [0, 1, 2]),
        BlocksAllocated(2, "r0.0", [0, 1, 2]),
    ]
    rest = [Scheduled(2, "r0.0", 2, 11), *new([*PROMPT, 5], [10, 11, 12], 0, step=6)]
    assert not judge([*begun, *swapped, *rest])
    assert judge([*begun, *rest])


def test_where_nothing_is_shared_nothing_is_judged() -> None:
    missed = [*OLD, *new([*PROMPT, 5], [10, 11, 12], 0)]
    assert not judge(missed, config={})
    assert not judge(missed, config={"enable_prefix_caching": True, "num_speculative_tokens": 2})
    assert not judge(missed, n=2)
    assert not judge(missed, prompt_logprobs=0)


FREED = BlocksFreed(4, "r0.0", [2, 1, 0])


def test_freed_blocks_that_are_promised_are_to_be_found() -> None:
    missed = [*OLD, FREED, *new([*PROMPT, 5], [10, 11, 12], 0, step=5)]
    (finding,) = judge(missed, promise="keeps_freed")
    assert "the pool keeps the first 2 blocks" in finding.message
    assert not judge(missed)
    assert not judge(missed, promise="keeps_freed", plan="squeeze:all@1..2")
    ahead = {"enable_prefix_caching": True, "async_scheduling": 1}
    assert not judge(missed, promise="keeps_freed", config=ahead)
    found = [*OLD, FREED, *new([*PROMPT, 5], [0, 1, 12], 2, step=5)]
    assert not judge(found, promise="keeps_freed")


def test_what_was_handed_out_again_or_came_too_late_is_not_kept() -> None:
    taken = [Arrived(4, "r2", [3] * 4, 8), BlocksAllocated(4, "r2.0", [2, 1])]
    one = new([*PROMPT, 5], [0, 11, 12], 1, step=5)
    assert not judge([*OLD, FREED, *taken, *one], promise="keeps_freed")
    early = msgspec.structs.replace(FREED, step=1)
    missed = new([*PROMPT, 5], [10, 11, 12], 0, step=5)
    assert not judge([*OLD, early, *missed], promise="keeps_freed")
    swapped = Preempted(4, "r0", "swap", "decode", "forced", 12, 13)
    assert not judge([*OLD, swapped, FREED, *missed], promise="keeps_freed")


@pytest.mark.parametrize(("taken", "is_found"), [([0], True), ([2], False), ([2, 1], False)])
def test_a_beginning_outlives_what_follows_it(taken: list[int], is_found: bool) -> None:
    other = [Arrived(5, "r2", [3] * 8, 8), BlocksAllocated(5, "r2.0", taken)]
    later = [Arrived(6, "r3", [4] * 4, 8), BlocksAllocated(6, "r3.0", [12])]
    found = judge([*OLD, FREED, *other, *later], promise="keeps_freed")
    assert bool(found) == is_found
    if is_found:
        assert (found[0].step, found[0].block) == (5, 0)
        assert "while block 1, which goes on from its content" in found[0].message
    assert not judge([*OLD, FREED, *other, *later])
