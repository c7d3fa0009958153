"""The workers of one engine as one thing: messages to all, answers from all, and one clear error.

Whatever goes wrong in one rank ends all of them, so that no rank waits for another that is gone
and no process outlives its engine. Knows frames, not what is in them.
"""

from __future__ import annotations

import os
import selectors
import time
import weakref
from typing import NoReturn

from preempt_engine.errors import (
    CollectiveError,
    EngineClosedError,
    EngineError,
    WireProtocolError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from preempt_engine.executor.failures import error_from
from preempt_engine.executor.launch import WorkerProcess, kill_all, start_worker
from preempt_engine.executor.wire import (
    Failed,
    Frame,
    MessageKind,
    decode_body,
    make_frame,
)

# A rank whose collective failed is asked only if no other rank says within this time that it is
# the one that caused it.
_SETTLE_S = 1.0
_CLOSE_S = 5.0


class WorkerGroup:
    """Started workers, one per rank.

    Args:
        size: number of ranks.
        environment: variables for the workers, where the user has not set them.
        inherited: more file descriptors for the workers.
    """

    def __init__(
        self, size: int, environment: dict[str, str], inherited: tuple[int, ...] = ()
    ) -> None:
        self._workers: list[WorkerProcess] = []
        # Also when the engine is forgotten, or the interpreter ends, without `close`.
        self._finalizer = weakref.finalize(self, kill_all, self._workers, os.getpid())
        self._selector = selectors.DefaultSelector()
        self._why_unusable: str | None = None
        try:
            for rank in range(size):
                self._workers.append(start_worker(rank, environment, inherited))
                self._selector.register(
                    self._workers[rank].channel, selectors.EVENT_READ, self._workers[rank]
                )
        except BaseException:
            self._end("they could not be started.")
            raise

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._workers)

    @property
    def process_ids(self) -> list[int]:
        """Of the workers, by rank."""
        return [worker.process.pid for worker in self._workers]

    def check_usable(self) -> None:
        """Raises EngineClosedError, with the reason, if the workers are gone."""
        if self._why_unusable is not None:
            raise EngineClosedError(
                f"The workers of this engine are gone: {self._why_unusable}", "Build a new LLM."
            )

    def broadcast(self, kind: MessageKind, body: bytes) -> int:
        """Send the same message to every rank; never waits. Returns its size in bytes.

        Raises:
            EngineClosedError: the workers are gone.
        """
        self.check_usable()
        frame = make_frame(kind, body)
        for worker in self._workers:
            worker.channel.queue(frame)
        return len(frame)

    def gather(self, kind: MessageKind, timeout_s: float, doing: str) -> list[bytes]:
        """Wait for the next answer of every rank.

        Args:
            kind: what the answers must be.
            timeout_s: for all of them.
            doing: what the workers are at, for the error.

        Returns:
            Bodies, by rank.

        Raises:
            WorkerError: a rank died, failed or is silent; all workers are gone then.
            EngineError: one of the engine's own errors, raised in a rank.
        """
        deadline = time.monotonic() + timeout_s
        bodies: dict[int, bytes] = {}
        try:
            while not self._collect(kind, bodies):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._fail_silent([r for r in range(self.size) if r not in bodies], doing)
                self._exchange(remaining)
        except BaseException as error:
            self._end(
                error.message if isinstance(error, EngineError) else f"{type(error).__name__}."
            )
            raise
        return [bodies[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Have the workers end, and see to it; may be called twice."""
        try:
            if self._why_unusable is None:
                self.broadcast(MessageKind.CLOSE, b"")
                self._wait_for_ends()
        finally:
            self._end("it was closed.")

    # Inside -------------------------------------------------------------------------------------

    def _wait_for_ends(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        while not all(worker.channel.ended for worker in self._workers):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._exchange(remaining)

    def _end(self, why: str) -> None:
        if self._why_unusable is None:
            self._why_unusable = why
            self._selector.close()
            self._finalizer()

    def _exchange(self, timeout_s: float) -> None:
        """Write what waits and read what comes, once, waiting at most so long for either."""
        for worker in self._workers:
            if worker.channel.ended:
                continue
            events = selectors.EVENT_READ
            if worker.channel.has_outgoing:
                events |= selectors.EVENT_WRITE
            if self._selector.get_key(worker.channel).events != events:
                self._selector.modify(worker.channel, events, worker)
        for key, events in self._selector.select(timeout_s):
            channel = key.data.channel
            if events & selectors.EVENT_WRITE:
                channel.write()
            if events & selectors.EVENT_READ:
                channel.read()
                if channel.ended:
                    self._selector.unregister(channel)

    def _collect(self, kind: MessageKind, bodies: dict[int, bytes]) -> bool:
        """Take complete answers; True when every rank has given one."""
        for worker in self._workers:
            if worker.rank in bodies:
                continue
            frame = worker.channel.next_frame()
            if frame is not None and frame.kind is kind:
                bodies[worker.rank] = frame.body
            elif frame is not None or worker.channel.ended:
                self._fail(worker, frame, bodies)
        return len(bodies) == self.size

    def _fail(
        self, worker: WorkerProcess, frame: Frame | None, bodies: dict[int, bytes]
    ) -> NoReturn:
        """Raise what is to be said of this rank, or of the one that caused its trouble."""
        error = _error_of(worker, frame)
        deadline = time.monotonic() + _SETTLE_S
        suspects = [
            other for other in self._workers if other is not worker and other.rank not in bodies
        ]
        while isinstance(error, CollectiveError) and suspects:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._exchange(remaining)
            for other in list(suspects):
                frame = other.channel.next_frame()
                if frame is None and not other.channel.ended:
                    continue
                suspects.remove(other)
                cause = _error_of(other, frame)
                if not isinstance(cause, CollectiveError):
                    error = cause
                    break
        raise error

    def _fail_silent(self, ranks: list[int], doing: str) -> NoReturn:
        """Nothing came from these ranks: say where they are."""
        stacks = {rank: self._workers[rank].dump_stacks() for rank in ranks}
        # A rank that waits in a collective waits for another one.
        guilty = [rank for rank in ranks if _COLLECTIVES not in stacks[rank]] or ranks
        names = ", ".join(map(str, guilty))
        raise WorkerTimeoutError(
            f"Rank {names} gave no answer while {doing}.",
            "See where it was below; raise worker_timeout_s or worker_start_timeout_s if it was "
            "only slow.",
            guilty[0],
            stacks[guilty[0]],
        )


# The file whose functions are on the stack of a rank that waits for its peers.
_COLLECTIVES = "communicator.py"


def _error_of(worker: WorkerProcess, frame: Frame | None) -> EngineError:
    """What happened to a rank that sent no proper answer; `frame` is None if it sent nothing."""
    if frame is None:
        how = worker.exit_text()
        return WorkerDiedError(
            f"Rank {worker.rank}, process {worker.process.pid}, {how}.",
            "The system does that when memory runs out; see its log."
            if "SIGKILL" in how
            else "See what it wrote to stderr.",
            worker.rank,
            worker.read_stacks(),
        )
    if frame.kind is MessageKind.FAILED:
        return error_from(worker.rank, decode_body(frame.body, Failed))
    return WireProtocolError(
        f"Rank {worker.rank} answered with {frame.kind.name} out of turn.",
        "This is a bug of the engine; please report it.",
    )
