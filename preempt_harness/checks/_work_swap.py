"""Work: an engine that preempts by swap recomputes only what the host has no room for.

Where swap is the engine's own mode, a victim whose blocks fit on the host is not thrown away. What
fits is counted from the log, on the safe side: all distinct blocks of the victim's tables, though
those without computed tokens need no copy, and as taken every host block whose request is swapped
out, or was until this step. Preemptions that the plan forces have modes of their own, and a step
that is decided ahead may have rows under way: neither is judged.
"""

from __future__ import annotations

from preempt_harness.checks._conditions import steps_ahead
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    Aborted,
    Finished,
    Header,
    Preempted,
    SwappedIn,
    SwappedOut,
)

_EVENTS = (
    *TABLE_EVENTS,
    Preempted,
    SwappedOut,
    SwappedIn,
    Finished,
    Aborted,
)


def swaps_by_itself(header: Header) -> bool:
    """Whether swap is the engine's own mode, with a swap space of a known size."""
    space = header.config.get("swap_space_blocks")
    return (
        header.config.get("preemption_mode") == "swap"
        and isinstance(space, int)
        and not steps_ahead(header)
    )


def check_swaps(trace: Trace) -> CheckResult:
    """Nobody is recomputed whose blocks have room on the host."""
    listing = Listing()
    space = trace.header.config.get("swap_space_blocks")
    assert isinstance(space, int)
    tables = SchedulerTables()
    host: dict[str, int] = {}  # request -> host blocks that it has
    left: list[tuple[int, int]] = []  # (step, host blocks): free when the step is done
    for event in trace.of(*_EVENTS):
        if isinstance(event, TableEvent):
            tables.follow(event)
        elif isinstance(event, SwappedOut):
            host[event.request] = len(event.pairs)
        else:
            if isinstance(event, Preempted) and event.mode == "recompute":
                left = [entry for entry in left if entry[0] >= event.step]
                num_taken = sum(host.values()) + sum(count for _, count in left)
                _judge(event, tables, space - num_taken, listing)
            if not isinstance(event, Preempted) or event.mode == "recompute":
                left.append((event.step, host.pop(event.request, 0)))
    return listing.result("work", "swaps")


def _judge(event: Preempted, tables: SchedulerTables, room: int, listing: Listing) -> None:
    if event.reason == "forced" or not event.num_computed_tokens:
        return
    listing.count("recomputed victims judged")
    blocks = {
        block
        for seq, lease in tables.leases.items()
        if request_of(seq) == event.request
        for block in lease.blocks
    }
    if blocks and len(blocks) <= room:
        listing.report(
            Code.WORK_RECOMPUTE,
            event.step,
            f"it is to be recomputed, though the engine swaps and its {len(blocks)} blocks fit on "
            f"the host, where {room} are free",
            request=event.request,
        )
