"""Chain values: what a KV slot holds, as one integer that depends on its whole history.

The content of a slot depends on every token before it, so a slot of position p carries
`h_p = H(h_{p-1}, token_p, p)`, started from a root that may depend on a salt (an adapter, a model).
Comparing token and position alone takes a block that was computed after another prefix for the
right one; comparing chain values does not.

H is CPython's hash of a tuple of three integers (the lanes of xxHash64): one call in C, 64 bits,
and independent of PYTHONHASHSEED, which concerns strings only. Chain values are compared within
one run and never stored. It is no cryptographic hash; nobody attacks the shadow memory.
"""

from __future__ import annotations

from collections.abc import Iterable

UNWRITTEN = 0
"""Value of a slot that was never written; no chain reaches it but by a 64-bit accident."""

POISONED = 1
"""Value of a slot that a worker overwrote with the poison pattern."""


def root(salt: int = 0) -> int:
    """Value before position 0."""
    return hash((0x6B765F726F6F74, salt))


def extend(previous: int, token_id: int, position: int) -> int:
    """Value at `position`, given the value before it."""
    return hash((previous, token_id, position))


def chain(token_ids: Iterable[int], salt: int = 0) -> list[int]:
    """Values of all positions of a sequence of its own, [num_tokens]."""
    return extend_by(root(salt), token_ids, 0)


def extend_by(previous: int, token_ids: Iterable[int], start: int) -> list[int]:
    """Values at `start` and the positions after it, given the value before them."""
    return [  # `extend`, without a call
        previous := hash((previous, token_id, position))
        for position, token_id in enumerate(token_ids, start)
    ]
