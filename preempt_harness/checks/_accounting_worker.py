"""Accounting of the two views: what the scheduler decided is what every worker was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.tables import (
    Lease,
    SchedulerTables,
    first_difference,
    num_blocks_for,
)
from preempt_harness.record import (
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksReplaced,
    Computed,
    Forked,
    Scheduled,
    StepDone,
    TrialRecord,
    WorkerCopied,
)


@dataclass(slots=True)
class _Step:
    """What was said of one step so far."""

    scheduled: dict[str, tuple[int, int]] = field(default_factory=dict)
    computed: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    ordered: list[tuple[int, int]] = field(default_factory=list)
    copied: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def check_worker_view(record: TrialRecord) -> CheckResult:
    """Positions of every step, sequence and rank, and whole-block copies.

    A step is judged when it is done; one that a crash cut off is not.
    """
    listing = Listing()
    copies_observed = set(record.header.observed) >= {"BlocksCopied", "WorkerCopied"}
    steps: dict[int, _Step] = {}
    for event in record.events:
        if isinstance(event, Scheduled):
            step = steps.setdefault(event.step, _Step())
            step.scheduled[event.seq] = (event.start, event.end)
        elif isinstance(event, Computed):
            step = steps.setdefault(event.step, _Step())
            rows = step.computed.setdefault(event.rank, {})
            rows[event.seq] = (event.start, event.start + len(event.token_ids))
        elif isinstance(event, BlocksCopied):
            steps.setdefault(event.step, _Step()).ordered += event.pairs
        elif isinstance(event, WorkerCopied):
            step = steps.setdefault(event.step, _Step())
            step.copied.setdefault(event.rank, []).extend(event.pairs)
        elif isinstance(event, StepDone):
            done = steps.pop(event.step, _Step())
            for rank in range(record.header.num_ranks):
                _judge_positions(event.step, rank, done, listing)
                if copies_observed:
                    _judge_copies(event.step, rank, done, listing)
    return listing.result("accounting", "worker view")


def _judge_positions(number: int, rank: int, step: _Step, listing: Listing) -> None:
    rows = step.computed.get(rank, {})
    for seq in sorted(step.scheduled.keys() | rows.keys()):
        listing.count("rows compared")
        wanted, given = step.scheduled.get(seq), rows.get(seq)
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


def check_worker_tables(record: TrialRecord) -> CheckResult:
    """The table a worker reads through is the scheduler's, entry by entry, as far as it is used.

    Costs what changes: an entry is compared when it is new on either side.
    """
    listing = Listing()
    tables = SchedulerTables()
    workers: dict[tuple[int, str], list[int]] = {}
    agreed: dict[tuple[int, str], tuple[Lease | None, int]] = {}
    for event in record.events:
        if isinstance(event, BlocksAllocated):
            tables.allocate(event)
        elif isinstance(event, BlocksFreed):
            tables.free(event)
        elif isinstance(event, BlocksReplaced):
            tables.replace(event)
        elif isinstance(event, Forked):
            tables.fork(event)
        elif isinstance(event, Scheduled):
            tables.schedule(event)
        elif isinstance(event, Computed):
            key = (event.rank, event.seq)
            worker = workers.setdefault(key, [])
            del worker[event.table_keep :]
            worker.extend(event.table_new)
            lease = tables.lease_at(event.step, event.seq)
            before, upto = agreed.get(key, (None, 0))
            start = min(upto, event.table_keep) if lease is before else 0
            end = event.start + len(event.token_ids)
            used = num_blocks_for(end, record.header.block_size)
            agreed[key] = (lease, used)
            _judge_table(event, worker, lease, start, used, listing)
    return listing.result("accounting", "worker tables")


def _judge_table(
    row: Computed, worker: list[int], lease: Lease | None, start: int, used: int, listing: Listing
) -> None:
    listing.count("table entries compared", max(0, used - start))
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
