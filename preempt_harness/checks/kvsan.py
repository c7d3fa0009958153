"""KVSan: shadow memory for a paged KV cache, in the manner of AddressSanitizer.

Judges what workers were really given (`Computed`) against each sequence's own tokens, and against
who holds which block by the scheduler's account. Needs block tables, no tensors and no model. Owns
the order of events and what concerns all ranks; one rank's judgement is `sanitizer.py`.

Chain values (`chain.py`): a slot of position p holds `h_p = H(h_{p-1} as read back through the
block table, token_p, p)`. A read at p is right iff the slot holds the value that the reader's own
tokens 0..p lead to. Who wrote it is reported, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from preempt_harness.checks._kvsan_state import Context
from preempt_harness.checks.finding import (
    CheckResult,
    Code,
    Finding,
    Listing,
    request_of,
    why_not_observed,
)
from preempt_harness.checks.sanitizer import RankSanitizer
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import SchedulerTables
from preempt_harness.checks.trace import (
    ComputedRows,
    DeliveredRows,
    Folded,
    ScheduledRows,
    Trace,
    batches,
)
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksPoisoned,
    BlocksReplaced,
    Computed,
    EngineError,
    Event,
    Finished,
    Forked,
    Header,
    Preempted,
    Resumed,
    TokensChosen,
    TrialRecord,
    WorkerCopied,
    WorkerSwappedIn,
    WorkerSwappedOut,
)

Verify = Literal["incremental", "full"]

CONTENT_EVENTS = frozenset({"Arrived", "Computed", "TokensDelivered"})
OWNERSHIP_EVENTS = frozenset({"BlocksAllocated", "BlocksFreed"})
OWNERSHIP_CODES = frozenset(
    {
        Code.KVSAN_USE_AFTER_FREE,
        Code.KVSAN_SHARED_WRITE,
        Code.KVSAN_DOUBLE_MAP,
        Code.KVSAN_DOUBLE_FREE,
        Code.KVSAN_LEAK,
    }
)
# What a worker does to its blocks; within a step it comes before the rows of the same rank.
_RANK_BLOCK_EVENTS = (BlocksPoisoned, WorkerCopied, WorkerSwappedOut, WorkerSwappedIn)


class KVSan:
    """Judges events in their order, live or from a record.

    Args:
        header: of the record: block size, pool, ranks, and what is observed.
        verify: "incremental", or "full" to read everything every step; same findings.
    """

    def __init__(self, header: Header, *, verify: Verify = "incremental") -> None:
        self._listing = Listing()
        sees_ownership = set(header.observed) >= OWNERSHIP_EVENTS
        self._tables = SchedulerTables() if sees_ownership else None
        self._num_ranks = header.num_ranks
        self._context = Context(
            block_size=header.block_size,
            num_blocks=header.num_blocks,
            vocab_size=header.vocab_size,
            tables=self._tables,
            listing=self._listing,
            full=verify == "full",
        )
        self._ranks = [RankSanitizer(rank, self._context) for rank in range(header.num_ranks)]
        self._tick = 0
        self._rows: dict[int, ComputedRows] = {}  # of the step at hand, not yet judged
        self._computed: dict[int, list[ComputedRows]] = {}  # judged, to be compared between ranks
        self._prompts: dict[str, list[int]] = {}
        self._branches: dict[str, list[str]] = {}
        self._swapped: set[str] = set()
        self._ended: dict[str, int] = {}
        self._crashed = False

    @property
    def findings(self) -> list[Finding]:
        """So far, in the order in which they showed."""
        return self._listing.findings

    @property
    def counted(self) -> dict[str, int]:
        """Figures by name; the same for both ways of verifying."""
        return self._listing.counted

    @property
    def num_operations(self) -> int:
        """Slots written and read, entries compared and blocks invalidated: the check's cost."""
        return sum(rank.num_operations for rank in self._ranks)

    def feed(self, event: Event) -> None:
        """Take in the next event."""
        for batch in batches((event,)):
            self.take(batch)

    def take(self, batch: Folded) -> None:
        """Take in the next event, or rows or steady steps that were taken together."""
        self._tick += 1
        if (self._rows or self._computed) and not isinstance(batch, ComputedRows):
            if isinstance(batch, _RANK_BLOCK_EVENTS) and self._in_step(batch.step):
                if batch.rank in self._rows:  # what a rank does to blocks after its rows
                    self._compute_rank(batch.rank)
            else:
                self._compute()
        handler = _HANDLERS.get(type(batch))
        if handler is None and self._tables is not None:
            handler = _OWNERSHIP_HANDLERS.get(type(batch))
        if handler is not None:
            handler(self, batch)

    def finish(self) -> list[Finding]:
        """The record is at its end.

        Returns:
            All findings.
        """
        self._compute()
        self._check_leaks()
        return self.findings

    def result(self) -> CheckResult:
        """What it found so far."""
        return self._listing.result("kvsan")

    # Rows of a step -----------------------------------------------------------------------------

    def _take_rows(self, rows: ComputedRows) -> None:
        if not 0 <= rows.rank < self._num_ranks:
            self._listing.report(
                Code.KVSAN_RANKS_DISAGREE,
                rows.step,
                f"rank {rows.rank} computes, but there are {self._num_ranks} ranks",
                once=("unknown rank", rows.rank),
                rank=rows.rank,
            )
            return
        if (self._rows or self._computed) and not self._in_step(rows.step):
            self._compute()
        for seq in rows.seqs:
            if seq not in self._context.known:
                self._known(seq)
        waiting = self._rows.get(rows.rank)
        if waiting is not None:
            rows = ComputedRows([*waiting.rows, *rows.rows])
        self._rows[rows.rank] = rows

    def _take_steady(self, steps: SteadySteps) -> None:
        """All of them at once, or all but the first, or one by one."""
        if self._go_on(steps):
            return
        for batch in batches(steps.first_events()):
            self.take(batch)
        others = steps.but_first()
        if others is not None and not self._go_on(others):
            for batch in batches(others.events):
                self.take(batch)

    def _go_on(self, steps: SteadySteps) -> bool:
        for seq in steps.seqs:
            if seq not in self._context.known:
                self._known(seq)
        told = dict(zip(steps.delivered_seqs, steps.delivered_ids(), strict=True))
        (rank,) = self._ranks
        if self._context.full or not rank.goes_on(steps, told):
            return False
        self._listing.count("rows judged", steps.num_steps * len(steps.seqs))
        self._deliver(tuple(told), list(told.values()))
        rank.go_on(steps, self._tick)
        return True

    def _in_step(self, step: int) -> bool:
        """Whether rows of this step are waiting for those of other ranks."""
        return any(rows.step == step for rows in self._rows.values()) or any(
            judged[0].step == step for judged in self._computed.values()
        )

    def _compute_rank(self, rank: int) -> None:
        rows = self._rows.pop(rank)
        self._listing.count("rows judged", len(rows.rows))
        self._ranks[rank].compute(rows, self._tick)
        if self._num_ranks > 1:
            self._computed.setdefault(rank, []).append(rows)

    def _compute(self) -> None:
        """All ranks' rows of a step are there."""
        for rank in list(self._rows):
            self._compute_rank(rank)
        if self._computed:
            computed, self._computed = self._computed, {}
            self._compare_ranks(computed)

    def _compare_ranks(self, computed: dict[int, list[ComputedRows]]) -> None:
        """All ranks are given the same."""
        by_rank = [
            {row.seq: row for rows in computed.get(rank, ()) for row in rows.rows}
            for rank in range(self._num_ranks)
        ]
        for rank in range(1, self._num_ranks):
            for seq in dict.fromkeys([*by_rank[0], *by_rank[rank]]):
                first, other = by_rank[0].get(seq), by_rank[rank].get(seq)
                difference = _difference(first, other)
                present = first or other
                if difference and present is not None:
                    self._listing.report(
                        Code.KVSAN_RANKS_DISAGREE,
                        present.step,
                        f"rank 0 and rank {rank} were given different {difference} for {seq}",
                        once=(seq, rank),
                        seq=seq,
                        rank=rank,
                    )

    # Requests and tokens ------------------------------------------------------------------------

    def _arrived(self, event: Arrived) -> None:
        self._prompts[event.request] = event.prompt_token_ids

    def _delivered(self, rows: DeliveredRows) -> None:
        self._deliver(rows.seqs, rows.token_ids)

    def _deliver(self, seqs: Sequence[str], tokens: Sequence[list[int]]) -> None:
        known = self._context.known
        for seq, token_ids in zip(seqs, tokens, strict=True):
            if seq in known:
                known[seq] += token_ids
            else:
                self._known(seq).extend(token_ids)
        for rank in self._ranks:
            rank.deliver(seqs, tokens)

    def _chosen(self, event: TokensChosen) -> None:
        self._known(event.seq).extend(event.token_ids)
        for rank in self._ranks:
            rank.deliver((event.seq,), (event.token_ids,))

    def _forked(self, event: Forked) -> None:
        self._known(event.child)[:] = self._known(event.parent)
        if self._tables is not None:
            self._tables.fork(event)

    def _preempted(self, event: Preempted) -> None:
        if event.mode == "swap":
            self._swapped.add(event.request)
        else:  # perhaps its host blocks
            self._swapped.discard(event.request)
        for seq in [event.seq] if event.seq else self._branches.get(event.request, ()):
            self._lose_blocks(seq)

    def _resumed(self, event: Resumed) -> None:
        self._swapped.discard(event.request)

    def _finished(self, event: Finished | Aborted) -> None:
        self._ended[event.request] = event.step

    def _died(self, event: EngineError) -> None:
        self._crashed = True

    def _known(self, seq: str) -> list[int]:
        """Prompt and delivered tokens of a sequence, to be read and extended."""
        known = self._context.known.get(seq)
        if known is None:
            request = request_of(seq)
            known = self._context.known[seq] = list(self._prompts.get(request, ()))
            self._branches.setdefault(request, []).append(seq)
        return known

    # Blocks by the scheduler's account ------------------------------------------------------------

    def _scheduled(self, rows: ScheduledRows) -> None:
        assert self._tables is not None
        self._tables.schedule(rows)

    def _allocated(self, event: BlocksAllocated) -> None:
        assert self._tables is not None
        for block in event.blocks:
            if not 0 <= block < self._context.num_blocks:
                self._listing.report(
                    Code.KVSAN_ID_RANGE,
                    event.step,
                    f"{event.seq} is given block {block}; the pool has blocks 0 to "
                    f"{self._context.num_blocks - 1}",
                    once=block,
                    seq=event.seq,
                    block=block,
                )
        for block in self._tables.allocate(event, self._tick):
            self._context.spoiled.add(block)
            others = [seq for seq in self._tables.holders(block) if seq != event.seq]
            self._listing.report(
                Code.KVSAN_DOUBLE_MAP,
                event.step,
                f"block {block} is handed to {event.seq} as free, but "
                f"{', '.join(others) or 'the same sequence'} holds it",
                once=(block, event.step),
                seq=event.seq,
                block=block,
            )

    def _freed(self, event: BlocksFreed) -> None:
        assert self._tables is not None
        for block in self._tables.free(event):
            self._listing.report(
                Code.KVSAN_DOUBLE_FREE,
                event.step,
                f"{event.seq} gives up block {block}, which it does not hold",
                once=(block, event.step),
                seq=event.seq,
                block=block,
            )
        if event.seq not in self._tables.leases:
            self._lose_blocks(event.seq)

    def _replaced(self, event: BlocksReplaced) -> None:
        assert self._tables is not None
        self._tables.replace(event)

    def _lose_blocks(self, seq: str) -> None:
        keeps_contents = request_of(seq) in self._swapped
        for rank in self._ranks:
            rank.lose_blocks(seq, keeps_contents)

    def _check_leaks(self) -> None:
        """Whoever ended holds nothing. A crashed engine is not asked."""
        if self._tables is None or self._crashed:
            return
        for seq, lease in self._tables.leases.items():
            ended = self._ended.get(request_of(seq))
            if ended is None or not lease.blocks:
                continue
            self._listing.report(
                Code.KVSAN_LEAK,
                ended,
                f"it ended and still holds {len(lease.blocks)} blocks at the end: "
                f"{_some(lease.blocks)}",
                seq=seq,
                block=lease.blocks[0],
            )

    # Blocks by the workers' account ---------------------------------------------------------------

    def _poisoned(self, event: BlocksPoisoned) -> None:
        self._ranks[event.rank].poison(event.step, event.blocks, self._tick)

    def _copied(self, event: WorkerCopied) -> None:
        self._ranks[event.rank].copy(event.step, event.pairs, self._tick)

    def _swapped_out(self, event: WorkerSwappedOut) -> None:
        self._ranks[event.rank].swap_out(event.step, event.pairs, self._tick)

    def _swapped_in(self, event: WorkerSwappedIn) -> None:
        self._ranks[event.rank].swap_in(event.step, event.pairs, self._tick)


_Handlers = dict[type[Folded], Callable[[KVSan, Any], None]]

# Functions, not bound methods: an object that refers to itself stays, with all that it knows of
# contents, until garbage is collected.
_HANDLERS: _Handlers = {
    Arrived: KVSan._arrived,
    SteadySteps: KVSan._take_steady,
    ComputedRows: KVSan._take_rows,
    TokensChosen: KVSan._chosen,
    DeliveredRows: KVSan._delivered,
    Preempted: KVSan._preempted,
    Resumed: KVSan._resumed,
    Finished: KVSan._finished,
    Aborted: KVSan._finished,
    EngineError: KVSan._died,
    Forked: KVSan._forked,
    BlocksPoisoned: KVSan._poisoned,
    WorkerCopied: KVSan._copied,
    WorkerSwappedOut: KVSan._swapped_out,
    WorkerSwappedIn: KVSan._swapped_in,
}
_OWNERSHIP_HANDLERS: _Handlers = {
    ScheduledRows: KVSan._scheduled,
    BlocksAllocated: KVSan._allocated,
    BlocksReplaced: KVSan._replaced,
    BlocksFreed: KVSan._freed,
}


def check_kvsan(record: TrialRecord, verify: Verify = "incremental") -> CheckResult:
    """KVSan over a whole record, in one result."""
    return _judge(Trace(record), verify)


def _judge(trace: Trace, verify: Verify) -> CheckResult:
    sanitizer = KVSan(trace.header, verify=verify)
    for batch in trace.batches if verify == "full" else trace.folded:
        sanitizer.take(batch)
    sanitizer.finish()
    return sanitizer.result()


def kvsan_parts(trace: Trace, verify: Verify = "incremental") -> tuple[CheckResult, CheckResult]:
    """KVSan over a whole record: of contents, and of who holds which block.

    Either part can be judged without the other; what is not observed says so.
    """
    whole = _judge(trace, verify)
    ownership = tuple(f for f in whole.findings if f.code in OWNERSHIP_CODES)
    contents = tuple(f for f in whole.findings if f.code not in OWNERSHIP_CODES)
    return (
        CheckResult(
            check="kvsan",
            part="contents",
            findings=contents,
            counted=whole.counted,
            not_observable=why_not_observed(trace.header, CONTENT_EVENTS),
        ),
        CheckResult(
            check="kvsan",
            part="ownership",
            findings=ownership,
            not_observable=why_not_observed(trace.header, OWNERSHIP_EVENTS),
        ),
    )


def _difference(first: Computed | None, other: Computed | None) -> str:
    """What two ranks were given differently, "" for nothing."""
    if first is None or other is None:
        return "rows (one of them none at all)"
    names = {
        "positions": (first.start, other.start),
        "tokens": (first.token_ids, other.token_ids),
        "slots": (first.written_slots, other.written_slots),
        "block tables": (
            (first.table_keep, first.table_new),
            (other.table_keep, other.table_new),
        ),
        "read lengths": (first.read_len, other.read_len),
    }
    return " and ".join(name for name, (one, two) in names.items() if one != two)


def _some(blocks: list[int], most: int = 8) -> str:
    listed = ", ".join(map(str, blocks[:most]))
    return listed if len(blocks) <= most else f"{listed}, ..."
