"""Every error a user of the engine can cause, each with the advice that resolves it.

Errors of our own making are assertions; they are not listed here.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors the engine raises on purpose.

    Args:
        message: what happened, in one sentence that names the argument or the file.
        advice: what to do about it, in one sentence.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(f"{message} {advice}")
        self.message = message
        self.advice = advice

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.message, self.advice)


class ConfigError(EngineError, ValueError):
    """An argument of `LLM`, `EngineConfig`, `SamplingParams` is wrong, or two contradict."""


class ModelNotFoundError(EngineError, FileNotFoundError):
    """The model path or hub id leads to no usable checkpoint."""

    def __str__(self) -> str:  # OSError would format its own arguments
        return f"{self.message} {self.advice}"


class UnsupportedModelError(EngineError):
    """The checkpoint asks for mathematics that this engine does not implement."""


class InfeasibleRequestError(EngineError, ValueError):
    """A request can never run in this engine; it ends alone, its neighbours do not notice."""


class QueueFullError(EngineError, RuntimeError):
    """`max_waiting_requests` requests wait already; the new one ends alone."""


class LogitsProcessorError(EngineError, RuntimeError):
    """A user's logits processor raised or returned nonsense; its request ends alone."""


class EngineStalledError(EngineError, RuntimeError):
    """Requests wait, nothing runs, and nothing that could change that is pending."""


class DeterminismError(EngineError, RuntimeError):
    """`deterministic=True` cannot be honoured on this machine for the named operation."""


class NonFiniteLogitsError(EngineError, ArithmeticError):
    """The model returned NaN or infinity where a token had to be chosen or scored."""


class EngineClosedError(EngineError, RuntimeError):
    """The engine was used after `close()`."""
