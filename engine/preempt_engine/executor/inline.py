"""Ranks of the exact model in the driver's own process; only the messages are as elsewhere.

A rank starts at once, and a trial on several ranks costs little more than one on one; what a rank
has not been told it does not know here either, since all that reaches it are bytes. Nothing runs
beside the driver: a rank computes a step when the driver waits for it.
"""

from __future__ import annotations

from collections import deque

from preempt_engine.errors import EngineClosedError
from preempt_engine.executor.failures import describe_failure, error_from
from preempt_engine.executor.rank import Rank
from preempt_engine.executor.wire import HEADER, Frame, MessageKind


class InlineGroup:
    """Ranks in this process, with the methods of a `WorkerGroup`.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._ranks = [Rank(rank) for rank in range(size)]
        self._frames: deque[Frame] = deque()
        self._why_unusable: str | None = None

    @property
    def process_ids(self) -> list[int]:
        """None: every rank is this process."""
        return []

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def check_usable(self) -> None:
        """Raises EngineClosedError, with the reason, if a rank has failed or all were closed."""
        if self._why_unusable is not None:
            raise EngineClosedError(
                f"The ranks of this engine are gone: {self._why_unusable}", "Build a new LLM."
            )

    def broadcast(self, kind: MessageKind, body: bytes) -> int:
        """Have the same message for every rank. Returns its size in bytes, with its header.

        Raises:
            EngineClosedError: a rank has failed, or all were closed.
        """
        self.check_usable()
        self._frames.append(Frame(kind, body))
        return HEADER.size + len(body)

    def gather(self, kind: MessageKind, timeout_s: float, doing: str) -> list[bytes]:
        """Let every rank answer the oldest message.

        Args:
            kind: what the answers must be.
            timeout_s: is not kept: nothing can interrupt a rank in this process.
            doing: is not used, since every failure has a traceback.

        Returns:
            Bodies, by rank.

        Raises:
            WorkerFailedError: a rank failed; all are gone then.
            EngineError: one of the engine's own errors, raised in a rank.
        """
        frame = self._frames.popleft()
        bodies = []
        for number, rank in enumerate(self._ranks):
            try:
                answer = rank.answer(frame)
            except Exception as error:
                told = error_from(number, describe_failure(error))
                self._end(told.message)
                raise told from error
            except BaseException as error:  # the others have not seen the message
                self._end(f"{type(error).__name__}.")
                raise
            assert answer is not None, f"{frame.kind.name} has no answer"
            assert answer.kind is kind, f"{frame.kind.name} was answered with {answer.kind.name}"
            bodies.append(answer.body)
        return bodies

    def close(self) -> None:
        """Let the ranks release what they hold; may be called twice."""
        if self._why_unusable is None:
            for rank in self._ranks:
                rank.answer(Frame(MessageKind.CLOSE, b""))
        self._end("it was closed.")

    def _end(self, why: str) -> None:
        if self._why_unusable is None:
            self._why_unusable = why
            self._ranks = []
            self._frames.clear()
