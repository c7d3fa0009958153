"""The protocol of those who draft tokens, and what they are told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sequence import Sequence
from preempt_engine.step import SchedulerOutput, SequenceKey


@dataclass(slots=True, frozen=True)
class DraftRequest:
    """A sequence whose next tokens are wanted.

    Attributes:
        sequence: its tokens; all but the last are computed. Not to be changed.
        params, seed: how its tokens are sampled.
        limit: most drafts; 1 or more.
    """

    sequence: Sequence
    params: SamplingParams
    seed: int
    limit: int


class Proposer(Protocol):
    """Drafts tokens. What it proposes decides how fast an output comes, never what it is.

    Attributes:
        needs_blocks: a sequence needs blocks for its drafts before they are drafted.
    """

    needs_blocks: bool

    def propose(self, step: SchedulerOutput, wanted: Seq[DraftRequest]) -> list[list[int]]:
        """Called after every step, with drafts wanted or without.

        Args:
            step: what the target has computed; its tokens are applied.
            wanted: sequences of it.

        Returns:
            Drafts for each, at most its limit and perhaps none, in the order of `wanted`.
        """
        ...

    def known_keys(self) -> Iterable[SequenceKey]:
        """The sequences of which something is kept."""
        ...

    def reset(self) -> None:
        """Forget every sequence."""
        ...

    def close(self) -> None:
        """Release what is held; may be called twice."""
        ...


def is_kept(rate: float, seed: int, key: SequenceKey, position: int) -> bool:
    """A position's lot: whether its draft is left as it is, which it is with probability `rate`.

    Args:
        rate: in [0, 1].
        seed: of all lots.
        key: of the sequence.
        position: of the drafted token.
    """
    if rate in (0.0, 1.0):
        return rate == 1.0
    text = f"{seed}:{position}:{key}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"preempt-lot").digest()
    return int.from_bytes(digest, "little") < rate * 2**64


def changed(token_id: int, vocab_size: int) -> int:
    """Another token."""
    return (token_id + 1) % vocab_size
