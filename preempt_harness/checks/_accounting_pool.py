"""Accounting of the pool: its sizes and raw lists, against the tables that the harness rebuilt."""

from __future__ import annotations

from collections import Counter

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    EngineError,
    Finished,
    Header,
    PoolCounts,
    PoolState,
)

_QUEUE_EVENTS = (Arrived, Finished, Aborted)


def check_pool_counts(trace: Trace) -> CheckResult:
    """free + cached + used + held + fenced = num_blocks, and used is what the tables name."""
    listing = Listing()
    tables = SchedulerTables() if _sees_tables(trace) else None
    for event in trace.of(PoolCounts, SteadySteps, IdleSteps, *TABLE_EVENTS):
        if isinstance(event, (SteadySteps, IdleSteps)):
            listing.count("pool counts judged", event.num_steps)
            event = event.pool  # the others are the same, and so are the tables
        elif isinstance(event, PoolCounts):
            listing.count("pool counts judged")
        else:
            if tables is not None:
                tables.follow(event)
            continue
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


def check_pool_state(trace: Trace) -> CheckResult:
    """Raw lists, references, tables and queues; nothing is left at the end."""
    listing = Listing()
    announced = _Announced(trace.header.num_blocks) if _sees_tables(trace) else None
    hosts = _HostPool(listing)
    queues_observed = trace.sees("Arrived", "Finished", "Aborted")
    live: dict[str, None] = {}
    last: PoolState | None = None
    for event in trace.of(PoolState, *TABLE_EVENTS, *_QUEUE_EVENTS):
        if isinstance(event, PoolState):
            listing.count("pool states judged")
            last = event
            if announced is None or not announced.equals(event):
                _judge_lists(event, listing)
                hosts.judge(event)
                _judge_references(event, listing)
                if announced is not None:
                    _judge_tables(event, announced.tables, listing)
            else:
                hosts.judge(event)
            if queues_observed:
                _judge_queues(event, live, listing)
        elif isinstance(event, Arrived):
            live[event.request] = None
        elif isinstance(event, (Finished, Aborted)):
            live.pop(event.request, None)
        elif announced is not None:
            announced.follow(event)
    if last is not None:
        _judge_sizes(trace.header, last, listing)
    crashed = trace.has(EngineError)
    if last is not None and queues_observed and not live and not crashed:
        _judge_end(last, listing)
    return listing.result("accounting", "pool state")


def _judge_sizes(header: Header, state: PoolState, listing: Listing) -> None:
    """The engine goes by the sizes it was configured with, also when it was built for others."""
    wanted = header.config.get("swap_space_blocks")
    if isinstance(wanted, int) and state.num_host_blocks != wanted:
        listing.report(
            Code.ACC_POOL_TOTAL,
            state.step,
            f"the swap space has {state.num_host_blocks} blocks, configured are {wanted}",
        )
    most = header.max_total_tokens
    holds = header.num_blocks * header.block_size
    ends_with_the_pool = "pool_limit" in header.capabilities
    if ends_with_the_pool and most is not None and most > holds + 1:
        listing.report(
            Code.ACC_POOL_TOTAL,
            state.step,
            f"the engine lets a request grow to {most} tokens; its pool holds {holds}, and the "
            f"last token need not be computed",
        )


def _sees_tables(trace: Trace) -> bool:
    return trace.sees("BlocksAllocated", "BlocksFreed")


class _Announced:
    """What announced allocations and frees add up to, in the form of a raw `PoolState`.

    Whole lists are compared with it, which costs a fraction of a search for what differs: a state
    that equals it needs no search.

    Args:
        num_blocks: size of the pool.

    Attributes:
        tables: rebuilt by the harness.
        ref_counts: references of every block, by the tables, [num_blocks].
    """

    def __init__(self, num_blocks: int) -> None:
        self.tables = SchedulerTables()
        self.ref_counts = [0] * num_blocks
        self._num_outside = 0  # references to blocks that the pool does not have

    def follow(self, event: TableEvent) -> None:
        """Take in what was announced."""
        if isinstance(event, BlocksAllocated):
            self.tables.allocate(event)
            self._refer(event.blocks, 1)
        elif isinstance(event, BlocksFreed):
            self._refer(event.blocks, -1)
            self._refer(self.tables.free(event), 1)  # nothing was held of these
        elif isinstance(event, BlocksReplaced):
            self._refer(self.tables.replace(event), -1)
            self._refer(event.blocks, 1)
        else:
            self.tables.fork(event)
            parent = self.tables.leases.get(event.parent)
            self._refer(parent.blocks if parent is not None else [], 1)

    def _refer(self, blocks: list[int], times: int) -> None:
        for block in blocks:
            if 0 <= block < len(self.ref_counts):
                self.ref_counts[block] += times
            else:
                self._num_outside += times

    def equals(self, state: PoolState) -> bool:
        """Whether tables and references are the raw ones, and the other blocks in one list each."""
        held = {seq: lease.blocks for seq, lease in self.tables.leases.items()}
        num_held = sum(map(len, held.values()))
        others = [*state.free, *state.cached, *state.held, *state.fenced]
        return (
            state.tables == held
            and state.ref_counts == self.ref_counts
            and num_held == self.tables.num_references
            and not self._num_outside
            and len(self.ref_counts) == state.num_blocks == len(others) + len(self.tables.refs)
            and len(set(others)) == len(others)
            and (not others or 0 <= min(others) <= max(others) < state.num_blocks)
            and not any(map(self.ref_counts.__getitem__, others))
        )


class _HostPool:
    """Judges the host blocks of one state after another; lists that stay need no second look."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._right: PoolState | None = None

    def judge(self, state: PoolState) -> None:
        """Every host block id stands in exactly one of the lists."""
        last = self._right
        if (
            last is not None
            and state.num_host_blocks == last.num_host_blocks
            and state.host_free == last.host_free
            and state.host_fenced == last.host_fenced
            and state.host_blocks == last.host_blocks
        ):
            return
        places = {
            "free": state.host_free,
            "fenced": state.host_fenced,
            "in use": [block for blocks in state.host_blocks.values() for block in blocks],
        }
        right = _judge_places(
            "host block", places, state.num_host_blocks, state.step, self._listing
        )
        self._right = state if right else None


def _judge_lists(state: PoolState, listing: Listing) -> None:
    """Every block id stands in exactly one of the lists, or is referenced."""
    places = {
        "free": state.free,
        "cached": state.cached,
        "held": state.held,
        "fenced": state.fenced,
        "referenced": [block for block, count in enumerate(state.ref_counts) if count],
    }
    _judge_places("block", places, state.num_blocks, state.step, listing)


def _judge_places(
    noun: str, lists: dict[str, list[int]], num_blocks: int, step: int, listing: Listing
) -> bool:
    """Returns whether all are in one place each."""
    places: dict[int, list[str]] = {}
    for name, blocks in lists.items():
        for block in blocks:
            places.setdefault(block, []).append(name)
    right = True
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
        right = False
        listing.report(Code.ACC_POOL_LISTS, step, what, once=(noun, block), block=block)
    return right


def _judge_references(state: PoolState, listing: Listing) -> None:
    entries = Counter(block for table in state.tables.values() for block in table)
    referenced = {block for block, count in enumerate(state.ref_counts) if count}
    for block in sorted(entries.keys() | referenced):
        counted = state.ref_counts[block] if block in referenced else 0
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
    queued = [*state.waiting, *state.running]
    if len(queued) == len(live) and live.keys() == set(queued):
        return
    places = Counter(queued)
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
        "referenced blocks": [block for block, count in enumerate(state.ref_counts) if count],
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
