"""Who loses its blocks: by the engine's own need, or because a controller says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from preempt_engine.sequence import Request


def choose_victim(running: Sequence[Request]) -> Request:
    """The request that was admitted last: the oldest always keeps going, so the engine does."""
    return running[-1]


class PreemptionController(Protocol):
    """Forces preemptions; asked before every step is scheduled."""

    def select_victims(self, step_id: int, running: Sequence[Request]) -> Iterable[str]:
        """Ids of running requests to preempt before step `step_id` is scheduled.

        Args:
            step_id: of the step about to be scheduled.
            running: requests in admission order; not to be changed.
        """
        ...
