"""The protocol of changes to a row of logits that depend on the tokens before it.

A processor's state belongs to one sequence and is a function of the prompt and of the output tokens
accepted since; `history.py` keeps the two in step, and rebuilds the state by replaying the output
when the sequence comes back from a preemption. So a processor needs no way to save itself, and must
not draw its own random numbers or look at a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LogitsFunction: TypeAlias = "Callable[[list[int], NDArray[np.float64]], NDArray[np.float64]]"
"""`f(output_token_ids, scores) -> scores`: a processor without state of its own."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """A processor with state.

    The user hands one object to `SamplingParams.logits_processors`; the engine works on deep
    copies of it, one per sequence and history, so requests that share parameters share no state.

        reset(prompt) accept(t0) accept(t1) ... accept(tk) process(scores of token k + 1)

    `reset` starts a history and may come at any time; afterwards every output token comes again,
    once and in order. `process` may be called any number of times for the same history.
    """

    def reset(self, prompt_token_ids: Seq[int]) -> None:
        """Start anew: this prompt, and no output yet."""
        ...

    def accept(self, token_id: int) -> None:
        """The next output token."""
        ...

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Scores of the next token; changes and returns its argument, or returns another array.

        Args:
            scores: float64 [vocab_size]: logits, perhaps changed by processors before this one.

        Returns:
            The same shape; -inf forbids a token, +inf and NaN are errors of the request.
        """
        ...
