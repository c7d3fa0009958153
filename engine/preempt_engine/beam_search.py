"""Beam search of one request: which beams go on, which hypotheses are finished, when to stop.

Owns scores and histories. Knows beams by their branch numbers; no blocks, no steps, no text. A
preemption does not reach it: candidates of beams that were computed stay while others wait.

The rules are those of transformers' `GenerationMixin._beam_search` with `do_sample=False`
(https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/generation/utils.py),
for one prompt:

- Of all continuations of the `beam_width` beams, the best `beam_width * max(2, 1 + stop ids)` are
  looked at, so that enough of them go on whatever number ends.
- Those among the first `beam_width` that end become hypotheses; the best `beam_width` are kept. A
  hypothesis scores its sum of log probabilities / length ** `length_penalty`.
- The best `beam_width` that do not end are the next beams.

Scores are summed in float64 (transformers: float32). Equal scores are ordered by beam, then id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from preempt_engine.sampling.logprobs import largest_ids, log_softmax
from preempt_engine.sampling.params import BeamSearchParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Node(NamedTuple):
    """One token of a beam and, through `before`, all tokens before it."""

    token_id: int
    logprob: float
    before: Node | None


@dataclass(slots=True)
class Beam:
    """A beam that goes on.

    Attributes:
        branch: the sequence that computes it.
        score: sum of its log probabilities.
        last: its last token, None for the prompt.
        candidates: (token id, log probability) of its best continuations; None until computed.
    """

    branch: int
    score: float = 0.0
    last: Node | None = None
    candidates: list[tuple[int, float]] | None = None


@dataclass(slots=True, frozen=True)
class Hypothesis:
    """A finished beam.

    Attributes:
        score: sum of log probabilities / length ** length_penalty.
        last: its last token.
    """

    score: float
    last: Node

    def tokens(self) -> list[tuple[int, float]]:
        """(token id, log probability) of all its tokens."""
        tokens = []
        node: Node | None = self.last
        while node is not None:
            tokens.append((node.token_id, node.logprob))
            node = node.before
        return tokens[::-1]


@dataclass(slots=True)
class BeamSearch:
    """The search for one prompt. It begins with one beam, branch 0.

    Attributes:
        params: what the user asked for.
        stop_ids: ids that end a beam.
        max_output_tokens: length at which every beam ends.
        beams: best first.
        hypotheses: best first, `beam_width` at most.
        length: output tokens of the beams.
    """

    params: BeamSearchParams
    stop_ids: frozenset[int]
    max_output_tokens: int
    beams: list[Beam] = field(default_factory=lambda: [Beam(0)])
    hypotheses: list[Hypothesis] = field(default_factory=list)
    length: int = 0

    @staticmethod
    def num_candidates(beam_width: int, stop_ids: frozenset[int]) -> int:
        """Continuations that are looked at in a step; the vocabulary must have as many."""
        return beam_width * max(2, 1 + len(stop_ids))

    def take_row(self, branch: int, row: NDArray[np.float64]) -> bool:
        """Take in the logits that follow a beam, [vocab_size].

        Returns:
            Whether all beams have theirs, so that `advance` may be called.
        """
        beam = next(beam for beam in self.beams if beam.branch == branch)
        logprobs = log_softmax(row)
        ids = largest_ids(logprobs, self.num_candidates(self.params.beam_width, self.stop_ids))
        beam.candidates = [(token_id, float(logprobs[token_id])) for token_id in ids.tolist()]
        return all(beam.candidates is not None for beam in self.beams)

    def advance(self) -> list[tuple[int, int]]:
        """Choose the next beams.

        Returns:
            (branch it continues, its next token) of each of the next beams, best first; then
            `renumber` must be called. Empty when the search is over.
        """
        width = self.params.beam_width
        best = self._best_continuations()
        self.length += 1
        ends = [self._ends(node) for _, _, node in best]
        for (score, _, node), ended in zip(best[:width], ends, strict=False):
            if ended:
                self._finish(score, node)
        going_on = [entry for entry, ended in zip(best, ends, strict=True) if not ended][:width]
        if not going_on or self._is_over(going_on[0][0]):
            self.beams = []
            return []
        self.beams = [Beam(beam.branch, score, node) for score, beam, node in going_on]
        return [(beam.branch, node.token_id) for _, beam, node in going_on]

    def renumber(self, branches: list[int]) -> None:
        """The sequences that compute the beams, in the order of `advance`."""
        for beam, branch in zip(self.beams, branches, strict=True):
            beam.branch = branch

    def _best_continuations(self) -> list[tuple[float, Beam, Node]]:
        """(sum of log probabilities, beam, next token), best first."""
        ranked = []
        for rank, beam in enumerate(self.beams):
            assert beam.candidates is not None
            for token_id, logprob in beam.candidates:
                ranked.append((-(beam.score + logprob), rank, token_id, logprob))
        ranked.sort()
        del ranked[self.num_candidates(self.params.beam_width, self.stop_ids) :]
        return [
            (-negative, self.beams[rank], Node(token_id, logprob, self.beams[rank].last))
            for negative, rank, token_id, logprob in ranked
        ]

    def _ends(self, node: Node) -> bool:
        return node.token_id in self.stop_ids or self.length >= self.max_output_tokens

    def _finish(self, score: float, node: Node) -> None:
        hypothesis = Hypothesis(self._penalised(score, self.length), node)
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda other: -other.score)  # stable: the earlier wins a tie
        del self.hypotheses[self.params.beam_width :]

    def _is_over(self, best_score: float) -> bool:
        """Whether the beams, the best with this sum, cannot or need not improve the result.

        "never" with a positive penalty assumes that the best beam gains nothing more and becomes
        as long as it may; otherwise it is judged at the length it has.
        """
        if len(self.hypotheses) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        patient = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.max_output_tokens if patient else self.length
        return self._penalised(best_score, length) <= self.hypotheses[-1].score

    def _penalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self.params.length_penalty)
