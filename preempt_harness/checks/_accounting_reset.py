"""Accounting of cache resets: what was computed before one is not found after it."""

from __future__ import annotations

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import ComputedRows, Trace
from preempt_harness.record import (
    BlocksAllocated,
    BlocksCopied,
    CacheReset,
    SwappedIn,
    SwappedOut,
)

_EVENTS = (CacheReset, ComputedRows, BlocksCopied, SwappedOut, SwappedIn, BlocksAllocated)


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
    running requests nothing that was computed before it comes back from the host either.
    """
    listing = Listing()
    size = trace.header.block_size
    kinds = iter(_resets_asked_for(trace))
    written_in: dict[int, int] = {}
    host_written_in: dict[int, int] = {}
    reset_in: int | None = None
    running_reset_in = -1
    granted: dict[str, set[int]] = {}  # request -> blocks of its branches in the latest step
    step = -1
    for event in trace.of(*_EVENTS):
        if isinstance(event, CacheReset):
            reset_in = event.step
            if next(kinds, "") == "reset_running_requests":
                running_reset_in = event.step
            listing.count("resets judged")
        elif isinstance(event, ComputedRows):
            if event.rank == 0:
                for row in event.rows:
                    written_in.update((slot // size, row.step) for slot in row.written_slots)
        elif isinstance(event, SwappedOut):
            for block, host in event.pairs:
                host_written_in[host] = written_in.get(block, event.step)
        elif isinstance(event, BlocksCopied | SwappedIn):
            for source, block in event.pairs:  # what came there is as old as its source
                written_in.pop(block, None)
                if isinstance(event, BlocksCopied):
                    continue
                written = host_written_in.get(source, event.step)
                if written < running_reset_in:
                    listing.report(
                        Code.ACC_RESET,
                        event.step,
                        f"it comes back from host block {source}, and was last written in step "
                        f"{written}, before running requests were reset (step {running_reset_in})",
                        request=event.request,
                        block=block,
                        once=event.request,
                    )
        else:
            if event.step != step:
                step, granted = event.step, {}
            own = granted.setdefault(request_of(event.seq), set())
            for block in event.blocks[: event.num_cached]:
                hit_written = written_in.get(block)
                if reset_in is None or hit_written is None or block in own:
                    continue
                if hit_written >= reset_in:
                    continue
                listing.report(
                    Code.ACC_RESET,
                    event.step,
                    f"it is a hit, and was last written in step {hit_written}, before the cache "
                    f"was reset (step {reset_in})",
                    seq=event.seq,
                    block=block,
                    once=event.seq,
                )
            own.update(event.blocks)
    return listing.result("accounting", "resets")


def _resets_asked_for(trace: Trace) -> list[str]:
    """Kinds of the workload's resets, in the order in which they are carried out."""
    operations = sorted(trace.workload.operations, key=lambda item: item.step)
    return [item.kind for item in operations if item.kind.startswith("reset")]
