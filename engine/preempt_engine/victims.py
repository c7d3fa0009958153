"""Who loses its blocks: by the engine's own need, or because a controller says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from preempt_engine.config import PreemptionMode
from preempt_engine.sequence import Request


def choose_victim(running: Sequence[Request]) -> Request:
    """The request that was admitted last: the oldest always keeps going, so the engine does."""
    return running[-1]


class ForcedPreemption(NamedTuple):
    """A victim and how it is to lose its blocks; None is the engine's `preemption_mode`."""

    request_id: str
    mode: PreemptionMode | None = None


class PreemptionController(Protocol):
    """Forces preemptions; asked before every step is scheduled."""

    def select_victims(
        self, step_id: int, running: Sequence[Request]
    ) -> Iterable[str | ForcedPreemption]:
        """Running requests to preempt before step `step_id` is scheduled, by id or with a mode.

        Args:
            step_id: of the step about to be scheduled.
            running: requests in admission order; not to be changed.
        """
        ...
