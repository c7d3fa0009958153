"""An exception in a rank: as a message to the driver, and there as an error of the engine."""

from __future__ import annotations

import traceback

from preempt_engine import errors
from preempt_engine.errors import (
    EngineError,
    WorkerError,
    WorkerFailedError,
    WorkerOutOfMemoryError,
)
from preempt_engine.executor.wire import Failed


def describe_failure(error: BaseException) -> Failed:
    """An exception as the driver is told of it."""
    # Told apart by name, because torch must not be imported for it; torch's CPU allocator raises
    # a plain RuntimeError.
    out_of_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
    message, advice = str(error), ""
    if isinstance(error, EngineError):
        message, advice = error.message, error.advice
    return Failed(
        kind=type(error).__name__,
        message=message,
        advice=advice,
        traceback="".join(traceback.format_exception(error)),
        out_of_memory=out_of_memory,
    )


def error_from(rank: int, failed: Failed) -> EngineError:
    """A rank's exception, as one of the engine's own."""
    what = f"{failed.kind}: {failed.message}" if failed.message else failed.kind
    if failed.out_of_memory:
        return WorkerOutOfMemoryError(
            f"Rank {rank} ran out of memory ({what}).",
            "Lower num_kv_blocks, max_num_batched_tokens or the memory settings.",
            rank,
            failed.traceback,
        )
    known = getattr(errors, failed.kind, None)
    if isinstance(known, type) and issubclass(known, WorkerError):
        message = f"Rank {rank}: {failed.message}"
        return known(message, failed.advice, rank, failed.traceback)
    if isinstance(known, type) and issubclass(known, EngineError):
        error = known(failed.message, failed.advice)
        error.add_note(f"Traceback of rank {rank}:\n{failed.traceback}")
        return error
    return WorkerFailedError(
        f"Rank {rank} raised {what}.",
        "Its traceback is below.",
        rank,
        failed.traceback,
    )
