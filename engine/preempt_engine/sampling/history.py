"""Keeps processors in step with the token history of their sequence, whatever happened to it.

Owns the state of logits processors, per sequence. It is never saved and never moved: it follows the
output. Where the output is what the state has seen plus new tokens, those are accepted; else (a
fork, a token taken back) the state starts again and the output is replayed. A preemption drops the
state, as it drops the blocks: a request that waits holds nothing but its tokens.

Must never know blocks, steps or logits beyond one row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from preempt_engine.sampling.logits_processor import LogitsProcessor
from preempt_engine.sampling.recipes import ProcessorRecipe
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import SequenceKey

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ProcessorState:
    """The processors of one sequence.

    Args:
        processors: in the order of their stages.
        prompt_token_ids: of the sequence.
    """

    def __init__(self, processors: Seq[LogitsProcessor], prompt_token_ids: Seq[int]) -> None:
        self._processors = processors
        self._prompt_token_ids = prompt_token_ids
        self._seen: list[int] | None = None  # output tokens accepted; None: not even the prompt

    def process(
        self, scores: NDArray[np.float64], output_token_ids: Seq[int]
    ) -> NDArray[np.float64]:
        """Scores of the token that follows `output_token_ids`; may change its argument.

        Raises:
            LogitsProcessorError: of a user's processor.
        """
        self._follow(output_token_ids)
        for processor in self._processors:
            scores = processor.process(scores)
        return scores

    def _follow(self, output_token_ids: Seq[int]) -> None:
        seen = self._seen
        if seen is None or list(output_token_ids[: len(seen)]) != seen:
            for processor in self._processors:
                processor.reset(self._prompt_token_ids)
            seen = self._seen = []
        for token_id in output_token_ids[len(seen) :]:
            for processor in self._processors:
                processor.accept(token_id)
            seen.append(token_id)


class ProcessorStates:
    """The states of all sequences that have processors."""

    def __init__(self) -> None:
        self._recipes: dict[str, ProcessorRecipe] = {}
        # With the number of preemptions the request had when the state was built.
        self._states: dict[SequenceKey, tuple[int, ProcessorState]] = {}

    def add(self, request_id: str, recipe: ProcessorRecipe) -> None:
        """A request that needs processors; others are not made known."""
        self._recipes[request_id] = recipe

    def __bool__(self) -> bool:
        return bool(self._recipes)

    def check_nothing_is_left(self) -> None:
        """Assert that no processor is kept, when all requests have ended."""
        assert not self._recipes, f"requests {list(self._recipes)} ended and are known"
        kept = [str(key) for key in self._states]
        assert not kept, f"sequences {kept} ended and their processors are kept"

    def of(self, request: Request, sequence: Sequence) -> ProcessorState | None:
        """The state of a running sequence, new after each preemption; None without processors."""
        recipe = self._recipes.get(request.request_id)
        if recipe is None:
            return None
        num_preemptions, state = self._states.get(sequence.key, (-1, None))
        if state is None or num_preemptions != request.num_preemptions:
            prompt_token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
            state = ProcessorState(recipe.build(), prompt_token_ids)
            self._states[sequence.key] = request.num_preemptions, state
        return state

    def drop(self, request: Request) -> None:
        """The request has ended."""
        if self._recipes.pop(request.request_id, None) is not None:
            for branch in range(request.next_branch):  # those that ended before it too
                self._states.pop(SequenceKey(request.request_id, branch), None)
