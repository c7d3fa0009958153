"""The foreign engine behind the session protocol; docs/write-an-adapter.md walks through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from preempt_harness import record
from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue, SessionInfo
from preempt_harness.admission import AdmissionModel
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput
from preempt_harness.workload import RequestSpec
from tests.plugin.foreign_engine import VOCAB_SIZE, ForeignEngine

Sink = Callable[[Sequence[AnyEvent]], None]
SHOWN = (
    "Arrived",
    "Scheduled",
    "BlocksAllocated",
    "BlocksFreed",
    "Preempted",
    "Resumed",
    "Finished",
    "PoolCounts",
    "PoolState",
    "Counters",
    "StepLaunched",
    "StepDone",
    "Computed",
    "TokensDelivered",
)


class ForeignSession:
    """One engine, one step a poll. Options are `bug` and `tie_at` of the engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = ForeignEngine(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            token_budget=settings.max_num_batched_tokens,
            max_running=settings.max_num_seqs,
            prefix_caching=settings.enable_prefix_caching,
            listener=self._hear,
            **settings.options,
        )
        self.info = SessionInfo(
            config={
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "max_num_seqs": settings.max_num_seqs,
                "enable_prefix_caching": settings.enable_prefix_caching,
                **settings.options,
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=VOCAB_SIZE,
            observed=list(SHOWN),
            batch_invariant="tie_at" not in settings.options,
        )
        self._events: list[AnyEvent] = []
        self._tables: dict[str, list[int]] = {}
        self._sink: Sink | None = None

    # What every session has ---------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        """Queue a request."""
        self._engine.add(request.id, request.prompt_token_ids, request.sampling.max_tokens)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step."""
        step = self._engine.step_id
        self._engine.step()
        self._events.append(record.PoolState(step=step, **self._engine.pool_state()))
        self._events.append(record.Counters(step=step, values=dict(self._engine.counters)))
        return self._take_events()

    def unfinished(self) -> bool:
        """True while a request has no finish reason."""
        return not all(item.finish_reason for item in self._engine.sequences.values())

    def results(self) -> dict[str, RequestResult]:
        """The engine's own final outputs; never put together from the stream."""
        return {
            name: RequestResult(
                outputs=[SequenceOutput(item.output, finish_reason=item.finish_reason or None)],
                finished=bool(item.finish_reason),
                error="it does not fit in the pool" if item.finish_reason == "error" else "",
                num_preemptions=item.num_preemptions,
            )
            for name, item in self._engine.sequences.items()
        }

    def close(self) -> Sequence[AnyEvent]:
        """What was recorded since the last poll, if that raised."""
        return self._take_events()

    # What the capabilities promise --------------------------------------------------------------

    def preempt(self, request: str, mode: str) -> None:
        """`PREEMPT`."""
        self._engine.preempt(request)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """`SCORE`."""
        rows = self._engine.model.logprobs([*prompt, *continuation], len(prompt))
        scores = []
        for token_id, logprobs in zip(continuation, rows, strict=True):
            second, top = sorted(range(len(logprobs)), key=logprobs.__getitem__)[-2:]
            scores.append(Score(token_id, logprobs[token_id], top, logprobs[top], logprobs[second]))
        return scores

    def abort(self, request: str) -> None:
        """Not among the capabilities, so never called; the same holds for the next two."""
        raise NotImplementedError

    def hold_blocks(self, num_blocks: int) -> int:
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        raise NotImplementedError

    def stream_to(self, sink: Sink) -> None:
        """Offered so that a step that kills the process leaves its schedule behind."""
        self._sink = sink

    # Inside -------------------------------------------------------------------------------------

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        """What the engine tells, as an event of the record."""
        if name == "Computed":
            table = fields.pop("block_table")
            keep = _common_length(self._tables.get(fields["seq"], []), table)
            self._tables[fields["seq"]] = table
            fields = {"rank": 0, "table_keep": keep, "table_new": table[keep:], **fields}
        self._events.append(getattr(record, name)(step=self._engine.step_id, **fields))
        if name == "StepLaunched" and self._sink is not None:
            self._sink(self._take_events())

    def _take_events(self) -> list[AnyEvent]:
        events, self._events = self._events, []
        return events


class ForeignAdapter:
    """Adapter "foreign"."""

    name = "foreign"
    capabilities = frozenset(
        {
            protocol.STEPPED,
            protocol.PREEMPT,
            protocol.SCORE,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.CHUNKED_PREFILL,
            protocol.BLOCK_SIZE,
        }
    )
    models: tuple[str, ...] = ("toy",)
    block_sizes: tuple[int, ...] = ()
    isolation = "none"
    known_issues: tuple[KnownIssue, ...] = ()

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted when the pool holds all its known tokens."""
        return AdmissionModel(
            policy="full_prompt",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            prefix_caching=settings.enable_prefix_caching,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """Of the only model there is."""
        return VOCAB_SIZE

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """The toy model has no use for text."""
        return None

    def missing(self) -> str | None:
        """It needs nothing."""
        return None

    def open(self, settings: EngineSettings) -> ForeignSession:
        """A fresh engine for every session."""
        return ForeignSession(settings)


class IsolatedForeignAdapter(ForeignAdapter):
    """The same, in a process of its own unless the user says otherwise."""

    isolation = "process"


class BlackBoxSession(ForeignSession):
    """The same engine as a client of a server sees it: tokens come, and requests end."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        shown = ["TokensDelivered", "Finished"]
        self.info = msgspec.structs.replace(self.info, observed=shown, config={})

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Whatever has arrived."""
        return [
            event for event in super().poll(timeout_s) if type(event).__name__ in self.info.observed
        ]


class BlackBoxAdapter(ForeignAdapter):
    """Adapter "blackbox"."""

    name = "blackbox"
    capabilities = frozenset({protocol.RECOMPUTE, protocol.BLOCK_SIZE})

    def open(self, settings: EngineSettings) -> BlackBoxSession:
        return BlackBoxSession(settings)


def _common_length(before: Sequence[int], after: Sequence[int]) -> int:
    """How many leading entries two tables share."""
    shared = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        shared += 1
    return shared
