"""Accounting of the pool: its sizes and raw lists, against the tables that the harness rebuilt."""

from __future__ import annotations

from collections import Counter

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.tables import SchedulerTables
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    EngineError,
    Finished,
    Forked,
    PoolCounts,
    PoolState,
    TrialRecord,
)

_TABLE_EVENTS = {"BlocksAllocated", "BlocksFreed"}
_QUEUE_EVENTS = {"Arrived", "Finished", "Aborted"}


def check_pool_counts(record: TrialRecord) -> CheckResult:
    """free + cached + used + held + fenced = num_blocks, and used is what the tables name."""
    listing = Listing()
    tables = _tables(record)
    for event in record.events:
        if tables is not None:
            _follow(tables, event)
        if not isinstance(event, PoolCounts):
            continue
        listing.count("pool counts judged")
        parts = (event.free, event.cached, event.used, event.held, event.fenced)
        if sum(parts) != event.num_blocks or min(parts) < 0:
            listing.report(
                Code.ACC_POOL_TOTAL,
                event.step,
                f"free {event.free} + cached {event.cached} + used {event.used} + held "
                f"{event.held} + fenced {event.fenced} = {sum(parts)}, but the pool has "
                f"{event.num_blocks} blocks",
                once="total",
            )
        if tables is not None and event.used != len(tables.refs):
            listing.report(
                Code.ACC_POOL_USED,
                event.step,
                f"the engine counts {event.used} used blocks, but the tables of its sequences "
                f"name {len(tables.refs)} different blocks",
                once="used",
            )
    return listing.result("accounting", "pool counts")


def check_pool_state(record: TrialRecord) -> CheckResult:
    """Raw lists, references, tables and queues; nothing is left at the end."""
    listing = Listing()
    tables = _tables(record)
    queues_observed = set(record.header.observed) >= _QUEUE_EVENTS
    live: dict[str, None] = {}
    last: PoolState | None = None
    for event in record.events:
        if tables is not None:
            _follow(tables, event)
        if isinstance(event, Arrived):
            live[event.request] = None
        elif isinstance(event, Finished | Aborted):
            live.pop(event.request, None)
        elif isinstance(event, PoolState):
            listing.count("pool states judged")
            last = event
            _judge_lists(event, listing)
            _judge_references(event, listing)
            if tables is not None:
                _judge_tables(event, tables, listing)
            if queues_observed:
                _judge_queues(event, live, listing)
    crashed = any(isinstance(event, EngineError) for event in record.events)
    if last is not None and queues_observed and not live and not crashed:
        _judge_end(last, listing)
    return listing.result("accounting", "pool state")


def _tables(record: TrialRecord) -> SchedulerTables | None:
    return SchedulerTables() if set(record.header.observed) >= _TABLE_EVENTS else None


def _follow(tables: SchedulerTables, event: object) -> None:
    if isinstance(event, BlocksAllocated):
        tables.allocate(event)
    elif isinstance(event, BlocksFreed):
        tables.free(event)
    elif isinstance(event, BlocksReplaced):
        tables.replace(event)
    elif isinstance(event, Forked):
        tables.fork(event)


def _judge_lists(state: PoolState, listing: Listing) -> None:
    """Every block id stands in exactly one of the lists, or is referenced; host blocks too."""
    lists = {
        "free": state.free,
        "cached": state.cached,
        "held": state.held,
        "fenced": state.fenced,
        "referenced": list(state.ref_counts),
    }
    _judge_places("block", lists, state.num_blocks, state.step, listing)
    host = {
        "free": state.host_free,
        "fenced": state.host_fenced,
        "in use": [block for blocks in state.host_blocks.values() for block in blocks],
    }
    _judge_places("host block", host, state.num_host_blocks, state.step, listing)


def _judge_places(
    noun: str, lists: dict[str, list[int]], num_blocks: int, step: int, listing: Listing
) -> None:
    places: dict[int, list[str]] = {}
    for name, blocks in lists.items():
        for block in blocks:
            places.setdefault(block, []).append(name)
    for block in sorted(places.keys() | set(range(num_blocks))):
        where = places.get(block, [])
        if not 0 <= block < num_blocks:
            what = f"{noun} {block} is {where[0]}, but the pool has blocks 0 to {num_blocks - 1}"
        elif not where:
            what = f"{noun} {block} is lost: neither {', '.join(list(lists)[:-1])} nor "
            what += list(lists)[-1]
        elif len(where) > 1:
            what = f"{noun} {block} is {' and '.join(where)}; it can be one of these only, once"
        else:
            continue
        listing.report(Code.ACC_POOL_LISTS, step, what, once=(noun, block), block=block)


def _judge_references(state: PoolState, listing: Listing) -> None:
    entries = Counter(block for table in state.tables.values() for block in table)
    for block in sorted(entries.keys() | state.ref_counts.keys()):
        counted = state.ref_counts.get(block, 0)
        if counted != entries[block]:
            listing.report(
                Code.ACC_REF_COUNT,
                state.step,
                f"block {block} has reference count {counted}, but {entries[block]} table "
                f"entries name it",
                once=block,
                block=block,
            )


def _judge_tables(state: PoolState, tables: SchedulerTables, listing: Listing) -> None:
    for seq in sorted(state.tables.keys() | tables.leases.keys()):
        engine = state.tables.get(seq, [])
        lease = tables.leases.get(seq)
        announced = lease.blocks if lease is not None else []
        if engine != announced:
            listing.report(
                Code.ACC_TABLE,
                state.step,
                f"the engine's block table is {engine}, but the blocks it announced as "
                f"allocated and freed leave {announced}",
                once=seq,
                seq=seq,
            )


def _judge_queues(state: PoolState, live: dict[str, None], listing: Listing) -> None:
    places = Counter([*state.waiting, *state.running])
    for request in sorted(places.keys() | live.keys()):
        if places[request] == 1 and request in live:
            continue
        if request not in live:
            what = "it has ended or never arrived, and still stands in a queue"
        elif not places[request]:
            what = "it is neither waiting nor running, and has not ended"
        else:
            what = f"it stands in the queues {places[request]} times"
        listing.report(Code.ACC_QUEUE, state.step, what, once=request, request=request)


def _judge_end(state: PoolState, listing: Listing) -> None:
    """All requests have ended: every block is free, cached, or held by the harness."""
    left = {
        "referenced blocks": sorted(state.ref_counts),
        "fenced blocks": state.fenced,
        "tables": sorted(state.tables),
        "fenced host blocks": state.host_fenced,
        "host blocks in use": sorted(state.host_blocks),
    }
    for name, what in left.items():
        if what:
            listing.report(
                Code.ACC_LEAK,
                state.step,
                f"all requests have ended, and the pool still has {name}: {what}",
            )
