"""Base of the errors that a user of the harness can cause: each says what happened and what to do.

Imports nothing, so that every module may derive from it. Errors of one topic live in its module;
those that adapters and trials both raise are here.
"""

from __future__ import annotations


class HarnessError(Exception):
    """Base of all errors the harness raises on purpose.

    Args:
        message: what happened, in one sentence that names the argument, request or file.
        advice: what to do about it, in one sentence.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(f"{message} {advice}")
        self.message = message
        self.advice = advice

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.message, self.advice)


class UnsupportedTrialError(HarnessError):
    """A trial asks an engine for something that is not among its capabilities."""
