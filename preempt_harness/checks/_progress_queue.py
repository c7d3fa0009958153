"""Progress: the limit of the queue, from both sides."""

from __future__ import annotations

from dataclasses import dataclass

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    Finished,
    Header,
    Preempted,
    Resumed,
)


def has_queue_limit(header: Header) -> bool:
    """Whether only so many requests may wait."""
    return isinstance(header.config.get("max_waiting_requests"), int)


def check_queue(trace: Trace) -> CheckResult:
    """Who finds the queue full does not run, however it became full."""
    listing = Listing()
    limit = trace.header.config["max_waiting_requests"]
    for late in who_found_the_queue_full(trace):
        listing.count("requests judged")
        if late.has_run:
            listing.report(
                Code.PROG_QUEUE_LIMIT,
                late.step,
                f"{late.num_waiting} requests waited when it arrived, max_waiting_requests is "
                f"{limit}, and it was taken in",
                request=late.request,
            )
    return listing.result("progress", "queue")


@dataclass(slots=True)
class LateRequest:
    """A request that found the queue full when it arrived.

    Attributes:
        request, step: who, and when.
        num_waiting: so many waited.
        has_run: it was given blocks all the same.
    """

    request: str
    step: int
    num_waiting: int
    has_run: bool = False


def who_found_the_queue_full(trace: Trace) -> list[LateRequest]:
    """Those who may be refused, and must be.

    Who waits is told from the log: who has arrived, or lost its blocks, and has none since.
    """
    if not has_queue_limit(trace.header):
        return []
    limit = trace.header.config["max_waiting_requests"]
    waiting: set[str] = set()
    found_full: dict[str, LateRequest] = {}
    for event in trace.of(Arrived, BlocksAllocated, Preempted, Resumed, Finished, Aborted):
        if isinstance(event, BlocksAllocated):
            request = request_of(event.seq)
            waiting.discard(request)
            if request in found_full:
                found_full[request].has_run = True
        elif isinstance(event, Resumed | Finished | Aborted):
            waiting.discard(event.request)
        elif isinstance(event, Arrived) and len(waiting) >= limit:
            found_full[event.request] = LateRequest(event.request, event.step, len(waiting))
        else:
            waiting.add(event.request)
    return list(found_full.values())
