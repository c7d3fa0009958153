"""Ends a step that never returns, in the process that runs it.

For engines that run in this process on purpose, where no child can be killed. Counts processor
time, so a loaded machine hangs nobody; works in the main thread only, as signals do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from preempt_harness.adapters.child import EngineProcessError
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.record import AnyEvent


def watched(adapter: EngineAdapter, cpu_s: float) -> Callable[[EngineSettings], Session]:
    """An opener of sessions whose polls may each take so many processor seconds."""

    def open_session(settings: EngineSettings) -> Session:
        return _WatchedSession(adapter.open(settings), cpu_s)

    return open_session


class _WatchedSession:
    """A session with a limit on `poll`; everything else is the session's own."""

    def __init__(self, session: Session, cpu_s: float) -> None:
        self._session = session
        self._cpu_s = cpu_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        with _limit(self._cpu_s):
            return self._session.poll(timeout_s)


@contextmanager
def _limit(cpu_s: float) -> Iterator[None]:
    def hang(signum: int, frame: FrameType | None) -> None:
        raise EngineProcessError("hang", f"a step took more than {cpu_s:g} s of processor time", "")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
