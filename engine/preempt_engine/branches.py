"""The sequences of a request: how they split, how beams replace them, how one of several ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from preempt_engine.residency import Residency
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import SequenceKey


class Branches:
    """Splits and ends the sequences of an engine's requests, between steps.

    Args:
        residency: of the requests.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def fork(self, request: Request, parent: Sequence) -> Sequence:
        """Split a branch off a sequence whose tokens are all computed."""
        residency = self._residency
        child = parent.fork(SequenceKey(request.request_id, request.next_branch))
        request.next_branch += 1
        request.sequences[child.key.branch] = child
        residency.blocks.fork(parent, child)
        if child.known_to_workers:
            residency.forks.append((parent.key, child.key))
        if residency.observer is not None:
            residency.observer.forked(residency.next_step_id - 1, parent.key, child.key)
        return child

    def continue_beams(self, request: Request, beams: Seq[tuple[int, int]]) -> list[int]:
        """Replace a request's sequences by the beams of the next step.

        Args:
            beams: (branch it continues, its next token). A branch may be continued several
                times; one that is not continued gives up its blocks at once.

        Returns:
            Branch of each beam.
        """
        residency = self._residency
        continued = {branch for branch, _ in beams}
        for branch in [branch for branch in request.sequences if branch not in continued]:
            residency.drop(request, request.sequences[branch])
        chosen: list[Sequence] = []
        for branch, _ in beams:
            parent = request.sequences[branch]
            chosen.append(self.fork(request, parent) if branch not in continued else parent)
            continued.discard(branch)
        for sequence, (_, token_id) in zip(chosen, beams, strict=True):
            sequence.append_token(token_id)
            if residency.observer is not None:
                residency.observer.tokens_chosen(
                    residency.next_step_id - 1, sequence.key, [token_id]
                )
        return [sequence.key.branch for sequence in chosen]

    def end(self, request: Request, sequence: Sequence) -> None:
        """One of several branches ended by itself; the others go on."""
        request.num_seqs -= 1
        self._residency.drop(request, sequence)
