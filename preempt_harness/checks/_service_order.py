"""Who is to be served next, and who is to lose its blocks next, by what an engine promises.

`strict_order`: requests have one order, by priority, then by arrival; a preemption does not change
it, whoever forced it.

`queue_order`: the queue is served from its front, who came last into the pool loses its blocks
first, and waits in front of all others. Nothing but preemptions that a plan chooses makes that
another order than that of arrival. By priority, where the engine is configured so, it is
`strict_order`.
"""

from __future__ import annotations

from typing import Protocol

from preempt_harness.checks._conditions import mixes_steps
from preempt_harness.checks.trace import Batch
from preempt_harness.record import (
    Aborted,
    Arrived,
    CacheReset,
    Finished,
    Header,
    Preempted,
    PriorityChanged,
)

STRICT_ORDER = "strict_order"
QUEUE_ORDER = "queue_order"
"""The capabilities, as a record's header lists them."""

ORDER_EVENTS = (Arrived, CacheReset, Preempted, PriorityChanged, Finished, Aborted)
"""What an order follows, besides admissions."""

Place = tuple[int, int]


class ServiceOrder(Protocol):
    """Places of the requests that have not ended: the lowest of those who wait is the next.

    Attributes:
        waiting, running: request -> its place. Of those who run, the highest goes first. Whose
            place is not known is in neither.
    """

    waiting: dict[str, Place]
    running: dict[str, Place]

    def admit(self, request: str) -> None:
        """It waits no more."""

    def take(self, event: Batch) -> None:
        """Follow whoever comes, goes, or is given another priority."""

    def is_more_urgent(self, request: str, than: str) -> bool:
        """Whether a request that waits may take the blocks of one that runs."""

    def in_words(self, request: str) -> str:
        """Its place."""


def promises_order(header: Header) -> bool:
    """Whether the engine of this record is held to one order."""
    return STRICT_ORDER in header.capabilities or QUEUE_ORDER in header.capabilities


def service_order(header: Header) -> ServiceOrder:
    """The order that an engine which promises one is held to."""
    by_arrival = header.config.get("scheduling_policy", "fcfs") == "fcfs"
    strict = STRICT_ORDER in header.capabilities or not by_arrival
    return _ByPriority() if strict else _ByQueue(mixes_steps(header))


def next_waiting(order: ServiceOrder) -> str | None:
    """Who is to be let in next."""
    return min(order.waiting, key=order.waiting.__getitem__, default=None)


def last_running(order: ServiceOrder) -> str | None:
    """Who is to lose its blocks next."""
    return max(order.running, key=order.running.__getitem__, default=None)


class _ByPriority:
    """By priority, then by arrival."""

    def __init__(self) -> None:
        self.waiting: dict[str, Place] = {}
        self.running: dict[str, Place] = {}
        self._num_arrived = 0

    def admit(self, request: str) -> None:
        if request in self.waiting:
            self.running[request] = self.waiting.pop(request)

    def take(self, event: Batch) -> None:
        if isinstance(event, Arrived):
            self.waiting[event.request] = event.priority, self._num_arrived
            self._num_arrived += 1
        elif isinstance(event, PriorityChanged):
            for places in (self.waiting, self.running):
                if event.request in places:
                    places[event.request] = event.priority, places[event.request][1]
        elif isinstance(event, Finished | Aborted):
            self.waiting.pop(event.request, None)
            self.running.pop(event.request, None)
        elif isinstance(event, Preempted) and event.request in self.running:
            self.waiting[event.request] = self.running.pop(event.request)

    def is_more_urgent(self, request: str, than: str) -> bool:
        return self.waiting[request][0] < self.running[than][0]

    def in_words(self, request: str) -> str:
        priority, arrival = self.waiting.get(request) or self.running[request]
        return f"priority {priority}, arrival {arrival}"


class _ByQueue:
    """From the front of the queue, to which the last of those who run goes first.

    Those who are all preempted for a reset keep their order, whichever of them is told of first.
    Where prefills and decodes share no step, whom the plan takes from among others may overtake one
    whose prefill is under way; from then on nobody's place is known.

    Args:
        mixes_steps: whether prefills and decodes share steps.
    """

    def __init__(self, mixes_steps: bool) -> None:
        self._mixes_steps = mixes_steps
        self.waiting: dict[str, Place] = {}
        self.running: dict[str, Place] = {}
        self._num_moves = 0
        self._ran: dict[str, Place] = {}  # who was preempted in the latest such step, from where
        self._step = -1

    def admit(self, request: str) -> None:
        if self.waiting.pop(request, None) is not None:
            self.running[request] = self._behind_all()

    def take(self, event: Batch) -> None:
        if isinstance(event, Arrived):
            self.waiting[event.request] = self._behind_all()
        elif isinstance(event, Finished | Aborted):
            self.waiting.pop(event.request, None)
            self.running.pop(event.request, None)
        elif isinstance(event, Preempted) and event.request in self.running:
            from_among = event.reason == "forced" and event.request != last_running(self)
            if from_among and not self._mixes_steps:
                self.waiting.clear()
                self.running.clear()
                return
            if event.step != self._step:
                self._step, self._ran = event.step, {}
            self._ran[event.request] = self.running.pop(event.request)
            _, move = self._behind_all()
            self.waiting[event.request] = -1, -move
        elif isinstance(event, CacheReset) and event.running and event.step == self._step:
            back = sorted(self._ran.keys() & self.waiting.keys(), key=self._ran.__getitem__)
            places = sorted(self.waiting[request] for request in back)
            self.waiting.update(zip(back, places, strict=True))

    def is_more_urgent(self, request: str, than: str) -> bool:
        return False

    def in_words(self, request: str) -> str:
        if request in self.running:
            return f"number {1 + _rank(self.running, request)} of those that run"
        return f"number {1 + _rank(self.waiting, request)} of the queue"

    def _behind_all(self) -> Place:
        self._num_moves += 1
        return 0, self._num_moves


def _rank(places: dict[str, Place], request: str) -> int:
    return sorted(places, key=places.__getitem__).index(request)
