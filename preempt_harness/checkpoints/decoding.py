"""Greedy decoding with transformers, one step at a time over a cache that the caller may change.

Knows nothing of what is measured with it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty KV cache for this model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def forward(model: PreTrainedModel, token_ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Logits [batch, tokens, vocab] in float32; `cache`, if given, is read and extended in place.

    Args:
        model: a causal language model.
        token_ids: [batch, tokens], all rows of the same length.
        cache: keys and values of the tokens before these.
    """
    arguments: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        arguments[_cache_argument(model)] = cache
    logits: Tensor = model(input_ids=token_ids, **arguments).logits
    return logits.float()


def greedy(
    model: PreTrainedModel, token_ids: Tensor, num_tokens: int, cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Extend every row by `num_tokens` tokens, each the argmax.

    Args:
        model: a causal language model.
        token_ids: [batch, tokens], what the cache does not hold yet; at least one token.
        num_tokens: to generate.
        cache: keys and values of the tokens before these; extended in place.

    Returns:
        Generated ids [batch, num_tokens] and the logits they were chosen from
        [batch, num_tokens, vocab].
    """
    import torch

    ids, logits = [], []
    step_ids = token_ids
    for _ in range(num_tokens):
        step_logits = forward(model, step_ids, cache)[:, -1]  # [batch, vocab]
        step_ids = step_logits.argmax(dim=-1, keepdim=True)  # [batch, 1]
        ids.append(step_ids)
        logits.append(step_logits)
    return torch.cat(ids, dim=1), torch.stack(logits, dim=1)


def _cache_argument(model: PreTrainedModel) -> str:
    """`cache`, or `past_key_values` before transformers renamed it."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
