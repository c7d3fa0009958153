"""The pool and the queues, looked at from outside: sizes, a copy of it all, whether it agrees.

Nothing here is called by a step that nobody watches.
"""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter

from preempt_engine.observer import PoolCounts, PoolState
from preempt_engine.residency import Residency
from preempt_engine.sequence import RequestStatus


def check_integrity(residency: Residency) -> None:
    """Assert that blocks, references, queues and progress agree with each other."""
    running, waiting = residency.running, residency.waiting
    residency.blocks.check_integrity(residency.sequences())
    for request in running:
        assert request.status is RequestStatus.RUNNING
    assert running == sorted(running, key=attrgetter("precedence"))
    for request in waiting.in_order():
        assert request.status is RequestStatus.WAITING
        assert not any(sequence.block_table for sequence in request.sequences.values())
    assert len(running) + len(waiting) == len(residency.requests)
    host_blocks = _host_blocks(residency)
    residency.swapper.host.check_integrity([b for blocks in host_blocks.values() for b in blocks])
    for request in residency.requests.values():
        swapped = request.host_blocks is not None
        assert not (swapped and request.status is RequestStatus.RUNNING)
        assert swapped == any(seq.swapped_table for seq in request.sequences.values())


def pool_counts(residency: Residency) -> PoolCounts:
    """Sizes of the pool's parts."""
    blocks = residency.blocks
    return PoolCounts(
        num_blocks=blocks.num_blocks,
        free=len(blocks.free_blocks),
        cached=len(blocks.cached_blocks),
        held=len(blocks.held_blocks),
        fenced=len(blocks.fenced_blocks),
        used=blocks.num_used_blocks,
    )


def pool_state(residency: Residency) -> PoolState:
    """A copy of the raw state of pool and queues."""
    blocks, host = residency.blocks, residency.swapper.host
    return PoolState(
        num_blocks=blocks.num_blocks,
        free=list(blocks.free_blocks),
        cached=list(blocks.cached_blocks),
        held=list(blocks.held_blocks),
        fenced=list(blocks.fenced_blocks),
        ref_counts=list(blocks.ref_counts),
        tables={
            sequence.key: list(sequence.block_table)
            for sequence in residency.sequences()
            if sequence.block_table
        },
        waiting=[request.request_id for request in residency.waiting.in_order()],
        running=[request.request_id for request in residency.running],
        counters=asdict(residency.counters),
        num_host_blocks=host.num_blocks,
        host_free=list(host.free_blocks),
        host_fenced=list(host.fenced_blocks),
        host_blocks=_host_blocks(residency),
    )


def _host_blocks(residency: Residency) -> dict[str, list[int]]:
    return {
        request.request_id: list(request.host_blocks.values())
        for request in residency.requests.values()
        if request.host_blocks is not None
    }
