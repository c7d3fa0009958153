"""Accounting: every code is found when planted, and a clean run has none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload, trials
from hypothesis import given, settings

from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.checks._accounting_counters import Tally
from preempt_harness.checks.trace import ScheduledRows
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    Computed,
    Counters,
    Event,
    Finished,
    PoolCounts,
    PoolState,
    Preempted,
    Resumed,
    Scheduled,
    StepDone,
    TokensDelivered,
    TrialRecord,
    WorkerCopied,
)

replace = msgspec.structs.replace


def accounting(record: TrialRecord) -> list[Finding]:
    return list(run_checks(record, ["accounting"]).findings)


def codes(record: TrialRecord) -> set[Code]:
    return {finding.code for finding in accounting(record)}


def make_record(faults: tuple[str, ...] = (), **config: object) -> TrialRecord:
    """Three requests that preempt each other naturally."""
    workload = make_workload([6, 9, 7], max_tokens=12)
    options = {"num_blocks": 8, **config}
    return run_fake(workload, faults=frozenset(faults), **options)


@pytest.fixture
def record() -> TrialRecord:
    made = make_record()
    assert any(isinstance(event, Preempted) for event in made.events)
    assert accounting(made) == []
    return made


def change(record: TrialRecord, kind: type[Event], which: int, **changes: object) -> Event:
    """Change the event of this type with this index among its type; returns the new one."""
    places = [index for index, event in enumerate(record.events) if isinstance(event, kind)]
    place = places[which]
    record.events[place] = replace(record.events[place], **changes)
    return record.events[place]


def place_of(record: TrialRecord, kind: type[Event]) -> int:
    return next(index for index, event in enumerate(record.events) if isinstance(event, kind))


@settings(max_examples=40, deadline=None)
@given(trials())
def test_clean_trials_have_no_finding_in_any_check(record: TrialRecord) -> None:
    report = run_checks(record)
    assert [str(finding) for finding in report.findings] == []
    assert report.not_observable == {}


# The pool -----------------------------------------------------------------------------------------


def test_sizes_that_do_not_add_up_are_found_in_their_step(record: TrialRecord) -> None:
    event = change(record, PoolCounts, 3, free=99)
    finding = accounting(record)[0]
    assert (finding.code, finding.step) == (Code.ACC_POOL_TOTAL, event.step)
    assert "free 99" in finding.message


def test_sizes_other_than_configured_are_found(record: TrialRecord) -> None:
    state = next(event for event in record.events if isinstance(event, PoolState))
    header = record.header

    def found(max_total_tokens: int, *capabilities: str, **config: object) -> list[str]:
        record.header = replace(
            header,
            config={**header.config, **config},
            max_total_tokens=max_total_tokens,
            capabilities=list(capabilities),
        )
        return [finding.message for finding in accounting(record)]

    holds = header.num_blocks * header.block_size
    wanted = {"swap_space_blocks": state.num_host_blocks}
    assert found(holds + 1, "pool_limit", **wanted) == []
    (message,) = found(holds + 1, "pool_limit", swap_space_blocks=state.num_host_blocks + 2)
    assert "swap space" in message
    (message,) = found(holds + 2, "pool_limit", **wanted)
    assert f"grow to {holds + 2} tokens" in message
    assert found(holds + 2, **wanted) == []  # it ends by the model's length alone


def test_cached_block_counted_as_used_is_found(record: TrialRecord) -> None:
    counts = next(event for event in record.events if isinstance(event, PoolCounts))
    change(record, PoolCounts, 0, used=counts.used + 1, free=counts.free - 1)
    assert codes(record) == {Code.ACC_POOL_USED}


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (lambda free: [*free, free[0]], "free and free"),
        (lambda free: free[1:], "is lost"),
        (lambda free: [*free, 8], "the pool has blocks 0 to 7"),
    ],
)
def test_raw_lists_hold_every_block_once(
    record: TrialRecord, free: Callable[[list[int]], list[int]], words: str
) -> None:
    before = next(event for event in record.events if isinstance(event, PoolState))
    change(record, PoolState, 0, free=free(before.free))
    found = accounting(record)
    assert [finding.code for finding in found] == [Code.ACC_POOL_LISTS]
    assert words in found[0].message


def test_reference_count_other_than_the_tables_is_found(record: TrialRecord) -> None:
    state = next(event for event in record.events if isinstance(event, PoolState))
    block = state.ref_counts.index(1)
    ref_counts = [*state.ref_counts[:block], 2, *state.ref_counts[block + 1 :]]
    change(record, PoolState, 0, ref_counts=ref_counts)
    found = accounting(record)
    assert [(finding.code, finding.block) for finding in found] == [(Code.ACC_REF_COUNT, block)]


def test_references_beyond_the_pool_are_found(record: TrialRecord) -> None:
    state = next(event for event in record.events if isinstance(event, PoolState))
    change(record, PoolState, 0, ref_counts=[*state.ref_counts, 1])
    by_code = {finding.code: finding for finding in accounting(record)}
    assert set(by_code) == {Code.ACC_POOL_LISTS, Code.ACC_REF_COUNT}
    assert "block 8 is referenced, but the pool has blocks 0 to 7" in str(
        by_code[Code.ACC_POOL_LISTS]
    )


def test_block_that_is_free_and_referenced_is_found_at_its_state(record: TrialRecord) -> None:
    """The states before and after it are right, and are compared as a whole."""
    states = [event for event in record.events if isinstance(event, PoolState)]
    index = next(number for number, state in enumerate(states) if number and state.tables)
    block = states[index].ref_counts.index(1)
    change(record, PoolState, index, free=[*states[index].free, block])
    found = accounting(record)
    assert [(finding.code, finding.step, finding.block) for finding in found] == [
        (Code.ACC_POOL_LISTS, states[index].step, block)
    ]


@pytest.mark.parametrize("at", [0, 1, -1])
def test_host_block_that_is_lost_is_found_at_its_state(record: TrialRecord, at: int) -> None:
    states = [event for event in record.events if isinstance(event, PoolState)]
    for index in range(len(states)):
        change(record, PoolState, index, num_host_blocks=3, host_free=[0, 1, 2])
    assert accounting(record) == []
    change(record, PoolState, at, host_free=[0, 2])
    found = accounting(record)
    assert [(finding.code, finding.step, finding.block) for finding in found] == [
        (Code.ACC_POOL_LISTS, states[at].step, 1)
    ]
    assert "host block 1 is lost" in found[0].message


def test_table_other_than_announced_is_found(record: TrialRecord) -> None:
    state = next(event for event in record.events if isinstance(event, PoolState))
    tables = {**state.tables, "r0.0": state.tables["r0.0"][::-1]}
    change(record, PoolState, 0, tables=tables)
    found = accounting(record)
    assert [(finding.code, finding.sequence) for finding in found] == [(Code.ACC_TABLE, "r0.0")]


@pytest.mark.parametrize(
    ("queues", "words"),
    [
        ({"waiting": ["r0"], "running": ["r0", "r1", "r2"]}, "2 times"),
        ({"waiting": [], "running": ["r0", "r1"]}, "neither waiting nor running"),
        ({"waiting": ["r9"], "running": ["r0", "r1", "r2"]}, "never arrived"),
    ],
)
def test_live_request_stands_in_one_queue(
    record: TrialRecord, queues: dict[str, list[str]], words: str
) -> None:
    change(record, PoolState, 0, **queues)
    found = accounting(record)
    assert [finding.code for finding in found] == [Code.ACC_QUEUE]
    assert words in found[0].message


def test_blocks_left_at_the_end_are_a_leak() -> None:
    record = make_record(faults=("leak",), num_blocks=20)
    assert Code.ACC_LEAK in codes(record)


def test_double_free_makes_tables_and_pool_disagree(record: TrialRecord) -> None:
    place = place_of(record, BlocksFreed)
    event = record.events[place]
    assert isinstance(event, BlocksFreed)
    other = next(
        earlier
        for earlier in record.events[:place]
        if isinstance(earlier, Scheduled) and earlier.seq != event.seq
    )
    record.events.insert(place + 1, BlocksFreed(event.step, other.seq, event.blocks))
    assert accounting(record) == []  # what a sequence does not hold it cannot give up
    del record.events[place]
    assert {Code.ACC_POOL_USED, Code.ACC_TABLE} <= codes(record)


# Counters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "num_preemptions",
        "num_recomputed_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_generated_tokens",
        "num_finished_requests",
        "num_steps",
    ],
)
def test_counter_off_by_one_is_found(record: TrialRecord, name: str) -> None:
    last = [event for event in record.events if isinstance(event, Counters)][-1]
    change(record, Counters, -1, values={**last.values, name: last.values[name] + 1})
    found = accounting(record)
    assert [(finding.code, finding.step) for finding in found] == [(Code.ACC_COUNTER, last.step)]
    assert name in found[0].message


def test_recompute_counted_as_a_prefix_hit_is_found() -> None:
    found = accounting(make_record(faults=("recompute_is_hit",)))
    assert [finding.code for finding in found] == [Code.ACC_COUNTER]
    assert "num_cached_tokens" in found[0].message


@pytest.mark.parametrize("name", ["num_preemptions", "num_cached_tokens"])
def test_results_own_figures_are_compared(record: TrialRecord, name: str) -> None:
    record.results["r1"] = replace(record.results["r1"], **{name: 77})
    found = accounting(record)
    assert [(finding.code, finding.request) for finding in found] == [
        (Code.ACC_REQUEST_COUNTER, "r1")
    ]
    record.results["r1"] = replace(record.results["r1"], **{name: None})
    assert accounting(record) == []


# Scheduler against worker -------------------------------------------------------------------------


def test_row_other_than_scheduled_is_found(record: TrialRecord) -> None:
    row = [event for event in record.events if isinstance(event, Computed)][5]
    change(record, Computed, 5, token_ids=[*row.token_ids, 1])
    found = accounting(record)
    assert found[0].code == Code.ACC_WORKER_VIEW
    assert (found[0].step, found[0].sequence) == (row.step, row.seq)


@pytest.mark.parametrize("kind", [Scheduled, Computed])
def test_row_that_only_one_side_knows_is_found(record: TrialRecord, kind: type[Event]) -> None:
    event = record.events.pop(place_of(record, kind))
    finding = next(found for found in accounting(record) if found.code == Code.ACC_WORKER_VIEW)
    assert finding.step == event.step
    assert "nothing" in finding.message


def test_worker_table_other_than_the_schedulers_is_found() -> None:
    record = make_record(faults=("swap_table",))
    resumed = next(event for event in record.events if isinstance(event, Resumed))
    found = accounting(record)
    assert {finding.code for finding in found} == {Code.ACC_WORKER_TABLE}
    assert (found[0].step, found[0].request) == (resumed.step, resumed.request)


def test_copy_that_a_rank_does_not_make_is_found() -> None:
    record = make_record(move_every=2, num_ranks=2, num_blocks=14)
    assert accounting(record) == []
    place = max(
        index for index, event in enumerate(record.events) if isinstance(event, WorkerCopied)
    )
    event = record.events.pop(place)
    found = accounting(record)
    assert [(finding.code, finding.step, finding.rank) for finding in found] == [
        (Code.ACC_WORKER_COPIES, event.step, 1)
    ]


# Preemptions and limits ---------------------------------------------------------------------------


def test_victim_that_is_paused_twice_is_found(record: TrialRecord) -> None:
    place = place_of(record, Preempted)
    event = record.events[place]
    record.events.insert(place + 2, event)
    found = [item for item in accounting(record) if item.code == Code.ACC_PREEMPTED_EMPTY]
    assert "already" in found[0].message


def test_victim_that_keeps_its_blocks_is_found(record: TrialRecord) -> None:
    preempted = record.events[place_of(record, Preempted)]
    assert isinstance(preempted, Preempted)
    place = place_of(record, Preempted) + 1
    assert isinstance(record.events[place], BlocksFreed)
    del record.events[place]
    finding = next(item for item in accounting(record) if item.code == Code.ACC_PREEMPTED_KEEPS)
    assert (finding.step, finding.request) == (preempted.step, preempted.request)


def test_victim_that_is_given_no_blocks_keeps_none(record: TrialRecord) -> None:
    """An engine may report that a table has grown by nothing."""
    place = place_of(record, Preempted)
    victim = record.events[place]
    assert isinstance(victim, Preempted)
    record.events.insert(place + 2, BlocksAllocated(victim.step, f"{victim.request}.0", [], 0))
    ended = next(
        index
        for index, event in enumerate(record.events)
        if isinstance(event, Finished) and event.request == victim.request
    )
    step = record.events[ended].step
    record.events.insert(ended, BlocksAllocated(step, f"{victim.request}.0", [], 0))
    assert accounting(record) == []
    assert [item for item in run_checks(record).findings if item.check == "kvsan"] == []


def test_victim_that_is_scheduled_in_its_step_is_found(record: TrialRecord) -> None:
    place = place_of(record, Preempted)
    event = record.events[place]
    assert isinstance(event, Preempted)
    row = Scheduled(event.step, f"{event.request}.0", event.num_computed_tokens, event.num_tokens)
    for where in (place, place + 2):
        planted = msgspec.convert(msgspec.to_builtins(record), TrialRecord)
        planted.events.insert(where, row)
        finding = next(
            item for item in accounting(planted) if item.code == Code.ACC_PREEMPTED_SCHEDULED
        )
        assert (finding.step, finding.request) == (event.step, event.request)


@pytest.mark.parametrize("back", [Resumed, Finished, Aborted])
@pytest.mark.parametrize("who", ["r0", "r1"])
def test_who_is_away_stays_so_when_another_comes_back_or_goes(back: type, who: str) -> None:
    """Both were preempted; one of them comes back or ends, and then r0 is scheduled."""
    record = run_fake(make_workload([6, 6], max_tokens=12), num_blocks=20)
    others = {Resumed: Resumed(2, who, 0), Finished: Finished(2, who, "length")}
    record.events = [
        *(Arrived(0, name, [1] * 6, 12) for name in ("r0", "r1")),
        *(Preempted(1, name, "recompute", "decode", "forced", 0, 6) for name in ("r0", "r1")),
        others.get(back, Aborted(2, who)),
        Scheduled(3, "r0.0", 0, 6),
    ]
    found = [item.request for item in accounting(record) if item.code == SCHEDULED]
    assert found == ([] if who == "r0" else ["r0"])


SCHEDULED = Code.ACC_PREEMPTED_SCHEDULED


@pytest.mark.parametrize(("count", "wrong"), [(6, True), (7, True), (8, False), (10, False)])
def test_a_row_of_drafts_alone_computes_at_least_its_first(count: int, wrong: bool) -> None:
    """Positions [7, 10) were scheduled while 6 tokens were known."""
    record = run_fake(make_workload([6], max_tokens=12), num_blocks=20)
    record.events = [
        Arrived(0, "r0", [1] * 6, 12),
        BlocksAllocated(0, "r0.0", [0, 1, 2]),
        Scheduled(1, "r0.0", 7, 10),
        StepDone(1),
        Preempted(2, "r0", "recompute", "decode", "forced", count, 6),
        BlocksFreed(2, "r0.0", [2, 1, 0]),
    ]
    found = [item.code for item in accounting(record)]
    assert (Code.ACC_PREEMPTED_COUNT in found) == wrong


def test_a_worker_without_the_last_block_is_found_and_one_with_more_is_not_asked() -> None:
    """Entry 1 is missing at the worker, or at the scheduler; one that is not read is nobody's."""
    for mine, theirs, words in (
        ([0, 1], [0], "table is missing, the scheduler's is 1"),
        ([0], [0, 1], "table is 1, the scheduler's is missing"),
        ([0, 1], [0, 1, 2], ""),
    ):
        record = run_fake(make_workload([6], max_tokens=12), num_blocks=20, block_size=4)
        record.events = [
            Arrived(0, "r0", [1] * 6, 12),
            BlocksAllocated(0, "r0.0", mine),
            Scheduled(0, "r0.0", 0, 6),
            Computed(0, 0, "r0.0", 0, [1] * 6, [0, 1, 2, 3, 4, 5], 0, theirs, 6),
            StepDone(0),
        ]
        found = [item for item in accounting(record) if item.code == Code.ACC_WORKER_TABLE]
        assert [words in item.message for item in found] == [True] * bool(words)


def test_a_victim_may_have_kept_some_of_its_drafts() -> None:
    """Positions [6, 10) were scheduled with 7 tokens known: 7 to 10 are computed, by what came."""
    for count, expected in ((6, True), (7, False), (8, False), (10, False), (11, True)):
        record = run_fake(make_workload([6], max_tokens=12), num_blocks=20)
        record.events = [
            Arrived(0, "r0", [1] * 6, 12),
            BlocksAllocated(0, "r0.0", [0, 1, 2]),
            Scheduled(0, "r0.0", 0, 6),
            StepDone(0),
            TokensDelivered(0, "r0.0", [9]),
            Scheduled(1, "r0.0", 6, 10),
            StepDone(1),
            Preempted(2, "r0", "recompute", "decode", "forced", count, 7),
            BlocksFreed(2, "r0.0", [2, 1, 0]),
        ]
        found = [item.code for item in accounting(record)]
        assert (Code.ACC_PREEMPTED_COUNT in found) == expected, count


@pytest.mark.parametrize(("count", "wrong"), [(0, False), (6, True)])
def test_a_step_under_way_says_nothing_of_a_stay_that_began_since(count: int, wrong: bool) -> None:
    """It lost its blocks, came back and lost them again while its old row was computed."""
    record = run_fake(make_workload([6], max_tokens=12), num_blocks=20)
    record.events = [
        Arrived(0, "r0", [1] * 6, 12),
        BlocksAllocated(0, "r0.0", [0, 1]),
        Scheduled(0, "r0.0", 0, 6),
        Preempted(2, "r0", "recompute", "prefill_last", "forced", 6, 6),
        BlocksFreed(2, "r0.0", [1, 0]),
        Resumed(2, "r0", 0),
        BlocksAllocated(2, "r0.0", [2, 3]),
        StepDone(0),
        Preempted(3, "r0", "recompute", "just_resumed", "forced", count, 6),
        BlocksFreed(3, "r0.0", [3, 2]),
    ]
    found = [item.code for item in accounting(record)]
    assert (Code.ACC_PREEMPTED_COUNT in found) == wrong


@pytest.mark.parametrize("name", ["num_computed_tokens", "num_tokens"])
def test_victims_figures_off_by_one_are_found(record: TrialRecord, name: str) -> None:
    event = record.events[place_of(record, Preempted)]
    change(record, Preempted, 0, **{name: getattr(event, name) + 1})
    assert codes(record) == {Code.ACC_PREEMPTED_COUNT}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"max_num_batched_tokens": 15}, Code.ACC_TOKEN_BUDGET),
        ({"max_num_seqs": 1}, Code.ACC_MAX_SEQS),
    ],
)
def test_step_over_its_limits_is_found(
    record: TrialRecord, config: dict[str, int], code: Code
) -> None:
    record.header = replace(record.header, config=config)
    assert codes(record) == {code}


# What cannot be seen ------------------------------------------------------------------------------


def test_parts_without_their_events_say_so(record: TrialRecord) -> None:
    record.header = replace(record.header, observed=["PoolCounts", "Counters"])
    report = run_checks(record, ["accounting"])
    assert report.findings == ()
    assert set(report.not_observable) == {
        "accounting/gauges",
        "accounting/pool state",
        "accounting/worker view",
        "accounting/worker tables",
        "accounting/preemptions",
        "accounting/limits",
    }
    assert report.counted["accounting/pool counts: pool counts judged"] > 0


@pytest.mark.parametrize(("mode", "recomputed"), [("recompute", 8), ("swap", 4)])
def test_hits_that_never_ran_are_lost_with_a_preemption(mode: str, recomputed: int) -> None:
    """Unless its own blocks came back from the host, the last of them not full."""
    tally = Tally(block_size=4)
    for event in (
        BlocksAllocated(0, "r0.0", [0], 0),
        ScheduledRows([Scheduled(0, "r0.0", 0, 4)]),
        Preempted(1, "r0", mode, "prefill", "forced", 4, 9),
        BlocksAllocated(2, "r0.0", [1, 2], 2),
        Preempted(2, "r0", "recompute", "just_resumed", "forced", 8, 9),
        BlocksAllocated(3, "r0.0", [3, 4, 5], 0),
        ScheduledRows([Scheduled(3, "r0.0", 0, 9)]),
    ):
        tally.take(event)
    assert tally.values["num_recomputed_tokens"] == recomputed
