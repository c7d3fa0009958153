"""Standing still: who runs and has blocks computes what the budget leaves; and who need not."""

from __future__ import annotations

import msgspec
from fake_engine import run_fake, work_findings
from fake_trials import make_workload

from preempt_harness.checks import Code, Finding
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    Event,
    Forked,
    PlanApplied,
    PoolCounts,
    Preempted,
    Scheduled,
    TokensChosen,
    TokensDelivered,
)

replace = msgspec.structs.replace
CAPABILITIES = ("recompute", "strict_order", "mixed_steps")


def judged(
    *events: Event, capabilities: tuple[str, ...] = CAPABILITIES, n: int = 1, **config: object
) -> list[Finding]:
    """Findings on a log that consists of these events; blocks of four tokens, eight a step."""
    workload = make_workload([6, 9], max_tokens=4)
    record = run_fake(workload)
    branched = [replace(item, sampling=replace(item.sampling, n=n)) for item in workload.requests]
    record.header = replace(
        record.header,
        workload=replace(workload, requests=branched).to_builtins(),
        capabilities=list(capabilities),
        block_size=4,
        num_blocks=8,
        config={"max_num_batched_tokens": 8, "max_num_seqs": 4, **config},
    )
    record.events = list(events)
    return work_findings(record, "standstill")


def pool(step: int, held: int = 0) -> PoolCounts:
    return PoolCounts(step, 8, 5 - held, 0, 3, held)


def prefill(end: int, *more: Event, held: int = 0, **config: object) -> list[Finding]:
    """r0, of six tokens and two blocks, is computed up to `end` in its first step."""
    log = [Arrived(0, "r0", [1] * 6, 4, 0), BlocksAllocated(0, "r0.0", [0, 1], 0)]
    rows = [Scheduled(0, "r0.0", 0, end)] if end else []
    return judged(*log, *rows, *more, pool(0, held), **config)


def test_half_a_chunk_beside_unused_tokens_is_found() -> None:
    (found,) = prefill(3)
    assert (found.code, found.step, found.request) == (Code.WORK_IDLE, 0, "r0")
    assert "all its 6 known tokens" in found.message
    assert "up to position 3" in found.message
    assert prefill(6) == []
    assert prefill(3, max_num_batched_tokens=3) == []


def test_who_computes_nothing_is_found() -> None:
    (found,) = prefill(0)
    assert "computes nothing" in found.message


def test_tokens_are_known_from_the_step_after_their_delivery() -> None:
    log: list[Event] = [TokensDelivered(0, "r0.0", [5], None, ""), pool(0)]
    (found,) = prefill(6, *log, pool(1))
    assert (found.step, "all its 7 known tokens" in found.message) == (1, True)
    assert prefill(6, *log, Scheduled(1, "r0.0", 6, 7)) == []


def test_who_lacks_a_block_stands_still_by_right() -> None:
    tokens = TokensDelivered(0, "r0.0", [5, 5, 5], None, "")
    assert prefill(6, tokens, pool(0), pool(1)) == []


def test_steps_and_engines_with_reasons_of_their_own_are_excused() -> None:
    assert prefill(3, PlanApplied(0, "squeeze:all@0..3")) == []
    assert prefill(3, Preempted(0, "r1", "recompute", "decode", "forced", 6, 7)) == []
    assert prefill(3, held=1) == []
    assert prefill(3, held=1, reserved_blocks=1)  # the engine's own
    assert prefill(3, async_scheduling=1) == []
    log: list[Event] = [
        Arrived(0, "r0", [1] * 6, 4, 0),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        pool(0),
    ]
    assert judged(*log)
    assert judged(*log, capabilities=("recompute", "queue_order", "mixed_steps"))
    assert judged(*log, capabilities=("recompute", "mixed_steps")) == []


def test_an_output_of_several_that_computes_goes_as_far_as_it_can() -> None:
    """The others may wait for what it computes; they are not judged in that step."""
    log: list[Event] = [
        Arrived(0, "r0", [1] * 6, 4, 0),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        Scheduled(0, "r0.0", 0, 6),
        Forked(0, "r0.0", "r0.1"),
        TokensDelivered(0, "r0.0", [5], None, ""),
        TokensDelivered(0, "r0.1", [6], None, ""),
        pool(0),
        BlocksFreed(1, "r0.0", [0, 1]),
        BlocksFreed(1, "r0.1", [0, 1]),
        BlocksAllocated(1, "r0.0", [0, 1], 0),
        BlocksAllocated(1, "r0.1", [0, 2], 1),
    ]
    (found,) = judged(*log, Scheduled(1, "r0.0", 0, 3), pool(1), n=2)
    assert (found.step, "up to position 3" in found.message) == (1, True)
    assert judged(*log, Scheduled(1, "r0.0", 0, 7), pool(1), n=2) == []
    beam: list[Event] = [TokensChosen(1, "r0.1", [7]), pool(1), Scheduled(2, "r0.1", 4, 7)]
    (found,) = judged(*log, Scheduled(1, "r0.0", 0, 7), *beam, pool(2), n=2)
    assert (found.step, "all its 8 known tokens" in found.message) == (2, True)


def test_a_victim_of_others_is_no_reason_to_stand_still() -> None:
    assert prefill(3, Preempted(0, "r1", "recompute", "decode", "out_of_blocks", 6, 7))


def decodes(*rows: Scheduled, token_for: str = "r1.0", **config: object) -> list[Finding]:
    """Two requests have their prompts, of an engine whose prefills share no step with decodes."""
    return judged(
        Arrived(0, "r0", [1] * 6, 4, 0),
        Arrived(0, "r1", [1] * 3, 4, 0),
        BlocksAllocated(0, "r0.0", [0, 1], 0),
        BlocksAllocated(0, "r1.0", [2], 0),
        Scheduled(0, "r0.0", 0, 6),
        TokensDelivered(0, "r0.0", [5], None, ""),
        pool(0),
        Scheduled(1, "r1.0", 0, 3),
        TokensDelivered(1, token_for, [5], None, ""),
        pool(1),
        *rows,
        pool(2),
        capabilities=("recompute", "queue_order"),
        **config,
    )


def test_where_prefills_stop_decodes_only_those_count_that_decode() -> None:
    both = (Scheduled(2, "r0.0", 6, 7), Scheduled(2, "r1.0", 3, 4))
    assert decodes(*both) == []
    (found,) = decodes(both[1])
    assert (found.step, found.request) == (2, "r0")
    assert decodes(both[1], max_num_seqs=1) == []  # no place for another
    assert decodes(Scheduled(2, "r1.0", 2, 3), token_for="r9.0") == []  # it is still prefilled
