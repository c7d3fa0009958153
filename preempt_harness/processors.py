"""Logits processors that workloads name: state that a preemption must not lose.

Plain data cannot hold code, so a `SamplingSpec` names processors and an adapter hands its engine
what stands under the name in `PROCESSORS`. Each class follows the protocol that engines commonly
use: `reset(prompt)`, `accept(token)`, `process(scores)`; an adapter wraps it where its engine's
differs. Their states depend on the order of all tokens, so any that is lost, repeated or exchanged
shows in later choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MINUS_INFINITY = float("-inf")


class NoRepeatedBigram:
    """Forbids a token that would repeat two adjacent output tokens."""

    def __init__(self) -> None:
        self.reset(())

    def reset(self, prompt_token_ids: Sequence[int]) -> None:
        """No output yet."""
        self._last: int | None = None
        self._followers: dict[int, set[int]] = {}

    def accept(self, token_id: int) -> None:
        """The next output token."""
        if self._last is not None:
            self._followers.setdefault(self._last, set()).add(token_id)
        self._last = token_id

    def process(self, scores: NDArray[Any]) -> NDArray[Any]:
        """Forbid what followed the last token before; [vocab_size] to the same."""
        if self._last is not None:
            scores[list(self._followers.get(self._last, ()))] = _MINUS_INFINITY
        return scores


class ChecksumLane:
    """Allows a quarter of the vocabulary, chosen by a checksum of prompt and output in order."""

    def __init__(self) -> None:
        self.reset(())

    def reset(self, prompt_token_ids: Sequence[int]) -> None:
        """Begin the checksum with the prompt."""
        self._checksum = 1
        for token_id in prompt_token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """The next token."""
        # A multiplier that is 5 modulo 8 visits every state of the lowest bits (Knuth, TAOCP 2,
        # section 3.2.1.2, theorem A).
        self._checksum = (self._checksum * 1_664_525 + token_id + 1) % 2**32

    def process(self, scores: NDArray[Any]) -> NDArray[Any]:
        """Forbid the other three quarters; [vocab_size] to the same."""
        lane = (self._checksum >> 8) % 4
        for other in range(4):
            if other != lane:
                scores[other::4] = _MINUS_INFINITY
        return scores


PROCESSORS: dict[str, Callable[[], Any]] = {
    "no_repeated_bigram": NoRepeatedBigram,
    "checksum_lane": ChecksumLane,
}
