"""Preemptions that an engine counts and does not name: counters are read as differences.

An engine's counters may belong to its process, or have run before a session began.
"""

from __future__ import annotations

from collections.abc import Callable

from preempt_harness import record


class CounterFellError(RuntimeError):
    """A counter that only rises has fallen: the engine was restarted, or counts wrongly."""


class CounterDelta:
    """How much a counter has risen since it was looked at last.

    Args:
        read: its value now; the first look is taken at once.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._seen = read()

    def take(self) -> int:
        """The rise since the last call.

        Raises:
            CounterFellError: it has fallen.
        """
        before, self._seen = self._seen, self._read()
        if self._seen < before:
            raise CounterFellError(f"the counter fell from {before} to {self._seen}")
        return self._seen - before


def counted_preemptions(
    step: int, count: int, *, request: str = "", reason: str = "out_of_blocks"
) -> list[record.Preempted]:
    """Preemptions by recompute of which nothing but their number is known.

    Args:
        step: in which they were noticed.
        count: how many.
        request: whose, where the engine counts by request.
        reason: "forced" where the engine was told to preempt.
    """
    return [
        record.Preempted(step, request, "recompute", "unknown", reason, 0, 0) for _ in range(count)
    ]
