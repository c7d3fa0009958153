"""Precedence: who is served before whom, and who goes first when blocks run short.

For engines that promise an order (`_service_order`):

- a request that is let in precedes all that wait;
- one that loses its blocks by the engine's own need is preceded by all that keep theirs;
- one that loses them for the next in the queue is less urgent by its priority, not by its arrival.

Priorities are those that users gave, at arrival or later; an engine that changes them by itself, or
loses a change, is found by what it does. What the plan forces is not judged: the plan chooses.
"""

from __future__ import annotations

from preempt_harness.checks._service_order import (
    ORDER_EVENTS,
    ServiceOrder,
    last_running,
    next_waiting,
    service_order,
)
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import Trace
from preempt_harness.record import BlocksAllocated, Preempted

_FORCED = "forced"
_FOR_THE_URGENT = "priority"


def check_precedence(trace: Trace) -> CheckResult:
    """Nobody is let in before one that precedes it, nor evicted before one that it precedes."""
    listing = Listing()
    order = service_order(trace.header)
    for event in trace.of(BlocksAllocated, *ORDER_EVENTS):
        if isinstance(event, BlocksAllocated):
            _judge_admission(event, order, listing)
            continue
        if isinstance(event, Preempted):
            _judge_victim(event, order, listing)
        order.take(event)
    return listing.result("progress", "precedence")


def _judge_victim(event: Preempted, order: ServiceOrder, listing: Listing) -> None:
    victim = event.request
    if event.reason == _FORCED or victim not in order.running:
        return
    listing.count("victims judged")
    last = last_running(order)
    if last is not None and last != victim:
        listing.report(
            Code.PROG_ORDER,
            event.step,
            f"it loses its blocks ({order.in_words(victim)}), and {last}, which it precedes "
            f"({order.in_words(last)}), keeps its own",
            once=victim,
            request=victim,
        )
    first = next_waiting(order)
    if event.reason == _FOR_THE_URGENT and first and not order.is_more_urgent(first, victim):
        listing.report(
            Code.PROG_ORDER,
            event.step,
            f"it loses its blocks ({order.in_words(victim)}) for the next in the queue, {first}, "
            f"which is no more urgent ({order.in_words(first)})",
            once=victim,
            request=victim,
        )


def _judge_admission(event: BlocksAllocated, order: ServiceOrder, listing: Listing) -> None:
    newcomer = request_of(event.seq)
    if newcomer not in order.waiting:
        return
    listing.count("admissions judged")
    first = next_waiting(order)
    if first is not None and first != newcomer:
        listing.report(
            Code.PROG_ORDER,
            event.step,
            f"it is let in ({order.in_words(newcomer)}), and {first}, which precedes it "
            f"({order.in_words(first)}), goes on waiting",
            once=newcomer,
            request=newcomer,
        )
    order.admit(newcomer)
