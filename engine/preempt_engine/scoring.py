"""Scores given tokens with the rows that predict them: continuations, and prompts themselves.

Owns the continuations being scored.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from preempt_engine.output_builder import OutputBuilder
from preempt_engine.outputs import TokenScore
from preempt_engine.sampling.logprobs import score_rows, top_logprobs_of_rows
from preempt_engine.scheduler import Scheduler
from preempt_engine.sequence import Request
from preempt_engine.step import LogitsBatch


@dataclass(slots=True)
class Scoring:
    """A continuation being scored; `scores` grow as its logits come."""

    continuation: list[int]
    scores: list[TokenScore] = field(default_factory=list)


class PromptReader:
    """Reads the rows of prompts that are scored.

    Args:
        scheduler: is told when a continuation is scored.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._scorings: dict[str, Scoring] = {}

    def begin(self, request: Request, continuation: Seq[int]) -> Scoring:
        """The request is for the scores of these tokens, which end its prompt."""
        scoring = self._scorings[request.request_id] = Scoring(list(continuation))
        return scoring

    def read(
        self,
        request: Request,
        builders: list[OutputBuilder] | None,
        logits: LogitsBatch,
        rows: range,
    ) -> range:
        """Score given tokens with the rows that predict them; returns the rows to sample from.

        Args:
            request: whose rows they are.
            builders: of its outputs; None of a request that scores a continuation.
            logits: the step's.
            rows: of one sequence.
        """
        if request.score_from is None:
            return rows
        sequence = request.sequence
        done = sequence.first_wanted_logits - request.score_from
        num = min(len(rows), max(0, request.num_to_score - done))
        if num == 0:
            return rows
        sequence.first_wanted_logits += num
        if builders is not None:  # the prompt's own tokens, of which nothing predicts the first
            builder = builders[0]
            assert builder.params.prompt_logprobs is not None
            targets = sequence.token_ids[done + 1 : done + 1 + num]
            builder.append_prompt_logprobs(
                top_logprobs_of_rows(logits, rows[:num], builder.params.prompt_logprobs, targets)
            )
            return rows[num:]
        scoring = self._scorings[request.request_id]
        targets = scoring.continuation[done : done + num]
        scoring.scores += score_rows(logits, rows[:num], targets)
        if done + num == request.num_to_score:
            del self._scorings[request.request_id]
            self.scheduler.finish(request, "length")
        return rows[num:]

    def check_nothing_is_left(self) -> None:
        """Assert that no continuation is being scored, when all requests have ended."""
        assert not self._scorings, f"scorings {list(self._scorings)} ended and are kept"
