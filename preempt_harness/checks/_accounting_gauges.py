"""Accounting of gauges: what an engine says of its present state, against the state itself.

An engine reports its load in its own words, for schedulers of clusters and for dashboards: how many
requests run and wait, how much of the cache is in use. Each is compared with the `PoolState` of the
same moment, which is the one before the `Counters` in the same step.
"""

from __future__ import annotations

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.trace import Trace
from preempt_harness.record import Counters, Header, PoolState

GAUGES = ("num_running_requests", "num_used_blocks", "num_waiting_requests")


def check_gauges(trace: Trace) -> CheckResult:
    """Every gauge of every `Counters` event."""
    listing = Listing()
    state: PoolState | None = None
    for event in trace.of(PoolState, Counters):
        if isinstance(event, PoolState):
            state = event
        elif state is not None and state.step == event.step:
            own = _own(state, trace.header)
            for name in event.values.keys() & own.keys():
                listing.count("gauges judged")
                if event.values[name] != own[name]:
                    listing.report(
                        Code.ACC_COUNTER,
                        event.step,
                        f"the engine's {name} is {event.values[name]}, its state shows {own[name]}",
                        once=name,
                    )
    return listing.result("accounting", "gauges")


def _own(state: PoolState, header: Header) -> dict[str, int]:
    """Blocks that the engine keeps for itself are not in use; those that the harness holds are."""
    in_tables = {block for table in state.tables.values() for block in table}
    num_held = len(state.held) - header.config.get("reserved_blocks", 0)
    return {
        "num_running_requests": len(state.running),
        "num_used_blocks": len(in_tables) + num_held,
        "num_waiting_requests": len(state.waiting),
    }
