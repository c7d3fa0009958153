"""The engine that a command line names: found, checked, and opened as its isolation asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preempt_harness.adapters.child import ChildHost
from preempt_harness.adapters.protocol import (
    EngineAdapter,
    EngineSettings,
    KeepsEngines,
    Session,
)
from preempt_harness.adapters.registry import AdapterError, AdapterRegistry

ISOLATIONS = ("none", "process")
POLL_TIMEOUT_S = 60.0


class EngineUnusableError(AdapterError):
    """The engine is known, but it cannot be used here."""


def usable_adapter(name: str) -> EngineAdapter:
    """The adapter of that name, ready to open sessions.

    Adapters that a conftest adds by hook are known to pytest alone.

    Raises:
        AdapterError: there is none.
        EngineUnusableError: it cannot be loaded, or something it needs is not installed.
    """
    try:
        adapter = AdapterRegistry().get(name)
    except AdapterError:
        raise
    except Exception as error:  # whatever a foreign package does when it is imported
        raise EngineUnusableError(
            f"The adapter of engine {name!r} cannot be loaded: {type(error).__name__}: {error}.",
            "Repair or remove the package that registers it.",
        ) from error
    missing = adapter.missing()
    if missing:
        raise EngineUnusableError(f"Engine {name!r} cannot be used here.", missing)
    return adapter


@contextmanager
def session_opener(
    adapter: EngineAdapter, isolation: str | None = None
) -> Iterator[Callable[[EngineSettings], Session]]:
    """How to open sessions: in this process, or in a child. No process outlives the context.

    Args:
        adapter: of the engine.
        isolation: "none" or "process"; None takes the adapter's own.
    """
    if (isolation or adapter.isolation) == "none":
        try:
            yield adapter.open
        finally:
            if isinstance(adapter, KeepsEngines):
                adapter.close_kept()
        return
    host = ChildHost(adapter, POLL_TIMEOUT_S)
    try:
        yield host.open
    finally:
        host.close()
