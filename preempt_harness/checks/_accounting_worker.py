"""Accounting of the two views: what the scheduler decided is what every worker was given."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import (
    TABLE_EVENTS,
    Lease,
    SchedulerTables,
    first_difference,
)
from preempt_harness.checks.trace import ComputedRows, ScheduledRows, Trace, batches
from preempt_harness.record import (
    BlocksCopied,
    Computed,
    StepDone,
    WorkerCopied,
)


class _Rows:
    """Rows of one step by one side's account, column by column."""

    __slots__ = ("ends", "seqs", "starts")

    def __init__(self) -> None:
        self.seqs: tuple[str, ...] = ()
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, rows: ScheduledRows | ComputedRows) -> None:
        self.seqs += rows.seqs
        self.starts += rows.starts
        self.ends += rows.ends

    def equals(self, other: _Rows) -> bool:
        """Whether both are the same rows in the same order."""
        return self.seqs == other.seqs and self.starts == other.starts and self.ends == other.ends

    def positions(self) -> dict[str, tuple[int, int]]:
        """Sequence -> [start, end)."""
        ranges = zip(self.starts, self.ends, strict=True)
        return dict(zip(self.seqs, ranges, strict=True))


@dataclass(slots=True)
class _Step:
    """What was said of one step so far."""

    scheduled: _Rows = field(default_factory=_Rows)
    computed: dict[int, _Rows] = field(default_factory=dict)
    ordered: list[tuple[int, int]] = field(default_factory=list)
    copied: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def check_worker_view(trace: Trace) -> CheckResult:
    """Positions of every step, sequence and rank, and whole-block copies.

    A step is judged when it is done; one that a crash cut off is not.
    """
    listing = Listing()
    copies_observed = trace.sees("BlocksCopied", "WorkerCopied")
    steps: defaultdict[int, _Step] = defaultdict(_Step)
    kinds = (SteadySteps, ScheduledRows, ComputedRows, BlocksCopied, WorkerCopied, StepDone)
    for event in trace.of(*kinds):
        if isinstance(event, SteadySteps):  # of which both views agree
            listing.count("rows compared", event.num_steps * len(event.seqs))
        elif isinstance(event, ScheduledRows):
            steps[event.step].scheduled.add(event)
        elif isinstance(event, ComputedRows):
            steps[event.step].computed.setdefault(event.rank, _Rows()).add(event)
        elif isinstance(event, BlocksCopied):
            steps[event.step].ordered += event.pairs
        elif isinstance(event, WorkerCopied):
            steps[event.step].copied.setdefault(event.rank, []).extend(event.pairs)
        else:
            done = steps.pop(event.step, None) or _Step()
            for rank in range(trace.header.num_ranks):
                _judge_positions(event.step, rank, done, listing)
                if copies_observed:
                    _judge_copies(event.step, rank, done, listing)
    return listing.result("accounting", "worker view")


def _judge_positions(number: int, rank: int, step: _Step, listing: Listing) -> None:
    rows = step.computed.get(rank) or _Rows()
    if step.scheduled.equals(rows):
        if rows.seqs:
            listing.count("rows compared", len(set(rows.seqs)))
        return
    scheduled_at, computed_at = step.scheduled.positions(), rows.positions()
    for seq in sorted(scheduled_at.keys() | computed_at.keys()):
        listing.count("rows compared")
        wanted, given = scheduled_at.get(seq), computed_at.get(seq)
        if wanted == given:
            continue
        scheduled = "nothing" if wanted is None else f"positions [{wanted[0]}, {wanted[1]})"
        computed = "nothing" if given is None else f"positions [{given[0]}, {given[1]})"
        listing.report(
            Code.ACC_WORKER_VIEW,
            number,
            f"the scheduler scheduled {scheduled}, rank {rank} computed {computed}",
            once=seq,
            seq=seq,
            position=(wanted or given or (0, 0))[0],
            rank=rank,
        )


def _judge_copies(number: int, rank: int, step: _Step, listing: Listing) -> None:
    copied = step.copied.get(rank, [])
    if sorted(copied) != sorted(step.ordered):
        listing.report(
            Code.ACC_WORKER_COPIES,
            number,
            f"the scheduler ordered block copies {step.ordered}, rank {rank} made {copied}",
            once=rank,
            rank=rank,
        )


def check_worker_tables(trace: Trace) -> CheckResult:
    """The table a worker reads through is the scheduler's, entry by entry, as far as it is used.

    Costs what changes: an entry is compared when it is new on either side.
    """
    listing = Listing()
    tables = SchedulerTables()
    workers: dict[int, dict[str, _WorkerTable]] = {}
    size = trace.header.block_size
    for event in trace.of(SteadySteps, ComputedRows, ScheduledRows, *TABLE_EVENTS):
        if isinstance(event, SteadySteps):
            if not _agree(event, workers.setdefault(0, {}), tables, size, listing):
                for batch in batches(event.events):
                    if isinstance(batch, ScheduledRows):
                        tables.schedule(batch)
                    elif isinstance(batch, ComputedRows):
                        _judge_tables(batch, workers[0], tables, size, listing)
        elif isinstance(event, ComputedRows):
            workers_of_rank = workers.setdefault(event.rank, {})
            _judge_tables(event, workers_of_rank, tables, size, listing)
        elif isinstance(event, ScheduledRows):
            tables.schedule(event)
        else:
            tables.follow(event)
    return listing.result("accounting", "worker tables")


class _WorkerTable:
    """A sequence's block table as a rank knows it; entries [0, agreed) were compared with a lease.

    Attributes:
        blocks: the table.
        lease: what it was compared with.
        agreed: how far.
    """

    __slots__ = ("agreed", "blocks", "lease")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.lease: Lease | None = None
        self.agreed = 0


def _agree(
    steps: SteadySteps,
    workers: dict[str, _WorkerTable],
    tables: SchedulerTables,
    block_size: int,
    listing: Listing,
) -> bool:
    """Whether all tables of steady steps are right; if so, they are compared."""
    compared: list[tuple[str, _WorkerTable]] = []
    num_entries = 0
    for row, (seq, end) in enumerate(zip(steps.seqs, steps.ends, strict=True)):
        before, lease = workers.get(seq) or _WorkerTable(), tables.leases.get(seq)
        keep, new = steps.table_change(row)
        used_first = -(-(steps.starts[row] + steps.lengths[row]) // block_size)
        used = -(-end // block_size)
        start = min(before.agreed, keep) if lease is before.lease else 0
        blocks = before.blocks if keep >= len(before.blocks) else before.blocks[:keep]
        blocks = [*blocks, *new] if new else blocks
        if (
            lease is None
            or start > used_first
            or used > len(blocks)
            or blocks[start:used] != lease.blocks[start:used]
        ):
            return False
        after = _WorkerTable()
        after.blocks, after.lease, after.agreed = blocks, lease, used
        compared.append((seq, after))
        num_entries += used - start
    workers.update(compared)
    listing.count("table entries compared", num_entries)
    return True


def _judge_tables(
    rows: ComputedRows,
    workers: dict[str, _WorkerTable],
    tables: SchedulerTables,
    block_size: int,
    listing: Listing,
) -> None:
    listing.count("table entries compared", 0)
    leases = tables.leases_at(rows.step, rows.seqs)
    for row, lease, end in zip(rows.rows, leases, rows.ends, strict=True):
        worker = workers.get(row.seq)
        if worker is None:
            worker = workers[row.seq] = _WorkerTable()
        used = -(-end // block_size)
        if row.table_new or row.table_keep < len(worker.blocks):
            worker.blocks[row.table_keep :] = row.table_new
        elif lease is worker.lease and used == worker.agreed <= row.table_keep:
            continue
        start = min(worker.agreed, row.table_keep) if lease is worker.lease else 0
        worker.lease = lease
        worker.agreed = used
        if start < used:
            _judge_table(row, worker.blocks, lease, start, used, listing)


def _judge_table(
    row: Computed, worker: list[int], lease: Lease | None, start: int, used: int, listing: Listing
) -> None:
    listing.count("table entries compared", used - start)
    given = worker[start:used]
    announced = lease.blocks[start:used] if lease is not None else []
    index = first_difference(given, announced)
    if index is None:
        return
    block = given[index] if index < len(given) else None
    listing.report(
        Code.ACC_WORKER_TABLE,
        row.step,
        f"entry {start + index} of rank {row.rank}'s block table is "
        f"{'missing' if block is None else block}, the scheduler's is "
        f"{announced[index] if index < len(announced) else 'missing'}",
        once=row.seq,
        seq=row.seq,
        block=block,
        rank=row.rank,
    )
