"""Drafts what followed the latest tokens of a text where they stood before in it.

Source: prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding),
as vLLM's method "ngram": the longest end of the text, of `prompt_lookup_min` to `prompt_lookup_max`
tokens, that occurs earlier; of several places the latest.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_engine.spec_decode.proposer import DraftRequest
from preempt_engine.step import SchedulerOutput, SequenceKey


class NgramProposer:
    """Finds ends of texts in an index that grows with them.

    Args:
        config: lengths to look for.
    """

    needs_blocks = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._indices: dict[SequenceKey, _Index] = {}

    def propose(self, step: SchedulerOutput, wanted: Seq[DraftRequest]) -> list[list[int]]:
        """See `Proposer.propose`. A text that the workers forget is forgotten here too."""
        for key in step.dropped:
            self._indices.pop(key, None)
        return [self._propose(item) for item in wanted]

    def known_keys(self) -> Iterable[SequenceKey]:
        """See `Proposer.known_keys`."""
        return self._indices

    def reset(self) -> None:
        """Forget all texts."""
        self._indices.clear()

    def close(self) -> None:
        """Nothing is held but texts."""
        self.reset()

    def _propose(self, item: DraftRequest) -> list[int]:
        sequence = item.sequence
        index = self._indices.get(sequence.key)
        if index is None:
            index = self._indices[sequence.key] = _Index(self._sizes)
        return index.continuation(sequence.token_ids, item.limit)


class _Index:
    """Where each n-gram of one text was seen last, but for the one at its very end."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._num_indexed = 0  # n-grams that end before this position are in
        self._end_of: dict[tuple[int, ...], int] = {}

    def continuation(self, token_ids: list[int], limit: int) -> list[int]:
        """What followed the longest end of the text that occurs earlier, at most `limit` tokens."""
        length = len(token_ids)
        for end in range(self._num_indexed + 1, length):
            for size in self._sizes:
                if size <= end:
                    self._end_of[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, length - 1)
        for size in self._sizes:
            if size < length:
                found = self._end_of.get(tuple(token_ids[length - size :]))
                if found is not None:
                    return token_ids[found : found + limit]
        return []
