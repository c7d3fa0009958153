"""Outputs that ended while nobody who wants them was asking. Owns nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from preempt_engine.outputs import RequestOutput


class Outbox:
    """Keeps ended outputs for the next who asks; those of open streams are their own."""

    def __init__(self) -> None:
        self._ended: list[RequestOutput] = []
        self._streamed: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._ended)

    def put(self, output: RequestOutput) -> None:
        """Keep an output."""
        self._ended.append(output)

    def put_ended(self, outputs: Iterable[RequestOutput]) -> None:
        """Keep those of a step's outputs that have ended and are not streamed."""
        self._ended += [
            output
            for output in outputs
            if output.finished and not any(output is mine for mine in self._streamed)
        ]

    def take(self) -> list[RequestOutput]:
        """What is kept; it is kept no longer."""
        ended, self._ended = self._ended, []
        return ended

    def withdraw(self, output: RequestOutput) -> None:
        """Nobody wants this output any more."""
        self._ended = [kept for kept in self._ended if kept is not output]

    @contextmanager
    def streaming(self, output: RequestOutput) -> Iterator[None]:
        """Meanwhile the output has a reader of its own."""
        self._streamed.append(output)
        try:
            yield
        finally:
            self._streamed = [other for other in self._streamed if other is not output]
