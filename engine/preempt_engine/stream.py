"""Streams of deltas, made from outputs that grow in place.

A delta is the difference between what an output is and what was handed on before; nothing watches
the steps in between, so whoever runs them, no token is lost or told twice.
"""

from __future__ import annotations

from preempt_engine.outputs import CompletionOutput, RequestOutput, StreamDelta


class DeltaReader:
    """Reads one request's output as it grows.

    Args:
        output: live, as the engine returns it.
    """

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        # Per branch: tokens and characters handed on; None once its end was.
        self._told: dict[int, tuple[int, int] | None] = {}

    def read(self) -> list[StreamDelta]:
        """One delta for each branch that changed since the last call."""
        return [delta for branch in self._output.outputs if (delta := self._delta(branch))]

    def _delta(self, branch: CompletionOutput) -> StreamDelta | None:
        told = self._told.get(branch.index, (0, 0))
        if told is None:
            return None
        num_tokens, num_characters = told
        now = len(branch.token_ids), len(branch.text)
        if now == told and not branch.finished():
            return None
        self._told[branch.index] = None if branch.finished() else now
        return StreamDelta(
            request_id=self._output.request_id,
            index=branch.index,
            text=branch.text[num_characters:],
            token_ids=branch.token_ids[num_tokens:],
            logprobs=None if branch.logprobs is None else branch.logprobs[num_tokens:],
            finish_reason=branch.finish_reason,
            stop_reason=branch.stop_reason,
        )
