"""The events of one batch processor, and what several of its observers have to know."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from preempt_harness import record
from preempt_harness.record import AnyEvent
from preempt_harness.workload import RequestSpec


class BatchLog:
    """Collects events; requests may be entered by another thread than the engine's.

    Attributes:
        step: number of the step that runs, or runs next.
        is_scheduled: the step's batch is decided.
        has_changed: something was recorded since the pool was last.
        requests: what was submitted, by name.
        entering: requests on their way to the scheduler.
        aborted: what the engine had generated for those that it cancelled.
        sink: takes the events before each forward pass, if set.
        lock: held while a request is on its way from one list to another.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_scheduled = False
        self.has_changed = False
        self.requests: dict[str, RequestSpec] = {}
        self.entering: list[str] = []
        self.aborted: dict[str, Any] = {}
        self.sink: Callable[[Sequence[AnyEvent]], None] | None = None
        self.lock = threading.Lock()
        self._events: deque[AnyEvent] = deque()

    @property
    def step_of_change(self) -> int:
        """Once a batch is scheduled, victims are taken for the sake of the next one."""
        return self.step + self.is_scheduled

    def emit(self, event: AnyEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self.has_changed = True

    def take_events(self) -> list[AnyEvent]:
        """Everything since the last call; another thread may go on adding."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def hand_over(self) -> None:
        """A step is about to be launched, which may kill this process."""
        if self.sink is not None:
            self.sink(self.take_events())

    def enter(self, request: RequestSpec) -> None:
        """A request is about to be handed to the engine."""
        with self.lock:
            self.requests[request.id] = request
            self.entering.append(request.id)
            self.emit(
                record.Arrived(
                    self.step, request.id, request.prompt_token_ids, request.sampling.max_tokens
                )
            )

    def entered(self, request: str) -> None:
        """The scheduler has it."""
        if request in self.entering:
            with self.lock:
                self.entering.remove(request)
