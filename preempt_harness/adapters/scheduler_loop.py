"""What adapters of "a scheduler in the loop" share: the exact workers, and the log of a session.

The engine's own scheduler decides; workers that hold the exact KV model compute what they are
handed, one cache per rank. Knows no engine: rows come from the adapter, which takes them from what
the engine hands to its attention backend, and never from the scheduler's account.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from preempt_engine.exact import EOS_TOKEN_ID, ExactCache, combine_digests
from preempt_harness import record
from preempt_harness.record import AnyEvent, RequestResult, SequenceOutput
from preempt_harness.workload import RequestSpec

VOCAB_SIZE = 64
POOL_EVERY = 16  # steps between two full `PoolState` events in which nobody lost blocks or ended
END_TOKEN_ID = EOS_TOKEN_ID

Sink = Callable[[Sequence[AnyEvent]], None]


@dataclass(frozen=True)
class Row:
    """One sequence's share of a step, as a rank's attention backend is given it.

    Attributes:
        seq: "request.0".
        start: position of the first token.
        token_ids: to be computed.
        slots: where each is written, block * block size + offset.
        table: the block table.
        read_len: positions [0, read_len) are read.
        num_logits: so many of the last positions give logits.
    """

    seq: str
    start: int
    token_ids: list[int]
    slots: list[int]
    table: list[int]
    read_len: int
    num_logits: int = 1


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions [start, end) through a block table.

    Raises:
        IndexError: the table is too short.
    """
    return [
        table[position // block_size] * block_size + position % block_size
        for position in range(start, end)
    ]


class ExactWorkers:
    """The exact KV model behind every rank.

    Args:
        num_blocks, block_size: of the pool, blocks that nobody can have included.
        num_ranks: each has a cache of its own.
    """

    def __init__(self, num_blocks: int, block_size: int, num_ranks: int = 1) -> None:
        self._caches = [ExactCache(num_blocks, block_size, salt=rank) for rank in range(num_ranks)]
        self._tables: dict[tuple[int, str], list[int]] = {}

    def compute(
        self, step: int, rows_of_rank: Sequence[Sequence[Row]], log: Log
    ) -> list[list[int]]:
        """All rows write, then all read, in each rank.

        Args:
            step: its number.
            rows_of_rank: per rank, the same sequences in the same order.
            log: takes a `Computed` event a row, before anything is computed.

        Returns:
            Per row, a greedy token for each of its logits.

        Raises:
            IndexError: a row names a block or a position that is not there.
        """
        for rank, rows in enumerate(rows_of_rank):
            for row in rows:
                log.add(self._computed(step, rank, row))
        shares: list[list[int]] = []
        for cache, rows in zip(self._caches, rows_of_rank, strict=True):
            for row in rows:
                cache.write(row.seq, row.start, row.token_ids, row.slots, row.table)
            digests: list[int] = []
            for row in rows:
                first = row.read_len - row.num_logits
                digests += cache.read(row.seq, row.read_len, row.table, first)
            shares.append(digests)
        tokens = [digest % VOCAB_SIZE for digest in combine_digests(shares)]
        chosen = []
        for row in rows_of_rank[0]:
            chosen.append(tokens[: row.num_logits])
            tokens = tokens[row.num_logits :]
        return chosen

    def _computed(self, step: int, rank: int, row: Row) -> record.Computed:
        before = self._tables.get((rank, row.seq), [])
        self._tables[rank, row.seq] = list(row.table)
        keep = 0
        for old, new in zip(before, row.table, strict=False):
            if old != new:
                break
            keep += 1
        return record.Computed(
            step=step,
            rank=rank,
            seq=row.seq,
            start=row.start,
            token_ids=list(row.token_ids),
            written_slots=list(row.slots),
            table_keep=keep,
            table_new=row.table[keep:],
            read_len=row.read_len,
        )


@dataclass
class Track:
    """Where one request stands, as far as a log needs it.

    Attributes:
        spec: what was asked for.
        num_delivered: output tokens that the user has.
        finish_reason: "" while it has not ended.
        num_preemptions: so far.
        prefill_end: tokens known when it was admitted.
        num_chunks: steps that computed a part of the present prefill.
        num_steps: steps since it was admitted.
        is_away: it was preempted and not admitted again.
        held: blocks of its table that were announced.
    """

    spec: RequestSpec
    num_delivered: int = 0
    finish_reason: str = ""
    num_preemptions: int = 0
    prefill_end: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    is_away: bool = False
    held: list[int] = field(default_factory=list)

    @property
    def seq(self) -> str:
        return f"{self.spec.id}.0"


class Log:
    """The events of a session, and what has to be remembered to make them.

    Args:
        max_num_batched_tokens: token budget of a step, which names the phase of a prefill.
        block_size: tokens per block.

    Attributes:
        step: number of the step at hand.
        tracks: request -> where it stands, in order of arrival.
        sink: takes the events before each launched step, if set.
        pool_changed: somebody lost blocks or ended since the last `PoolState`.
    """

    def __init__(self, max_num_batched_tokens: int, block_size: int) -> None:
        self.step = 0
        self.tracks: dict[str, Track] = {}
        self.sink: Sink | None = None
        self.pool_changed = False
        self._budget = max_num_batched_tokens
        self._block_size = block_size
        self._events: list[AnyEvent] = []

    def add(self, event: AnyEvent) -> None:
        """Append an event."""
        self._events.append(event)

    def take(self) -> list[AnyEvent]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return not all(track.finish_reason for track in self.tracks.values())

    def results(self, output_of: Callable[[str], list[int]]) -> dict[str, RequestResult]:
        """Results of all requests.

        Args:
            output_of: the engine's own output token ids of a request, never put together from the
                stream.
        """
        return {
            name: RequestResult(
                outputs=[
                    SequenceOutput(output_of(name), finish_reason=track.finish_reason or None)
                ],
                finished=bool(track.finish_reason),
            )
            for name, track in self.tracks.items()
        }

    # Events -------------------------------------------------------------------------------------

    def arrived(self, spec: RequestSpec) -> None:
        """A request was handed to the engine."""
        self.tracks[spec.id] = Track(spec)
        self.add(
            record.Arrived(
                step=self.step,
                request=spec.id,
                prompt_token_ids=list(spec.prompt_token_ids),
                max_tokens=spec.sampling.max_tokens,
                priority=spec.priority,
            )
        )

    def preempted(self, name: str, reason: str, num_computed: int, num_tokens: int) -> None:
        """A request is about to lose its blocks."""
        track = self.tracks[name]
        phase = self._phase(track, num_computed)
        track.num_preemptions += 1
        track.is_away = True
        self.pool_changed = True
        self.add(
            record.Preempted(
                step=self.step,
                request=name,
                mode="recompute",
                phase=phase,
                reason=reason,
                num_computed_tokens=num_computed,
                num_tokens=num_tokens,
            )
        )

    def holds(self, name: str, table: Sequence[int], num_cached: int = 0) -> None:
        """A request's block table has grown to this; the first holding admits it.

        Args:
            num_cached: blocks found in the prefix cache, of those that are new.
        """
        track = self.tracks[name]
        new = list(table[len(track.held) :])
        if not new:
            return
        if track.is_away:
            track.is_away = False
            num_cached_tokens = num_cached * self._block_size
            self.add(record.Resumed(self.step, name, num_cached_tokens=num_cached_tokens))
        self.add(record.BlocksAllocated(self.step, track.seq, new, num_cached=num_cached))
        track.held += new

    def freed(self, name: str, blocks: Sequence[int]) -> None:
        """A request gave up these blocks, in this order."""
        track = self.tracks[name]
        if blocks:
            self.add(record.BlocksFreed(self.step, track.seq, list(blocks)))
        track.held = []
        track.num_chunks = track.num_steps = 0

    def scheduled(self, name: str, start: int, end: int, num_tokens: int) -> None:
        """The step computes positions [start, end) of a request that has so many tokens."""
        track = self.tracks[name]
        if track.num_steps == 0:
            track.prefill_end = num_tokens
        track.num_steps += 1
        track.num_chunks += start < track.prefill_end
        self.add(record.Scheduled(self.step, track.seq, start, end))

    def launched(self) -> None:
        """The step begins; whoever listens gets what led to it."""
        self.add(record.StepLaunched(self.step))
        if self.sink is not None:
            self.sink(self.take())

    def delivered(self, name: str, token_ids: Sequence[int]) -> None:
        """The user got tokens."""
        track = self.tracks[name]
        track.num_delivered += len(token_ids)
        if token_ids:
            self.add(record.TokensDelivered(self.step, track.seq, list(token_ids)))

    def finished(self, name: str, reason: str) -> None:
        """A request ended by itself."""
        self.tracks[name].finish_reason = reason
        self.pool_changed = True
        self.add(record.Finished(self.step, name, reason))

    def aborted(self, name: str) -> None:
        """A request was given up from outside."""
        self.tracks[name].finish_reason = "abort"
        self.pool_changed = True
        self.add(record.Aborted(self.step, name))

    def pool(
        self,
        *,
        num_blocks: int,
        free: list[int],
        cached: list[int],
        held: list[int],
        ref_counts: Mapping[int, int],
        tables: Mapping[str, list[int]],
        waiting: list[str],
        running: list[str],
    ) -> None:
        """The pool after a step, whole."""
        self.pool_changed = False
        self.add(
            record.PoolState(
                step=self.step,
                num_blocks=num_blocks,
                free=free,
                cached=cached,
                held=held,
                fenced=[],
                ref_counts=[ref_counts.get(block, 0) for block in range(num_blocks)],
                tables={f"{name}.0": list(table) for name, table in tables.items() if table},
                waiting=waiting,
                running=running,
            )
        )

    @property
    def pool_is_due(self) -> bool:
        """Whether this step ends with a full `PoolState`."""
        return self.pool_changed or self.step % POOL_EVERY == 0

    def _phase(self, track: Track, num_computed: int) -> str:
        """Where in its life a request is preempted; one of `record.PHASES`."""
        if track.num_preemptions and track.num_steps <= 1:
            return "just_resumed"
        remaining = track.prefill_end - num_computed
        if remaining > self._budget:
            return "prefill_first" if track.num_chunks <= 1 else "prefill_middle"
        if remaining > 0:
            return "prefill_last"
        return "first_decode" if track.num_delivered <= 1 else "decode"
