"""Decided ahead: who was given a token goes on in the next step; and who need not."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake, work_findings
from fake_trials import make_workload

from preempt_harness.checks import Code, Finding
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    Event,
    Forked,
    PlanApplied,
    PoolCounts,
    Preempted,
    Scheduled,
    TokensDelivered,
)

replace = msgspec.structs.replace
CAPABILITIES = ("recompute", "strict_order", "mixed_steps")


def judged(
    *events: Event,
    capabilities: tuple[str, ...] = CAPABILITIES,
    n: int = 1,
    max_tokens: int = 8,
    **config: object,
) -> list[Finding]:
    """Findings on a log that consists of these events; blocks of four tokens, eight a step."""
    workload = make_workload([2, 2], max_tokens=max_tokens)
    record = run_fake(workload)
    branched = [replace(item, sampling=replace(item.sampling, n=n)) for item in workload.requests]
    record.header = replace(
        record.header,
        workload=replace(workload, requests=branched).to_builtins(),
        capabilities=list(capabilities),
        block_size=4,
        num_blocks=8,
        config={"max_num_batched_tokens": 8, "max_num_seqs": 4, "async_scheduling": 1, **config},
    )
    record.events = list(events)
    return work_findings(record, "ahead")


def row(step: int, seq: str, end: int, *, gives: bool = True) -> list[Event]:
    """The newest token of a sequence is computed, and it is given another."""
    told = [TokensDelivered(step, seq, [1], None, "")] if gives else []
    return [Scheduled(step, seq, end - 1, end), *told]


def pool(step: int, held: int = 0) -> PoolCounts:
    return PoolCounts(step, 8, 4 - held, 0, 4, held)


def begun(num_blocks: int = 2) -> list[Event]:
    """Two requests that compute two tokens, and one more in each of two steps."""
    return [
        Arrived(0, "r0", [1, 1], 8, 0),
        Arrived(0, "r1", [1, 1], 8, 0),
        BlocksAllocated(0, "r0.0", list(range(num_blocks)), 0),
        BlocksAllocated(0, "r1.0", [5, 6], 0),
        Scheduled(0, "r0.0", 0, 2),
        Scheduled(0, "r1.0", 0, 2),
        TokensDelivered(0, "r0.0", [1], None, ""),
        TokensDelivered(0, "r1.0", [1], None, ""),
        pool(0),
        *row(1, "r0.0", 3),
        *row(1, "r1.0", 3),
        pool(1),
    ]


def left_out(*more: Event, held: int = 0) -> list[Event]:
    """The third step computes one of them only."""
    return [*more, *row(2, "r1.0", 4), pool(2, held)]


def test_who_stands_still_between_two_steps_is_found() -> None:
    (finding,) = judged(*begun(), *left_out())
    assert finding.code is Code.WORK_IDLE
    assert (finding.request, finding.step) == ("r0", 2)
    assert "its token number 4" in finding.message
    assert "computes 1 of 8 tokens" in finding.message


def test_who_goes_on_is_not() -> None:
    assert not judged(*begun(), *row(2, "r0.0", 4), *row(2, "r1.0", 4), pool(2))


def test_who_was_given_no_token_is_not_judged() -> None:
    events = [*begun()[:-3], pool(1)]  # nothing of r1 in the second step
    assert not judged(*events, *row(2, "r0.0", 4), pool(2))


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_there_must_have_been_room_when_it_was_decided(num_blocks: int) -> None:
    """For the fifth token; the block that comes in this step came too late."""
    events = begun(num_blocks)
    events += [*row(2, "r0.0", 4), *row(2, "r1.0", 4), pool(2)]
    late = [BlocksAllocated(3, "r0.0", [4], 0)] if num_blocks == 1 else []
    findings = judged(*events, *late, *row(3, "r1.0", 5), pool(3))
    assert len(findings) == num_blocks - 1


def test_tokens_to_spare_are_needed() -> None:
    assert not judged(*begun(), *left_out(), max_num_batched_tokens=1)


@pytest.mark.parametrize(
    "event",
    [
        Preempted(2, "r1", "recompute", "decode", "out_of_blocks", 2, 4),
        PlanApplied(2, "preempt:r1@step=2", "r1"),
        BlocksFreed(2, "r0.0", [0, 1]),
    ],
    ids=["preemption", "plan", "gone"],
)
def test_disturbed_steps_are_not_judged(event: Event) -> None:
    assert not judged(*begun(), *left_out(event))


def test_the_step_decided_before_a_disturbance_is_over_is_not_judged() -> None:
    events = begun()
    assert not judged(
        *events[:-1], PlanApplied(1, "preempt:r1@step=1", "r1"), events[-1], *left_out()
    )


def test_steps_with_withheld_blocks_are_not_judged() -> None:
    assert not judged(*begun(), *left_out(held=2))


@pytest.mark.parametrize("max_tokens", [3, 4])
def test_the_end_of_an_output_is_not_judged(max_tokens: int) -> None:
    """With one token more than it has got, nothing more is decided ahead."""
    assert len(judged(*begun(), *left_out(), max_tokens=max_tokens)) == max_tokens - 3


def branches() -> list[Event]:
    """A request of two outputs, the second of which begins with the first one's last block."""
    return [
        Arrived(0, "r0", [1, 1], 8, 0),
        BlocksAllocated(0, "r0.0", [1, 2], 0),
        Scheduled(0, "r0.0", 0, 2),
        Forked(0, "r0.0", "r0.1"),
        TokensDelivered(0, "r0.0", [1], None, ""),
        TokensDelivered(0, "r0.1", [1], None, ""),
        pool(0),
    ]


def test_branches_are_judged_when_all_have_begun_and_have_a_block_of_their_own() -> None:
    goes_on = [*row(1, "r0.0", 3), *row(1, "r0.1", 3), pool(1)]
    private = [BlocksReplaced(1, "r0.1", [0], [3])]
    left_behind = [*row(2, "r0.0", 4), pool(2)]
    (finding,) = judged(*branches(), *private, *goes_on, *left_behind, n=2)
    assert finding.request == "r0"
    assert not judged(*branches(), *goes_on, *left_behind, n=2)  # it is to copy a block first
    assert not judged(*branches(), *private, *row(1, "r0.0", 3), pool(1), n=2)
    assert not judged(*branches(), *private, *goes_on, *left_behind, n=3)


def test_beside_an_output_that_ends_the_other_is_not_judged() -> None:
    """It has room; the one that ends may have had none when the step was decided."""
    goes_on = [
        BlocksReplaced(1, "r0.1", [0], [3]),
        *(*row(1, "r0.0", 3), *row(1, "r0.1", 3)),
        pool(1),
    ]
    assert judged(*branches(), *goes_on, pool(2), n=2)
    assert not judged(*branches(), *goes_on, BlocksFreed(2, "r0.1", [2, 3]), pool(2), n=2)


def test_the_tokens_of_who_has_ended_since_were_not_left() -> None:
    """A request that ends takes its row with it; the step was decided with it."""
    rest = [Scheduled(2, "r2.0", 0, 7), pool(2)]
    assert len(judged(*begun(), *rest)) == 2
    assert not judged(*begun(), BlocksFreed(2, "r1.0", [6, 5]), *rest)


def test_only_engines_that_decide_ahead_and_promise_an_order() -> None:
    assert not judged(*begun(), *left_out(), async_scheduling=0)
    assert not judged(*begun(), *left_out(), capabilities=("recompute",))
