"""Errors of making and finding checkpoints, and the check that an optional dependency is there."""

from __future__ import annotations

from importlib.util import find_spec

from preempt_harness.errors import HarnessError


class CheckpointError(HarnessError):
    """A checkpoint could not be made, or what was made is not what it should be."""


class UnknownCheckpointError(CheckpointError, ValueError):
    """No checkpoint has this name."""


class MissingExtraError(CheckpointError, ImportError):
    """An optional dependency of this distribution is not installed."""


def require_extra(extra: str, *modules: str) -> None:
    """Check that modules can be imported, without importing them.

    Args:
        extra: name of the extra of preempt-harness that brings them.
        modules: top-level module names.

    Raises:
        MissingExtraError: one is absent; the message names it and the `pip install` line.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(
                f"The Python module {module!r} is not installed.",
                f'Run: pip install "preempt-harness[{extra}]"',
            )
