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
    Forked,
    Header,
    PoolCounts,
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
    keeps: bool = False,
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
        block_size=4,
        num_blocks=20,
        capabilities=["recompute", "keeps_freed_blocks"] if keeps else [],
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
    assert judge([*begun, *swapped, *rest], keeps=True)
    assert judge([*begun, *rest])


def test_old_content_that_comes_back_after_a_reset_is_not_offered() -> None:
    swapped = [
        Preempted(4, "r0", "swap", "decode", "forced", 12, 13),
        BlocksFreed(4, "r0.0", [0, 1, 2]),
        CacheReset(5),
        BlocksAllocated(5, "r0.0", [0, 1, 2]),
        Scheduled(5, "r0.0", 12, 13),
    ]
    late = new([*PROMPT, 5], [10, 11, 12], 0, step=9)
    assert not judge([*OLD, *swapped, *late], keeps=True)
    swapped.pop(2)
    assert judge([*OLD, *swapped, *late], keeps=True)


GIVEN_UP = [*OLD, BlocksFreed(4, "r0.0", [2, 1, 0])]
LATE = new([*PROMPT, 5], [10, 11, 12], 0, step=5)


def test_what_nobody_holds_is_found_by_engines_that_keep_it() -> None:
    assert not judge([*GIVEN_UP, *LATE])
    (finding,) = judge([*GIVEN_UP, *LATE], keeps=True)
    assert "first 2 blocks" in finding.message


@pytest.mark.parametrize(
    "between",
    [
        [Arrived(4, "r2", [7], 8), BlocksAllocated(4, "r2.0", [2, 1, 0])],
        [CacheReset(4)],
        [PoolCounts(4, num_blocks=20, free=10, cached=9, used=0, held=1)],
    ],
    ids=["handed-out", "reset", "withheld"],
)
def test_what_may_be_gone_need_not_be_found(between: list[AnyEvent]) -> None:
    assert not judge([*GIVEN_UP, *between, *LATE], keeps=True)


def test_what_the_engine_keeps_for_itself_is_not_withheld() -> None:
    pool = PoolCounts(4, num_blocks=20, free=10, cached=9, used=0, held=1)
    config = {"enable_prefix_caching": True, "reserved_blocks": 1}
    assert judge([*GIVEN_UP, pool, *LATE], keeps=True, config=config)


def test_what_was_given_up_at_once_may_not_have_been_offered() -> None:
    at_once = [*OLD[:4], BlocksFreed(1, "r0.0", [2, 1, 0])]
    assert not judge([*at_once, *LATE], keeps=True)


@pytest.mark.parametrize(
    ("taken", "blamed"),
    [([2], []), ([2, 1, 0], []), ([1], [1]), ([2, 0], [0]), ([0, 1, 2], [0])],
)
def test_ends_of_prefixes_go_before_their_beginnings(taken: list[int], blamed: list[int]) -> None:
    other = [Arrived(5, "r2", [7] * 5, 8), BlocksAllocated(5, "r2.0", taken)]
    found = judge([*GIVEN_UP, *other], keeps=True)
    assert [finding.block for finding in found] == blamed
    assert not judge([*GIVEN_UP, *other])


def test_an_end_that_somebody_else_has_is_not_missed() -> None:
    """Two hold the beginning in blocks of their own: which of them is found is not known."""
    twice = [
        Arrived(1, "r2", [*PROMPT[:4], 9], 8),
        BlocksAllocated(1, "r2.0", [7, 8]),
        Scheduled(1, "r2.0", 0, 5),
        TokensDelivered(1, "r2.0", [99]),
    ]
    other = [Arrived(5, "r3", [7], 8), BlocksAllocated(5, "r3.0", [0])]
    assert not judge([*OLD, *twice, GIVEN_UP[-1], *other], keeps=True)


def test_a_block_that_is_computed_before_its_last_token_is_known_counts() -> None:
    """As steps decided ahead do."""
    twice: list[AnyEvent] = [
        Arrived(1, "r2", PROMPT[:3], 8),
        BlocksAllocated(1, "r2.0", [7, 8]),
        Scheduled(1, "r2.0", 0, 3),
        Scheduled(2, "r2.0", 3, 4),
        TokensDelivered(1, "r2.0", PROMPT[3:4]),
    ]
    other = [Arrived(5, "r3", [7], 8), BlocksAllocated(5, "r3.0", [0])]
    assert judge([*OLD, *twice[:3], GIVEN_UP[-1], *other], keeps=True)
    assert not judge([*OLD, *twice, GIVEN_UP[-1], *other], keeps=True)


def test_where_nothing_is_shared_nothing_is_judged() -> None:
    missed = [*OLD, *new([*PROMPT, 5], [10, 11, 12], 0)]
    assert not judge(missed, config={})
    assert not judge(missed, config={"enable_prefix_caching": True, "num_speculative_tokens": 2})
    assert not judge(missed, n=2)
    assert not judge(missed, prompt_logprobs=0)


# Engines whose cache lasts ------------------------------------------------------------------------

BRANCHES = [
    Arrived(0, "r0", PROMPT, 8),
    BlocksAllocated(0, "r0.0", [0, 1, 2]),
    Scheduled(0, "r0.0", 0, 11),
    Forked(0, "r0.0", "r0.1"),
    TokensDelivered(0, "r0.0", [30]),
    TokensDelivered(0, "r0.1", [31]),
    BlocksAllocated(1, "r0.1", [3]),
    BlocksFreed(1, "r0.1", [2]),
    Scheduled(1, "r0.0", 11, 12),
    Scheduled(1, "r0.1", 11, 12),
    TokensDelivered(1, "r0.0", [32]),
    TokensDelivered(1, "r0.1", [33]),
    Preempted(5, "r0", "recompute", "decode", "forced", 24, 26),
    BlocksFreed(5, "r0.0", [2, 1, 0]),
    BlocksFreed(5, "r0.1", [3, 1, 0]),
]


def test_each_branch_finds_what_it_wrote() -> None:
    first = BlocksAllocated(6, "r0.0", [0, 1, 2, 4], 3)
    misses = BlocksAllocated(6, "r0.1", [0, 1, 5, 6], 2)
    finds = BlocksAllocated(6, "r0.1", [0, 1, 3, 5], 3)
    (finding,) = judge([*BRANCHES, first, misses], keeps=True, n=2)
    assert finding.sequence == "r0.1"
    assert not judge([*BRANCHES, first, finds], keeps=True, n=2)
    assert not judge([*BRANCHES, first, misses], n=2)


def test_branches_that_come_back_from_the_host_need_no_hits() -> None:
    swapped = [
        msgspec.structs.replace(event, mode="swap") if isinstance(event, Preempted) else event
        for event in BRANCHES
    ]
    back = [BlocksAllocated(6, f"r0.{branch}", [9 + branch, 7, 5], 0) for branch in (0, 1)]
    assert not judge([*swapped, *back], keeps=True, n=2)


def test_branches_of_what_goes_on_after_a_reset_are_not_offered() -> None:
    reset = [BRANCHES[0], BRANCHES[1], CacheReset(0), *BRANCHES[2:]]
    again = [BlocksAllocated(6, f"r0.{branch}", [9 + branch, 7, 5], 0) for branch in (0, 1)]
    assert not judge([*reset, *again], keeps=True, n=2)
    before = [BRANCHES[0], CacheReset(0), *BRANCHES[1:]]
    assert judge([*before, *again], keeps=True, n=2)


@pytest.mark.parametrize("returns", [True, False])
def test_what_came_back_and_computed_nothing_may_be_found_in_either_place(returns: bool) -> None:
    """The first of two cached blocks is handed out; the second is found through it, unless the same
    content, brought back from the host, stands elsewhere too."""
    out = Preempted(4, "r0", "swap", "decode", "forced", 12, 13)
    log = [*OLD, out, BlocksFreed(4, "r0.0", [2, 1, 0])]
    if returns:
        lost = Preempted(6, "r0", "recompute", "just_resumed", "forced", 12, 13)
        log += [
            BlocksAllocated(5, "r0.0", [5, 6, 7], 0),
            lost,
            BlocksFreed(6, "r0.0", [7, 6, 5]),
        ]
    found = judge([*log, *new([90, 91, 92], [0], 0, step=9)], keeps=True)
    assert [finding.block for finding in found] == ([] if returns else [0])
