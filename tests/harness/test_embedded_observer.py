"""The recording observer: events that say what it was told, at the cost of what changed."""

from __future__ import annotations

from preempt_engine.step import SequenceKey
from preempt_harness.adapters.embedded_observer import RecordingObserver
from preempt_harness.record import Computed

KEY = SequenceKey("r1", 2)


def computed(observer: RecordingObserver, table: list[int], rank: int = 0) -> Computed:
    observer.computed(7, rank, KEY, 5, [9], [45], table, 6)
    (event,) = observer.take_events()
    assert isinstance(event, Computed)
    return event


def test_table_is_recorded_as_a_change_to_the_one_before() -> None:
    observer = RecordingObserver(pool_every=16)
    table = [4, 8]
    first, second = computed(observer, table), computed(observer, table)
    assert (first.seq, first.table_keep, first.table_new) == ("r1.2", 0, [4, 8])
    assert (second.table_keep, second.table_new) == (2, [])
    table.append(3)
    grown = computed(observer, table)
    assert (grown.table_keep, grown.table_new) == (2, [3])
    other_rank = computed(observer, table, rank=1)
    assert (other_rank.table_keep, other_rank.table_new) == (0, [4, 8, 3])


def test_entry_that_the_worker_changes_in_place_is_seen() -> None:
    observer = RecordingObserver(pool_every=16)
    table = [4, 8, 3]
    computed(observer, table)
    table[1] = 6
    changed = computed(observer, table)
    assert (changed.table_keep, changed.table_new) == (1, [6, 3])
    del table[1:]
    shorter = computed(observer, table)
    assert (shorter.table_keep, shorter.table_new) == (1, [])


def test_events_keep_what_the_caller_reuses() -> None:
    observer = RecordingObserver(pool_every=16)
    token_ids, slots = [9], [45]
    observer.computed(7, 0, KEY, 5, token_ids, slots, [4, 8], 6)
    observer.tokens_delivered(7, KEY, token_ids, None, "")
    token_ids[0] = slots[0] = 0
    row, delivered = observer.take_events()
    assert (row.token_ids, row.written_slots, delivered.token_ids) == ([9], [45], [9])  # type: ignore[union-attr]
