"""Turns what the embedded engine's observer protocol reports into events of the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from preempt_engine.observer import EngineObserver, PoolView
from preempt_engine.step import SequenceKey
from preempt_harness import record
from preempt_harness.adapters.listening import common_length
from preempt_harness.record import AnyEvent

_NO_BLOCKS: list[int] = []  # of all rows whose table has not changed; nobody changes an event


class RecordingObserver(EngineObserver):
    """Collects events.

    Args:
        pool_every: a full `PoolState` every so many steps, and after each step in which a request
            lost its blocks or ended; 1 records it always.

    Attributes:
        sink: takes the events before each launched step, if set.
    """

    event_names = (
        "Arrived",
        "PriorityChanged",
        "CacheReset",
        "Scheduled",
        "BlocksAllocated",
        "BlocksFreed",
        "BlocksCopied",
        "Forked",
        "TokensChosen",
        "SwappedOut",
        "SwappedIn",
        "Preempted",
        "Resumed",
        "Finished",
        "Aborted",
        "PoolCounts",
        "PoolState",
        "Counters",
        "StepLaunched",
        "StepDone",
        "Computed",
        "WorkerCopied",
        "WorkerSwappedOut",
        "WorkerSwappedIn",
        "BlocksPoisoned",
        "TokensDelivered",
    )

    def __init__(self, pool_every: int) -> None:
        self._pool_every = pool_every
        self._events: list[AnyEvent] = []
        self._add = self._events.append
        self._tables: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)
        self._names = _Names()
        self._pool_changed = False
        self._given: dict[SequenceKey, int] = {}
        self.sink: Callable[[list[AnyEvent]], None] | None = None

    def take_events(self) -> list[AnyEvent]:
        """Everything since the last call."""
        events = self._events.copy()
        self._events.clear()
        return events

    def take_given(self) -> dict[SequenceKey, int]:
        """Sequences that were given tokens since the last call -> the step that did."""
        given, self._given = self._given, {}
        return given

    def record_pool(self, step_id: int, view: PoolView) -> None:
        """Record the full state of pool, queues and counters."""
        state = view.pool_state()
        self._add(
            record.PoolState(
                step=step_id,
                num_blocks=state.num_blocks,
                free=state.free,
                cached=state.cached,
                held=state.held,
                fenced=state.fenced,
                ref_counts=state.ref_counts,
                tables={self._names[key]: table for key, table in state.tables.items()},
                waiting=state.waiting,
                running=state.running,
                num_host_blocks=state.num_host_blocks,
                host_free=state.host_free,
                host_fenced=state.host_fenced,
                host_blocks=state.host_blocks,
            )
        )
        self._add(record.Counters(step=step_id, values=state.counters))

    # Scheduler's view ---------------------------------------------------------------------------

    def arrived(
        self,
        step_id: int,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        priority: int,
    ) -> None:
        self._add(
            record.Arrived(
                step=step_id,
                request=request_id,
                prompt_token_ids=list(prompt_token_ids),
                max_tokens=max_tokens,
                priority=priority,
            )
        )

    def priority_changed(self, step_id: int, request_id: str, priority: int) -> None:
        self._add(record.PriorityChanged(step=step_id, request=request_id, priority=priority))

    def cache_reset(self, step_id: int, *, running: bool) -> None:
        """Not the engine's to tell: it was asked to forget."""
        self._add(record.CacheReset(step=step_id, running=running))

    def scheduled(self, step_id: int, key: SequenceKey, start: int, end: int) -> None:
        self._add(record.Scheduled(step_id, self._names[key], start, end))

    def blocks_allocated(
        self, step_id: int, key: SequenceKey, block_ids: Sequence[int], num_cached: int
    ) -> None:
        self._add(
            record.BlocksAllocated(
                step=step_id, seq=self._names[key], blocks=list(block_ids), num_cached=num_cached
            )
        )

    def blocks_freed(self, step_id: int, key: SequenceKey, block_ids: Sequence[int]) -> None:
        self._add(record.BlocksFreed(step=step_id, seq=self._names[key], blocks=list(block_ids)))

    def blocks_copied(self, step_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._add(record.BlocksCopied(step=step_id, pairs=list(pairs)))

    def forked(self, step_id: int, parent: SequenceKey, child: SequenceKey) -> None:
        self._add(record.Forked(step=step_id, parent=self._names[parent], child=self._names[child]))

    def tokens_chosen(self, step_id: int, key: SequenceKey, token_ids: Sequence[int]) -> None:
        self._add(
            record.TokensChosen(step=step_id, seq=self._names[key], token_ids=list(token_ids))
        )

    def swapped_out(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        self._add(record.SwappedOut(step=step_id, request=request_id, pairs=list(pairs)))

    def swapped_in(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        self._add(record.SwappedIn(step=step_id, request=request_id, pairs=list(pairs)))

    def preempted(
        self,
        step_id: int,
        request_id: str,
        *,
        mode: str,
        phase: str,
        reason: str,
        num_computed_tokens: int,
        num_tokens: int,
    ) -> None:
        self._pool_changed = True
        self._add(
            record.Preempted(
                step=step_id,
                request=request_id,
                mode=mode,
                phase=phase,
                reason=reason,
                num_computed_tokens=num_computed_tokens,
                num_tokens=num_tokens,
            )
        )

    def resumed(self, step_id: int, request_id: str, num_cached_tokens: int) -> None:
        self._add(
            record.Resumed(step=step_id, request=request_id, num_cached_tokens=num_cached_tokens)
        )

    def finished(self, step_id: int, request_id: str, reason: str) -> None:
        self._pool_changed = True
        self._add(record.Finished(step=step_id, request=request_id, reason=reason))

    def aborted(self, step_id: int, request_id: str) -> None:
        self._pool_changed = True
        self._add(record.Aborted(step=step_id, request=request_id))

    def step_updated(self, step_id: int, view: PoolView) -> None:
        counts = view.pool_counts()
        self._add(
            record.PoolCounts(
                step=step_id,
                num_blocks=counts.num_blocks,
                free=counts.free,
                cached=counts.cached,
                used=counts.used,
                held=counts.held,
                fenced=counts.fenced,
            )
        )
        if self._pool_changed or step_id % self._pool_every == 0:
            self._pool_changed = False
            self.record_pool(step_id, view)

    # Worker's view ------------------------------------------------------------------------------

    def step_sent(self, step_id: int, rank: int, num_bytes: int) -> None:
        self._add(record.StepSent(step=step_id, rank=rank, num_bytes=num_bytes))

    def step_launched(self, step_id: int) -> None:
        self._add(record.StepLaunched(step=step_id))
        if self.sink is not None:  # the step may kill this process: hand over what led to it
            self.sink(self.take_events())

    def computed(
        self,
        step_id: int,
        rank: int,
        key: SequenceKey,
        start: int,
        token_ids: Sequence[int],
        written_slots: Sequence[int],
        block_table: Sequence[int],
        read_len: int,
    ) -> None:
        seq = self._names[key]
        tables = self._tables[rank]
        before = tables.get(seq, [])
        if before == block_table:
            keep, new = len(before), _NO_BLOCKS
        else:
            table = tables[seq] = list(block_table)
            keep = common_length(before, table)
            new = table[keep:]
        self._add(
            record.Computed(
                step_id,
                rank,
                seq,
                start,
                [*token_ids],
                [*written_slots],
                keep,
                new,
                read_len,
            )
        )

    def blocks_poisoned(self, step_id: int, rank: int, block_ids: Sequence[int]) -> None:
        self._add(record.BlocksPoisoned(step=step_id, rank=rank, blocks=list(block_ids)))

    def worker_copied(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._add(record.WorkerCopied(step=step_id, rank=rank, pairs=list(pairs)))

    def worker_swapped_out(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._add(record.WorkerSwappedOut(step=step_id, rank=rank, pairs=list(pairs)))

    def worker_swapped_in(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._add(record.WorkerSwappedIn(step=step_id, rank=rank, pairs=list(pairs)))

    def step_done(self, step_id: int) -> None:
        self._add(record.StepDone(step=step_id))

    # Delivery -----------------------------------------------------------------------------------

    def tokens_delivered(
        self,
        step_id: int,
        key: SequenceKey,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, float]] | None,
        text: str,
    ) -> None:
        if token_ids:
            self._given[key] = step_id
        self._add(
            record.TokensDelivered(
                step_id,
                self._names[key],
                [*token_ids],
                None if logprobs is None else list(logprobs),
                text,
            )
        )


class _Names(dict[SequenceKey, str]):
    """Sequence -> its name in the record."""

    def __missing__(self, key: SequenceKey) -> str:
        name = self[key] = str(key)
        return name
