"""Precedence: who is served before whom, and who goes first when blocks run short.

For engines that promise it (`strict_order`): requests have one order, by priority, then by arrival;
a preemption does not change it. So

- a request that is let in precedes all that wait;
- one that loses its blocks by the engine's own need is preceded by all that keep theirs;
- one that loses them for the next in the queue is less urgent by its priority, not by its arrival.

Priorities are those that users gave, at arrival or later; an engine that changes them by itself, or
loses a change, is found by what it does. What the plan forces is not judged: the plan chooses.
"""

from __future__ import annotations

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    Finished,
    Header,
    Preempted,
    PriorityChanged,
)

STRICT_ORDER = "strict_order"
"""The capability, as a record's header lists it."""

_FORCED = "forced"
_FOR_THE_URGENT = "priority"


class _Order:
    """The requests of a trial that have not ended, as the log tells of them."""

    def __init__(self) -> None:
        self._precedence: dict[str, tuple[int, int]] = {}
        self._num_arrived = 0
        self.waiting: set[str] = set()
        self.running: set[str] = set()

    def arrive(self, request: str, priority: int) -> None:
        """It waits, behind all of its priority."""
        self._precedence[request] = priority, self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)

    def change(self, request: str, priority: int) -> None:
        """It keeps its place among those of its new priority: the one of its arrival."""
        if request in self._precedence:
            self._precedence[request] = priority, self._precedence[request][1]

    def end(self, request: str) -> None:
        """It neither waits nor runs."""
        self.waiting.discard(request)
        self.running.discard(request)
        self._precedence.pop(request, None)

    def first_waiting(self) -> str | None:
        """Who is to be let in next."""
        return min(self.waiting, key=self._precedence.__getitem__, default=None)

    def last_running(self) -> str | None:
        """Who is to lose its blocks next."""
        return max(self.running, key=self._precedence.__getitem__, default=None)

    def is_more_urgent(self, request: str, than: str) -> bool:
        """By priority alone."""
        return self._precedence[request][0] < self._precedence[than][0]

    def place(self, request: str) -> str:
        """Priority and arrival in words."""
        priority, arrival = self._precedence[request]
        return f"priority {priority}, arrival {arrival}"


def promises_order(header: Header) -> bool:
    """Whether the engine of this record is held to one order."""
    return STRICT_ORDER in header.capabilities


def check_precedence(trace: Trace) -> CheckResult:
    """Nobody is let in before one that precedes it, nor evicted before one that it precedes."""
    listing = Listing()
    order = _Order()
    for event in trace.of(Arrived, BlocksAllocated, Preempted, PriorityChanged, Finished, Aborted):
        if isinstance(event, Arrived):
            order.arrive(event.request, event.priority)
        elif isinstance(event, PriorityChanged):
            order.change(event.request, event.priority)
        elif isinstance(event, Finished | Aborted):
            order.end(event.request)
        elif isinstance(event, Preempted):
            _judge_victim(event, order, listing)
        else:
            _judge_admission(event, order, listing)
    return listing.result("progress", "precedence")


def _judge_victim(event: Preempted, order: _Order, listing: Listing) -> None:
    victim = event.request
    if event.reason != _FORCED and victim in order.running:
        listing.count("victims judged")
        last = order.last_running()
        if last is not None and last != victim:
            listing.report(
                Code.PROG_ORDER,
                event.step,
                f"it loses its blocks ({order.place(victim)}), and {last}, which it precedes "
                f"({order.place(last)}), keeps its own",
                once=victim,
                request=victim,
            )
        first = order.first_waiting()
        if event.reason == _FOR_THE_URGENT and first and not order.is_more_urgent(first, victim):
            listing.report(
                Code.PROG_ORDER,
                event.step,
                f"it loses its blocks ({order.place(victim)}) for the next in the queue, {first}, "
                f"which is no more urgent ({order.place(first)})",
                once=victim,
                request=victim,
            )
    if victim in order.running:
        order.running.discard(victim)
        order.waiting.add(victim)


def _judge_admission(event: BlocksAllocated, order: _Order, listing: Listing) -> None:
    newcomer = request_of(event.seq)
    if newcomer not in order.waiting:
        return
    listing.count("admissions judged")
    first = order.first_waiting()
    if first is not None and first != newcomer:
        listing.report(
            Code.PROG_ORDER,
            event.step,
            f"it is let in ({order.place(newcomer)}), and {first}, which precedes it "
            f"({order.place(first)}), goes on waiting",
            once=newcomer,
            request=newcomer,
        )
    order.waiting.discard(newcomer)
    order.running.add(newcomer)
