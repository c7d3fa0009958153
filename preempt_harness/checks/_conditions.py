"""What a step is judged under: blocks that are withheld, steps that are decided ahead, their kinds.

Read from a record's header and its figures of the pool; judges nothing.
"""

from __future__ import annotations

from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.trace import Trace
from preempt_harness.record import Header, PoolCounts


def steps_with_held_blocks(trace: Trace) -> set[int]:
    """Steps in which the harness held blocks: nobody is blamed for standing still.

    What the engine keeps for itself, such as a null block, is always held. Blocks stay held until
    another number is told: of a step in which nothing could be run, none may be.
    """
    exempt: set[int] = set()
    held_from: int | None = None
    for event in trace.of(PoolCounts, SteadySteps, IdleSteps):
        pool, last = event, event.step
        if isinstance(event, SteadySteps | IdleSteps):
            pool, last = event.pool, event.last_step
        if held_from is not None:
            exempt.update(range(held_from, event.step))
        held_from = None
        if num_withheld(trace.header, pool):
            exempt.update(range(event.step, last + 1))
            held_from = last + 1
    return exempt


def num_withheld(header: Header, pool: PoolCounts) -> int:
    """Blocks that the harness holds: without those that the engine keeps for itself."""
    own = header.config.get("reserved_blocks", 0)
    assert isinstance(own, int)
    return max(0, pool.held - own)


def steps_ahead(header: Header) -> int:
    """Steps that are decided ahead of the one that runs, where the configuration says how many."""
    depth = header.config.get("async_scheduling", 0)
    return depth if isinstance(depth, int) and not isinstance(depth, bool) else 0


def mixes_steps(header: Header) -> bool:
    """Whether a step that computes a lost prefill anew still serves the others.

    A record that lists no capabilities is held to the stricter bound.
    """
    return not header.capabilities or "mixed_steps" in header.capabilities
