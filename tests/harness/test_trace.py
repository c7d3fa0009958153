"""A trace has a record's events in their order, rows of one step and rank taken together."""

from __future__ import annotations

from fake_engine import run_fake
from fake_trials import make_workload, trials
from hypothesis import given, settings

from preempt_harness.checks.trace import (
    Batch,
    ComputedRows,
    DeliveredRows,
    ScheduledRows,
    Trace,
    batches,
)
from preempt_harness.record import (
    Computed,
    Event,
    Preempted,
    Scheduled,
    StepDone,
    TokensDelivered,
    TrialRecord,
)


def row(step: int, seq: str, start: int, rank: int = 0) -> Computed:
    return Computed(step, rank, seq, start, [7], [start], 0, [0], start + 1)


def unbatched(found: list[Batch]) -> list[Event]:
    """The events that the batches were made of."""
    events: list[Event] = []
    for batch in found:
        if isinstance(batch, ScheduledRows):
            columns = zip(batch.seqs, batch.starts, batch.ends, strict=True)
            events += [Scheduled(batch.step, *values) for values in columns]
        elif isinstance(batch, (ComputedRows, DeliveredRows)):
            events += batch.rows
        else:
            events.append(batch)
    return events


@settings(max_examples=40, deadline=None)
@given(trials())
def test_batches_are_the_events_in_their_order(record: TrialRecord) -> None:
    assert unbatched(batches(record.events)) == record.events


def test_rows_of_a_step_are_one_batch_with_columns() -> None:
    (scheduled,) = batches([Scheduled(3, "r0.0", 4, 5), Scheduled(3, "r1.0", 0, 9)])
    assert isinstance(scheduled, ScheduledRows)
    assert (scheduled.step, scheduled.seqs) == (3, ("r0.0", "r1.0"))
    assert (scheduled.starts, scheduled.ends, scheduled.num_tokens) == ([4, 0], [5, 9], 10)
    (computed,) = batches([row(3, "r0.0", 4), row(3, "r1.0", 8)])
    assert isinstance(computed, ComputedRows)
    assert (computed.rank, computed.starts, computed.ends) == (0, [4, 8], [5, 9])
    (delivered,) = batches([TokensDelivered(3, "r0.0", [1, 2]), TokensDelivered(3, "r1.0", [])])
    assert isinstance(delivered, DeliveredRows)
    assert (delivered.token_ids, delivered.num_tokens) == ([[1, 2], []], 2)


def test_another_step_rank_or_event_begins_another_batch() -> None:
    rows = [row(3, "r0.0", 4), row(3, "r0.0", 4, rank=1), row(4, "r0.0", 5, rank=1)]
    found = batches([*rows, StepDone(4), row(4, "r1.0", 0, rank=1)])
    assert [(type(batch), batch.step) for batch in found] == [
        (ComputedRows, 3),
        (ComputedRows, 3),
        (ComputedRows, 4),
        (StepDone, 4),
        (ComputedRows, 4),
    ]


def test_selection_by_kind_keeps_the_order() -> None:
    trace = Trace(run_fake(make_workload([6, 9, 7], max_tokens=12), num_blocks=8))
    chosen = trace.of(Preempted, ScheduledRows)
    assert chosen == [item for item in trace.batches if type(item) in (Preempted, ScheduledRows)]
    assert trace.has(Preempted)
    assert not Trace(TrialRecord(header=trace.header)).of(Preempted)


def test_what_is_derived_is_worked_out_once() -> None:
    trace = Trace(run_fake(make_workload([5], max_tokens=2)))
    assert trace.derive(lambda found: [len(found.batches)]) == [len(trace.batches)]
    assert trace.derive(list_of_batches) is trace.derive(list_of_batches)


def list_of_batches(trace: Trace) -> list[Batch]:
    return list(trace.batches)
