"""What adapters of "a scheduler in the loop" share: the engine's scheduler decides, the exact KV
model computes.

Knows no engine. What is particular to one is in the subclasses: how it is built, a step of it, and
what its pool looks like.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from preempt_harness.adapters.exact_workers import VOCAB_SIZE
from preempt_harness.adapters.limited_session import LimitedSession
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.adapters.scheduler_log import Log, Sink
from preempt_harness.record import AnyEvent


class ExactModelAdapter:
    """What holds for every engine whose model is the exact KV model."""

    models: tuple[str, ...] = ("exact",)
    isolation = "process"

    def vocab_size(self, settings: EngineSettings) -> int:
        """Of the exact model."""
        return VOCAB_SIZE

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """The exact model has no use for text."""
        return None


class SchedulerSession(LimitedSession, ABC):
    """One scheduler, one step a poll.

    Args:
        log: takes the events.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    @abstractmethod
    def _step(self) -> None:
        """Run one step, or none where there is nothing to run."""

    @abstractmethod
    def _record_pool(self) -> None:
        """Sizes of the pool, and everything in it when `Log.pool_is_due`."""

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step, or let one pass in which there is nothing to run."""
        self._step()
        self._record_pool()
        self._log.step += 1
        return self._log.take()

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return self._log.unfinished()

    def close(self) -> Sequence[AnyEvent]:
        """What was recorded since the last poll, and the final state of the pool."""
        self._log.pool_changed = True
        self._record_pool()
        return self._log.take()

    def stream_to(self, sink: Sink) -> None:
        """Hand events over before each step is launched."""
        self._log.sink = sink
