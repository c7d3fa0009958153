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


class WireProtocolError(EngineError, RuntimeError):
    """Bytes between driver and worker are not a message of this version of the protocol."""


class WorkerError(EngineError, RuntimeError):
    """Something happened to the process of one rank; the engine is closed by it.

    Args:
        message: what happened, naming the rank.
        advice: what to do about it.
        rank: tensor parallel rank.
        worker_traceback: where that rank was, as Python prints it; "" if it is not known.
    """

    def __init__(
        self, message: str, advice: str, rank: int = 0, worker_traceback: str = ""
    ) -> None:
        super().__init__(message, advice)
        self.rank = rank
        self.worker_traceback = worker_traceback
        if worker_traceback:
            self.add_note(f"Traceback of rank {rank}:\n{worker_traceback}")

    def __reduce__(self) -> tuple[type, tuple[str, str, int, str]]:  # type: ignore[override]
        return type(self), (self.message, self.advice, self.rank, self.worker_traceback)


class WorkerDiedError(WorkerError):
    """A rank's process ended by itself: a signal, an exit, or before it was ready."""


class WorkerFailedError(WorkerError):
    """A rank raised an exception that is none of the engine's own."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A rank did not answer within `worker_timeout_s` or `worker_start_timeout_s`."""

    def __str__(self) -> str:  # OSError, a base of TimeoutError, would format its own arguments
        return f"{self.message} {self.advice}"


class WorkerOutOfMemoryError(WorkerError, MemoryError):
    """A rank could not allocate memory."""


class WorkerStateDriftError(WorkerError):
    """What a rank knows of a sequence is not what the scheduler knows (`debug_worker_state`)."""


class CollectiveError(WorkerError):
    """A rank's collective operation failed, usually because another rank is gone."""


class EngineBusyError(EngineError, RuntimeError):
    """`reset()` was called while requests are unfinished or blocks are held."""
