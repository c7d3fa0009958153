"""Accounting of cache resets: what was computed before one is not found after it."""

from __future__ import annotations

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import ComputedRows, Trace
from preempt_harness.record import BlocksAllocated, BlocksCopied, CacheReset, SwappedIn


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

    Branches of one request share blocks among themselves; those are no hits.
    """
    listing = Listing()
    size = trace.header.block_size
    written_in: dict[int, int] = {}
    reset_in: int | None = None
    granted: dict[str, set[int]] = {}  # request -> blocks of its branches in the latest step
    step = -1
    for event in trace.of(CacheReset, ComputedRows, BlocksCopied, SwappedIn, BlocksAllocated):
        if isinstance(event, CacheReset):
            reset_in = event.step
            listing.count("resets judged")
        elif isinstance(event, ComputedRows):
            if event.rank == 0:
                for row in event.rows:
                    written_in.update((slot // size, row.step) for slot in row.written_slots)
        elif isinstance(event, BlocksCopied | SwappedIn):
            for _, block in event.pairs:  # what came there is as old as its source
                written_in.pop(block, None)
        else:
            if event.step != step:
                step, granted = event.step, {}
            own = granted.setdefault(request_of(event.seq), set())
            for block in event.blocks[: event.num_cached]:
                written = written_in.get(block)
                if reset_in is None or written is None or block in own or written >= reset_in:
                    continue
                listing.report(
                    Code.ACC_RESET,
                    event.step,
                    f"it is a hit, and was last written in step {written}, before the cache was "
                    f"reset (step {reset_in})",
                    seq=event.seq,
                    block=block,
                    once=event.seq,
                )
            own.update(event.blocks)
    return listing.result("accounting", "resets")
