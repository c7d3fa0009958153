"""Accounting of cache resets: what was computed before one is not found after it."""

from __future__ import annotations

from collections.abc import Iterable

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import Batch, ComputedRows, Trace
from preempt_harness.record import (
    Aborted,
    BlocksAllocated,
    BlocksCopied,
    CacheReset,
    Finished,
    Preempted,
    SwappedIn,
    SwappedOut,
)

_EVENTS = (
    CacheReset,
    ComputedRows,
    BlocksCopied,
    SwappedOut,
    SwappedIn,
    BlocksAllocated,
    Preempted,
    Finished,
    Aborted,
)


def resets_parts(trace: Trace) -> tuple[CheckResult, ...]:
    """The check where anything was reset; a plain word where the engine does not show it."""
    if trace.has(CacheReset):
        return (check_resets(trace),)
    asked = any(item.kind.startswith("reset") for item in trace.workload.operations)
    if not asked or trace.sees("CacheReset"):
        return ()
    reason = f"{trace.header.engine} does not show CacheReset"
    return (CheckResult(check="accounting", part="resets", not_observable=reason),)


def check_resets(trace: Trace) -> CheckResult:
    """No hit on a block that was last written before the latest reset.

    Branches of one request share blocks among themselves; those are no hits. After a reset of
    running requests nothing that was computed before it comes back from the host either, and nobody
    goes on where it was.
    """
    judge = _Resets(trace)
    for event in trace.of(*_EVENTS):
        judge.take(event)
    return judge.listing.result("accounting", "resets")


class _Resets:
    """Judges events in their order."""

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._size = trace.header.block_size
        self._written_in: dict[int, int] = {}  # block -> step
        self._host_written_in: dict[int, int] = {}
        self._reset_in: int | None = None
        self._running_reset_in = -1
        self._granted: dict[str, set[int]] = {}  # request -> blocks of its branches in this step
        self._step = -1
        self._preempted_in: dict[str, int] = {}
        self._running: set[str] = set()  # requests that compute, and have not lost it since
        self._kept: set[str] = set()  # those of them at the latest reset of running requests

    def take(self, event: Batch) -> None:
        if isinstance(event, CacheReset):
            self._reset(event)
        elif isinstance(event, ComputedRows):
            if event.rank == 0:
                self._compute(event)
        elif isinstance(event, Preempted | Finished | Aborted):
            self._preempted_in[event.request] = event.step
            self._running.discard(event.request)
            self._kept.discard(event.request)
        elif isinstance(event, BlocksCopied):
            # What came there is as old as its source; all sources are read first.
            _move(self._written_in, self._written_in, event.pairs)
        elif isinstance(event, SwappedOut):
            _move(self._written_in, self._host_written_in, event.pairs)
        elif isinstance(event, SwappedIn):
            self._swap_in(event)
        elif isinstance(event, BlocksAllocated):
            self._allocate(event)

    def _reset(self, event: CacheReset) -> None:
        self._reset_in = event.step
        if event.running:
            self._running_reset_in = event.step
            self._kept = set(self._running)
        self.listing.count("resets judged")

    def _compute(self, event: ComputedRows) -> None:
        for row in event.rows:
            request = request_of(row.seq)
            # A step under way at a preemption is for nothing.
            if row.step >= self._preempted_in.get(request, -1):
                self._running.add(request)
            if request in self._kept and row.step >= self._running_reset_in:
                self.listing.report(
                    Code.ACC_RESET,
                    row.step,
                    f"it goes on from position {row.start}, and was not preempted when running "
                    f"requests were reset (step {self._running_reset_in})",
                    seq=row.seq,
                    once=request,
                )
            self._written_in.update((slot // self._size, row.step) for slot in row.written_slots)

    def _swap_in(self, event: SwappedIn) -> None:
        _move(self._host_written_in, self._written_in, event.pairs)
        for host, block in event.pairs:
            written = self._host_written_in.get(host, event.step)
            if written < self._running_reset_in:
                self.listing.report(
                    Code.ACC_RESET,
                    event.step,
                    f"it comes back from host block {host}, and was last written in step "
                    f"{written}, before running requests were reset "
                    f"(step {self._running_reset_in})",
                    request=event.request,
                    block=block,
                    once=event.request,
                )

    def _allocate(self, event: BlocksAllocated) -> None:
        if event.step != self._step:
            self._step, self._granted = event.step, {}
        own = self._granted.setdefault(request_of(event.seq), set())
        for block in event.blocks[event.num_cached :]:  # how old it was ends here
            self._written_in.pop(block, None)
        for block in event.blocks[: event.num_cached]:
            written = self._written_in.get(block)
            if self._reset_in is None or written is None or block in own:
                continue
            if written < self._reset_in:
                self.listing.report(
                    Code.ACC_RESET,
                    event.step,
                    f"it is a hit, and was last written in step {written}, before the cache was "
                    f"reset (step {self._reset_in})",
                    seq=event.seq,
                    block=block,
                    once=event.seq,
                )
        own.update(event.blocks)


def _move(
    sources: dict[int, int], targets: dict[int, int], pairs: Iterable[tuple[int, int]]
) -> None:
    """The content of a source, as old as it is, is now that of its target as well."""
    for target, written in [(target, sources.get(source)) for source, target in pairs]:
        targets.pop(target, None)
        if written is not None:
            targets[target] = written
