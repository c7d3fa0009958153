"""KVSan finds what is planted, where it was planted, and nothing in clean runs."""

from __future__ import annotations

from random import Random

import pytest
from fake_engine import FakeConfig, FakeEngine, header_for, run_fake
from fake_trials import check_agreement, make_workload, trials
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from preempt_harness.checks import Code, Finding, KVSan
from preempt_harness.checks.kvsan import check_kvsan
from preempt_harness.record import Computed, Preempted, Resumed, TrialRecord
from preempt_harness.workload import Operation, Workload

TIGHT = {"num_blocks": 8, "block_size": 4, "max_num_batched_tokens": 16}


def findings(record: TrialRecord) -> list[Finding]:
    incremental, full = check_kvsan(record), check_kvsan(record, "full")
    assert incremental == full
    return list(incremental.findings)


def tight_workload() -> Workload:
    return make_workload([6, 9, 7], max_tokens=12)


def first_resume(record: TrialRecord) -> tuple[int, str]:
    event = next(event for event in record.events if isinstance(event, Resumed))
    return event.step, event.request


# Clean --------------------------------------------------------------------------------------------


def test_tight_pool_preempts_and_is_clean() -> None:
    record = run_fake(tight_workload(), **TIGHT)
    assert any(isinstance(event, Preempted) for event in record.events)
    assert findings(record) == []


@settings(max_examples=60, deadline=None)
@given(trials())
def test_clean_trials_have_no_finding(record: TrialRecord) -> None:
    assert findings(record) == []


@settings(max_examples=150, deadline=None)
@given(trials(), st.randoms(use_true_random=False))
def test_incremental_and_full_agree_on_logs_with_a_changed_row(
    record: TrialRecord, source: Random
) -> None:
    """One number of one row is another: the short way for rows as they should be must see it."""
    places = [index for index, event in enumerate(record.events) if isinstance(event, Computed)]
    place = source.choice(places)
    event = record.events[place]
    name = source.choice(("start", "read_len", "table_keep", "token_ids", "written_slots"))
    value = getattr(event, name)
    by = source.choice((-4, -1, 1, 4))
    other = max(0, value + by) if isinstance(value, int) else [max(0, value[0] + by), *value[1:]]
    record.events[place] = replace(event, **{name: other})
    findings(record)


@pytest.mark.slow
def test_incremental_and_full_agree_on_drawn_trials_with_planted_faults() -> None:
    check_agreement(300)


# Planted, and where -------------------------------------------------------------------------------


def only(record: TrialRecord, code: Code) -> Finding:
    """The first finding, which must be of this code."""
    found = findings(record)
    assert found, f"{code} was planted and not found"
    assert found[0].code == code, [str(finding) for finding in found]
    return found[0]


def test_prefix_hash_without_parent_is_a_stale_read_of_the_equal_later_block() -> None:
    workload = make_workload([14, 14], max_tokens=4, arrivals=(0, 3))
    first, second = (list(spec.prompt_token_ids) for spec in workload.requests)
    second[4:8] = first[4:8]
    second[0:4] = [50, 51, 52, 53]
    first[0:4] = [40, 41, 42, 43]
    planted = Workload(
        requests=[
            type(spec)(
                id=spec.id,
                prompt_token_ids=prompt,
                sampling=spec.sampling,
                arrival_step=spec.arrival_step,
            )
            for spec, prompt in zip(workload.requests, (first, second), strict=True)
        ]
    )
    assert findings(run_fake(planted, num_blocks=16)) == []
    # Without the parent, r1 needs its first block found: r2 shares r1's first and r0's second.
    third = type(planted.requests[1])(
        id="r2",
        prompt_token_ids=second[:4] + first[8:14] + [9, 9, 9, 9],
        sampling=planted.requests[1].sampling,
        arrival_step=6,
    )
    chained = Workload(requests=[*planted.requests, third])
    record = run_fake(chained, num_blocks=16, faults=frozenset({"no_parent"}))
    finding = only(record, Code.KVSAN_STALE_READ)
    assert finding.position == 4
    assert finding.sequence in ("r1.0", "r2.0")
    assert "r0.0" in finding.message


def test_swapped_table_entries_are_a_stale_read_at_the_resume() -> None:
    record = run_fake(tight_workload(), faults=frozenset({"swap_table"}), **TIGHT)
    finding = only(record, Code.KVSAN_STALE_READ)
    assert (finding.step, finding.request) == first_resume(record)
    assert finding.position == 0


def test_dropped_tail_token_is_a_gap_at_its_position() -> None:
    record = run_fake(
        tight_workload(), enable_prefix_caching=False, faults=frozenset({"skip_token"}), **TIGHT
    )
    finding = only(record, Code.KVSAN_GAP)
    assert (finding.step, finding.request) == first_resume(record)
    assert finding.position == 0


def test_hash_entry_that_survives_reuse_is_found() -> None:
    workload = make_workload([13, 13, 13, 13], max_tokens=6, shared=0, arrivals=(0, 8, 16, 24))
    requests = list(workload.requests)
    again = type(requests[0])(
        id="r4",
        prompt_token_ids=requests[0].prompt_token_ids,
        sampling=requests[0].sampling,
        arrival_step=20,
    )
    record = run_fake(
        Workload(requests=[*requests, again]), num_blocks=8, faults=frozenset({"stale_hash"})
    )
    finding = only(record, Code.KVSAN_STALE_READ)
    assert finding.sequence == "r4.0"
    assert "r0.0" not in finding.message.partition("history")[2]


def test_blocks_registered_before_their_prefill_ran_are_read_before_write() -> None:
    workload = make_workload([16, 16], max_tokens=3, shared=16, arrivals=(0, 2))
    aborted = Workload(
        requests=workload.requests, operations=[Operation(kind="abort", step=1, request="r0")]
    )
    config = {"num_blocks": 16, "max_num_batched_tokens": 5}
    assert findings(run_fake(aborted, **config)) == []
    record = run_fake(aborted, faults=frozenset({"register_early"}), **config)
    finding = only(record, Code.KVSAN_USE_BEFORE_WRITE)
    assert finding.sequence == "r1.0"
    assert finding.position == 5


def test_same_step_prefix_hit_on_a_block_being_filled_is_no_finding() -> None:
    workload = make_workload([9, 13], max_tokens=3, shared=9)
    record = run_fake(
        workload,
        num_blocks=16,
        max_num_batched_tokens=32,
        faults=frozenset({"register_early"}),
    )
    assert any(
        isinstance(event, Computed) and event.seq == "r1.0" and event.start == 8
        for event in record.events
    )
    assert findings(record) == []


@pytest.mark.parametrize(
    ("fault", "code", "config"),
    [
        ("double_map", Code.KVSAN_DOUBLE_MAP, {}),
        ("block_twice", Code.KVSAN_DOUBLE_MAP, {}),
        ("share_unfilled", Code.KVSAN_SHARED_WRITE, {}),
        ("double_free", Code.KVSAN_DOUBLE_FREE, {}),
        ("leak", Code.KVSAN_LEAK, {"num_blocks": 20}),
        ("old_table", Code.KVSAN_USE_AFTER_FREE, {"forced": {4: ("r2",)}, "num_blocks": 14}),
        ("lost_copy", Code.KVSAN_USE_BEFORE_WRITE, {"move_every": 2, "num_blocks": 14}),
        ("id_range", Code.KVSAN_ID_RANGE, {}),
        ("stale_token", Code.KVSAN_TOKEN_MISMATCH, {}),
        ("wrong_slot", Code.KVSAN_WRONG_SLOT, {}),
        ("read_long", Code.KVSAN_READ_LEN, {}),
        ("read_short", Code.KVSAN_READ_LEN, {}),
        ("poison_live", Code.KVSAN_SHARED_WRITE, {}),
    ],
)
def test_planted_fault_is_found_by_its_code(
    fault: str, code: Code, config: dict[str, object]
) -> None:
    settings_ = {**TIGHT, **config}
    assert findings(run_fake(tight_workload(), **settings_)) == []
    finding = only(run_fake(tight_workload(), faults=frozenset({fault}), **settings_), code)
    assert finding.step is not None
    assert finding.sequence is not None


def test_ranks_that_are_given_different_tokens_are_named() -> None:
    record = run_fake(tight_workload(), num_ranks=2, faults=frozenset({"rank_token"}), **TIGHT)
    by_code = {finding.code: finding for finding in reversed(findings(record))}
    assert by_code[Code.KVSAN_RANKS_DISAGREE].rank == 1
    assert "tokens" in by_code[Code.KVSAN_RANKS_DISAGREE].message
    assert by_code[Code.KVSAN_TOKEN_MISMATCH].rank == 1


def test_rank_that_computes_nothing_is_found() -> None:
    record = run_fake(tight_workload(), num_ranks=2, **TIGHT)
    record.events = [
        event for event in record.events if not (isinstance(event, Computed) and event.rank == 1)
    ]
    assert {finding.code for finding in findings(record)} == {Code.KVSAN_RANKS_DISAGREE}


# One root cause, one finding ----------------------------------------------------------------------


def test_consequences_are_counted_not_listed() -> None:
    record = run_fake(tight_workload(), faults=frozenset({"stale_token"}), **TIGHT)
    result = check_kvsan(record)
    resumes = sum(isinstance(event, Resumed) for event in record.events)
    assert 1 <= len(result.findings) <= resumes
    assert result.counted["bad reads that follow from a listed finding"] >= 1


def test_findings_of_one_code_are_capped_and_the_rest_counted() -> None:
    workload = make_workload([5] * 30, max_tokens=1)
    result = check_kvsan(run_fake(workload, num_blocks=12, faults=frozenset({"read_long"})))
    assert len(result.findings) == 20
    assert result.counted["KVSAN-READ-LEN not listed"] == 10


# Live and cheap -----------------------------------------------------------------------------------


def test_live_feed_reports_in_the_step_of_the_fault() -> None:
    record = run_fake(tight_workload(), faults=frozenset({"stale_token"}), **TIGHT)
    final = check_kvsan(record).findings[0]
    sanitizer = KVSan(record.header)
    for event in record.events:
        sanitizer.feed(event)
        if sanitizer.findings:
            assert event.step == final.step
            assert sanitizer.findings[0] == final
            return
    pytest.fail("nothing was found live")


@pytest.mark.parametrize("rank_count", [1, 2])
def test_cost_of_a_decode_step_is_flat_in_context(rank_count: int) -> None:
    """Operations are counted, not seconds: written and read slots, compared entries."""

    def operations_per_step(context: int) -> float:
        config = FakeConfig(
            num_blocks=context // 16 + 8,
            block_size=16,
            max_num_batched_tokens=8192,
            num_ranks=rank_count,
        )
        engine = FakeEngine(make_workload([context], max_tokens=33), config)
        record = engine.run()
        sanitizer = KVSan(header_for(engine.workload, config))
        before = 0
        for event in record.events:
            sanitizer.feed(event)
            if event.step == 1 and not before:
                before = sanitizer.num_operations
        return (sanitizer.num_operations - before) / 32

    short, long_ = operations_per_step(100), operations_per_step(4000)
    # A step reads its last block anew: at most block_size slots, once per rank.
    assert long_ <= short + 16 * rank_count
