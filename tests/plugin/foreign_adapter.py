"""The foreign engine behind the session protocol; docs/write-an-adapter.md walks through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from preempt_harness import record
from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue, SessionInfo
from preempt_harness.admission import AdmissionModel
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput
from preempt_harness.workload import RequestSpec
from tests.plugin.foreign_engine import VOCAB_SIZE, ForeignEngine

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
    """One engine, one step a poll. Options: "bug" and "tie_at" of the engine."""

    def __init__(self, settings: EngineSettings) -> None:
        config: dict[str, Any] = {
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_seqs": settings.max_num_seqs,
            "enable_prefix_caching": settings.enable_prefix_caching,
            **settings.options,
        }
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
            config=config,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=VOCAB_SIZE,
            observed=list(SHOWN),
            batch_invariant="tie_at" not in settings.options,
        )
        self._events: list[AnyEvent] = []
        self._tables: dict[str, list[int]] = {}
        self._outputs: dict[str, list[int]] = {}
        self._ended: dict[str, str] = {}
        self._sink: Callable[[Sequence[AnyEvent]], None] | None = None

    # What every session has ---------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        """A request that can never run is refused; its `Finished` says "error"."""
        self._outputs[request.id] = []
        self._engine.add(request.id, request.prompt_token_ids, request.sampling.max_tokens)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step."""
        self._engine.step()
        self._events.append(record.PoolState(step=self._engine.step_id - 1, **self._pool()))
        counters = record.Counters(step=self._engine.step_id - 1, values={**self._engine.counters})
        self._events.append(counters)
        return self._take_events()

    def unfinished(self) -> bool:
        return len(self._ended) < len(self._outputs)

    def results(self) -> dict[str, RequestResult]:
        return {name: self._result(name) for name in self._outputs}

    def close(self) -> Sequence[AnyEvent]:
        return self._take_events()

    # What the capabilities promise --------------------------------------------------------------

    def preempt(self, request: str, mode: str) -> None:
        self._engine.preempt(request)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        rows = self._engine.model.logprobs([*prompt, *continuation], len(prompt))
        scores = []
        for token_id, logprobs in zip(continuation, rows, strict=True):
            second, top = sorted(range(len(logprobs)), key=logprobs.__getitem__)[-2:]
            scores.append(Score(token_id, logprobs[token_id], top, logprobs[top], logprobs[second]))
        return scores

    def abort(self, request: str) -> None:
        raise NotImplementedError

    def hold_blocks(self, num_blocks: int) -> int:
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        raise NotImplementedError

    def stream_to(self, sink: Callable[[Sequence[AnyEvent]], None]) -> None:
        """Offered so that a step that kills the process has left its schedule behind."""
        self._sink = sink

    # Inside -------------------------------------------------------------------------------------

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        """An event of the engine as an event of the record."""
        if name == "Computed":
            table, before = fields.pop("block_table"), self._tables.get(fields["seq"], [])
            self._tables[fields["seq"]] = table
            keep = next((i for i, pair in enumerate(zip(before, table, strict=False)) if pair[0] != pair[1]), min(len(before), len(table)))
            fields = {"rank": 0, "table_keep": keep, "table_new": table[keep:], **fields}
        elif name == "TokensDelivered":
            self._outputs[fields["seq"].removesuffix(".0")] += fields["token_ids"]
        elif name == "Finished":
            self._ended[fields["request"]] = fields["reason"]
        self._events.append(getattr(record, name)(step=self._engine.step_id, **fields))
        if name == "StepLaunched" and self._sink is not None:
            self._sink(self._take_events())
