"""CRASH: the engine raised, died or hung. Owns no judgement beyond naming which."""

from __future__ import annotations

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.trace import Trace
from preempt_harness.record import EngineError

_CODES = {"signal": Code.CRASH_SIGNAL, "exit": Code.CRASH_EXIT, "hang": Code.CRASH_HANG}
_WHAT = {
    "signal": "the engine's process was killed",
    "exit": "the engine's process ended by itself",
    "hang": "the engine hung",
}


def check_crash(trace: Trace) -> CheckResult:
    """A finding per `EngineError`."""
    listing = Listing()
    for event in trace.of(EngineError):
        what = _WHAT.get(event.kind, f"the engine raised {event.kind}")
        listing.report(
            _CODES.get(event.kind, Code.CRASH_EXCEPTION),
            event.step,
            f"{what}: {event.message or 'no message'}",
        )
    return listing.result("crash")
