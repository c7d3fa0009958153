"""How soon greedy output shows that KV slots were corrupted.

Corrupts the cache of one prompt, at many places, in all layers and heads, and counts the outputs
that changed. Exchanging whole slots within one sequence is no corruption: attention is a sum over
slots and cached keys carry their position, so it cannot be seen in any output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from preempt_harness.checkpoints.decoding import forward, greedy, new_cache

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

CorruptionKind = Literal["zeroed", "stale"]

SLOT_COUNTS = (1, 4, 16)
SOON_TOKENS = 8
LATER_TOKENS = 32


@dataclass(frozen=True)
class Corruption:
    """Share of outputs that a kind of corruption changed.

    Attributes:
        kind: "zeroed" keys and values, or "stale" ones: those of another prompt at the same
            positions, as in a block that was reused and not written again.
        slots: consecutive slots corrupted.
        trials: corrupted runs.
        changed_within_8: share of runs whose first 8 generated tokens differ.
        changed_within_32: the same for 32 tokens.
    """

    kind: CorruptionKind
    slots: int
    trials: int
    changed_within_8: float
    changed_within_32: float


@dataclass(frozen=True)
class _Case:
    kind: CorruptionKind
    slots: int
    start: int


def measure_corruption(
    model: PreTrainedModel, prompts: Sequence[tuple[Tensor, Tensor]], starts_per_prompt: int
) -> tuple[Corruption, ...]:
    """Corrupt evenly spread places of each prompt's cache and decode on.

    Args:
        model: a causal language model.
        prompts: pairs of token ids [tokens]; the second, no shorter, gives the stale slots.
        starts_per_prompt: places per prompt, kind and number of slots.

    Returns:
        One result for each kind and each of `SLOT_COUNTS`, over all prompts.
    """
    changed: dict[tuple[CorruptionKind, int], list[int]] = {}
    for prompt, other in prompts:
        cases = [
            _Case(kind, slots, start)
            for kind in get_args(CorruptionKind)
            for slots in SLOT_COUNTS
            for start in _starts(len(prompt) - 1 - slots, starts_per_prompt)
        ]
        for case, first in zip(cases, _first_changes(model, prompt, other, cases), strict=True):
            changed.setdefault((case.kind, case.slots), []).append(first)
    return tuple(
        Corruption(
            kind=kind,
            slots=slots,
            trials=len(firsts),
            changed_within_8=_share(firsts, SOON_TOKENS),
            changed_within_32=_share(firsts, LATER_TOKENS),
        )
        for (kind, slots), firsts in changed.items()
    )


def _starts(last: int, count: int) -> list[int]:
    """`count` integers spread evenly over [0, last]."""
    return [round(index * last / (count - 1)) for index in range(count)]


def _share(first_changes: list[int], num_tokens: int) -> float:
    return sum(first < num_tokens for first in first_changes) / len(first_changes)


def _first_changes(
    model: PreTrainedModel, prompt: Tensor, other: Tensor, cases: list[_Case]
) -> list[int]:
    """Index of the first generated token that differs, per case; `LATER_TOKENS` if none does."""
    import torch

    cache, stale = new_cache(model), new_cache(model)
    forward(model, prompt[None, :-1], cache)
    forward(model, other[None, : len(prompt) - 1], stale)
    # Row 0 stays clean: the corrupted rows are compared with a row of the same batch.
    cache.batch_repeat_interleave(1 + len(cases))
    for row, case in enumerate(cases, start=1):
        _corrupt(cache, stale, row, case)
    last = prompt[None, -1:].expand(1 + len(cases), 1)
    ids, _ = greedy(model, last, LATER_TOKENS, cache)
    differs = ids[1:] != ids[:1]  # [cases, LATER_TOKENS]
    never = torch.full((len(cases), 1), True)
    return torch.cat([differs, never], dim=1).int().argmax(dim=1).tolist()


def _corrupt(cache: DynamicCache, stale: DynamicCache, row: int, case: _Case) -> None:
    slots = slice(case.start, case.start + case.slots)
    for layer, stale_layer in zip(cache.layers, stale.layers, strict=True):
        for tensor, source in (
            (layer.keys, stale_layer.keys),
            (layer.values, stale_layer.values),
        ):  # [batch, kv_heads, slots, head_dim]
            tensor[row, :, slots] = source[0, :, slots] if case.kind == "stale" else 0.0
