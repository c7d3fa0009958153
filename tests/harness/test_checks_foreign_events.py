"""Events that only some engines have: replaced blocks, and branches that are preempted one by one.

transformers' continuous batching has both: a block whose content is in the cache already is given
up for the one there, and every output of a request is a request of its own to the scheduler.
"""

from __future__ import annotations

from typing import Any

from preempt_harness.checks import run_checks
from preempt_harness.checks.progress import step_bounds
from preempt_harness.record import (
    AnyEvent,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    Computed,
    Finished,
    Forked,
    Header,
    Preempted,
    Resumed,
    Scheduled,
    StepDone,
    StepLaunched,
    TokensDelivered,
    TrialRecord,
    event_names,
)
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

BLOCK = 2
PROMPT = [1, 2, 3, 4]


def codes(
    events: list[AnyEvent], checks: tuple[str, ...] = ("kvsan", "accounting"), n: int = 1
) -> set[str]:
    requests = sorted({event.request for event in events if isinstance(event, Arrived)})
    workload = Workload(
        requests=[
            RequestSpec(id=name, prompt_token_ids=PROMPT, sampling=SamplingSpec(max_tokens=2, n=n))
            for name in requests
        ]
    )
    unseen = {"PoolCounts", "PoolState", "Counters"}
    header = Header(
        workload=workload.to_builtins(),
        engine="by-hand",
        model="toy",
        block_size=BLOCK,
        num_blocks=8,
        observed=sorted(event_names() - unseen),
    )
    report = run_checks(TrialRecord(header=header, events=events), checks)
    return {str(finding.code) for finding in report.findings}


def row(
    step: int, seq: str, start: int, tokens: list[int], table: list[int], keep: int
) -> Computed:
    slots = [
        table[position // BLOCK] * BLOCK + position % BLOCK
        for position in range(start, start + len(tokens))
    ]
    return Computed(step, 0, seq, start, tokens, slots, keep, table[keep:], start + len(tokens))


# Replaced blocks ----------------------------------------------------------------------------------


def twins(replacement: list[int], table: list[int], keep: int) -> list[AnyEvent]:
    """r0 and r1 compute the same prompt; r1's blocks 2, 3 are replaced; then it decodes."""
    return [
        Arrived(0, "r0", PROMPT, 2),
        Arrived(0, "r1", PROMPT, 2),
        BlocksAllocated(0, "r0.0", [0, 1]),
        Scheduled(0, "r0.0", 0, 4),
        BlocksAllocated(0, "r1.0", [2, 3]),
        Scheduled(0, "r1.0", 0, 4),
        StepLaunched(0),
        row(0, "r0.0", 0, PROMPT, [0, 1], 0),
        row(0, "r1.0", 0, PROMPT, [2, 3], 0),
        StepDone(0),
        BlocksReplaced(0, "r1.0", [0, 1], replacement),
        TokensDelivered(0, "r0.0", [9]),
        TokensDelivered(0, "r1.0", [9]),
        BlocksAllocated(1, "r1.0", [4]),
        Scheduled(1, "r1.0", 4, 5),
        StepLaunched(1),
        row(1, "r1.0", 4, [9], table, keep),
        StepDone(1),
        TokensDelivered(1, "r1.0", [9]),
        BlocksFreed(1, "r1.0", [*replacement, 4]),
        Finished(1, "r1", "length"),
        BlocksFreed(1, "r0.0", [0, 1]),
        Finished(1, "r0", "length"),
    ]


def test_blocks_replaced_by_equal_ones_are_clean() -> None:
    assert codes(twins([0, 1], [0, 1, 4], 0)) == set()


def test_a_worker_that_keeps_the_replaced_blocks_is_found() -> None:
    assert {"ACC-WORKER-TABLE", "KVSAN-USE-AFTER-FREE"} <= codes(twins([0, 1], [2, 3, 4], 2))


def test_blocks_replaced_by_others_are_a_stale_read() -> None:
    assert "KVSAN-STALE-READ" in codes(twins([1, 0], [1, 0, 4], 0))


def test_the_replaced_blocks_are_no_longer_the_sequences() -> None:
    events = twins([0, 1], [0, 1, 4], 0)
    events[-4] = BlocksFreed(1, "r1.0", [2, 3, 4])
    assert {"KVSAN-DOUBLE-FREE", "KVSAN-LEAK"} <= codes(events)


# Branches that are preempted one by one -----------------------------------------------------------


def branches(*, with_return: bool) -> list[AnyEvent]:
    """r0 has two outputs; the second loses its blocks while the first goes on."""
    preempted = Preempted(2, "r0", "recompute", "first_decode", "out_of_blocks", 4, 5, "r0.1")
    returned: list[AnyEvent] = [Resumed(3, "r0", 0, "r0.1")] if with_return else []
    return [
        Arrived(0, "r0", PROMPT, 2),
        BlocksAllocated(0, "r0.0", [0, 1]),
        Scheduled(0, "r0.0", 0, 4),
        StepLaunched(0),
        row(0, "r0.0", 0, PROMPT, [0, 1], 0),
        StepDone(0),
        Forked(1, "r0.0", "r0.1"),
        TokensDelivered(1, "r0.0", [9]),
        TokensDelivered(1, "r0.1", [8]),
        preempted,
        BlocksFreed(2, "r0.1", [0, 1]),
        BlocksAllocated(2, "r0.0", [2]),
        Scheduled(2, "r0.0", 4, 5),
        StepLaunched(2),
        row(2, "r0.0", 4, [9], [0, 1, 2], 2),
        StepDone(2),
        TokensDelivered(2, "r0.0", [9]),
        BlocksFreed(2, "r0.0", [0, 1, 2]),
        *returned,
        BlocksAllocated(3, "r0.1", [3, 4, 5]),
        Scheduled(3, "r0.1", 0, 5),
        StepLaunched(3),
        row(3, "r0.1", 0, [*PROMPT, 8], [3, 4, 5], 0),
        StepDone(3),
        TokensDelivered(3, "r0.1", [8]),
        BlocksFreed(3, "r0.1", [3, 4, 5]),
        Finished(3, "r0", "length"),
    ]


def test_the_other_branch_goes_on_while_one_is_preempted() -> None:
    assert codes(branches(with_return=True), n=2) == set()


def test_a_branch_that_runs_without_having_come_back_is_found() -> None:
    found = codes(branches(with_return=False), n=2)
    assert {"ACC-PREEMPTED-SCHEDULED", "ACC-PREEMPTED-KEEPS"} <= found


def test_each_branch_counts_like_a_request_in_the_step_bound() -> None:
    workload = Workload(
        requests=[
            RequestSpec(id="r0", prompt_token_ids=PROMPT, sampling=SamplingSpec(max_tokens=2, n=2))
        ]
    )

    def bound(**config: Any) -> int:
        header = Header(
            workload=workload.to_builtins(),
            engine="by-hand",
            model="toy",
            config={"max_num_batched_tokens": 64, **config},
            block_size=BLOCK,
            num_blocks=8,
        )
        return step_bounds(TrialRecord(header=header)).total

    # One step to compute it from nothing, two outputs, two steps to spare.
    assert bound() == 1 + 2 + 2
    assert bound(branches_one_by_one=True) == 2 * (1 + 2 + 2)
    assert bound(max_num_seqs=1) == 1 + 2 * 2 + 2  # two branches take turns
