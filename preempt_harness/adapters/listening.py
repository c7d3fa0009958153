"""What adapters that watch an engine from inside share. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def wrap(owner: Any, name: str, listener: Callable[..., Any]) -> None:
    """Put a listener around a method of one object.

    Args:
        owner: the object; others of its class are left alone.
        name: of the method.
        listener: called with the original method and its arguments; what it returns is returned.
    """
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: listener(original, *args, **kwargs))


def common_length(before: Sequence[int], after: Sequence[int]) -> int:
    """How many leading entries two block tables share; one comparison where a table has grown."""
    if after[: len(before)] == before:
        return len(before)
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            return index
    return min(len(before), len(after))


def phase_of(
    *,
    is_return: bool,
    num_steps: int,
    num_chunks: int,
    num_left: int,
    token_budget: int,
    num_outputs: int,
) -> str:
    """Where in its life a request is preempted; one of `record.PHASES`.

    Args:
        is_return: it was preempted before.
        num_steps: steps since it was admitted.
        num_chunks: steps that computed a part of the present prefill.
        num_left: tokens of that prefill that are not computed.
        token_budget: most tokens of a step.
        num_outputs: output tokens that are known.
    """
    if is_return and num_steps <= 1:
        return "just_resumed"
    if num_left > token_budget:
        return "prefill_first" if num_chunks <= 1 else "prefill_middle"
    if num_left > 0:
        return "prefill_last"
    return "first_decode" if num_outputs <= 1 else "decode"
