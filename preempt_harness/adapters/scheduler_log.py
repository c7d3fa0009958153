"""The events of a session whose engine's scheduler runs in the loop, and what they need to be made.

Knows no engine. A request has one sequence, "request.0", and is preempted by recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from preempt_harness import record
from preempt_harness.adapters.listening import phase_of
from preempt_harness.record import AnyEvent, RequestResult, SequenceOutput
from preempt_harness.workload import RequestSpec

POOL_EVERY = 16  # steps between two full `PoolState` events in which nobody lost blocks or ended
OBSERVED = (
    "Arrived",
    "Scheduled",
    "BlocksAllocated",
    "BlocksFreed",
    "Preempted",
    "Resumed",
    "Finished",
    "Aborted",
    "PoolCounts",
    "PoolState",
    "StepLaunched",
    "StepDone",
    "Computed",
    "TokensDelivered",
)
"""Names of the events that such a session shows."""

Sink = Callable[[Sequence[AnyEvent]], None]


@dataclass(slots=True)
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
        seq: name of its sequence.
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
    seq: str = field(init=False)

    def __post_init__(self) -> None:
        self.seq = f"{self.spec.id}.0"


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
        if len(table) <= len(track.held):
            return
        new = list(table[len(track.held) :])
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
        self._events.append(record.Scheduled(self.step, track.seq, start, end))

    def launched(self) -> None:
        """The step begins; whoever listens gets what led to it."""
        self._events.append(record.StepLaunched(self.step))
        if self.sink is not None:
            self.sink(self.take())

    def delivered(self, name: str, token_ids: Sequence[int]) -> None:
        """The user got tokens."""
        track = self.tracks[name]
        track.num_delivered += len(token_ids)
        if token_ids:
            self._events.append(record.TokensDelivered(self.step, track.seq, list(token_ids)))

    def finished(self, name: str, reason: str) -> None:
        """A request ended by itself."""
        self.tracks[name].finish_reason = reason
        self.pool_changed = True
        self.add(record.Finished(self.step, name, reason))

    def cache_reset(self, *, running: bool) -> None:
        """The engine says that it has forgotten cached content."""
        self.add(record.CacheReset(self.step, running=running))

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
        return phase_of(
            is_return=track.num_preemptions > 0,
            num_steps=track.num_steps,
            num_chunks=track.num_chunks,
            num_left=track.prefill_end - num_computed,
            token_budget=self._budget,
            num_outputs=track.num_delivered,
        )
