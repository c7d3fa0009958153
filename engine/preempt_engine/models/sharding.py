"""How a model is divided over tensor-parallel ranks, or why it cannot be.

Heads and the feed-forward layer must come out even; the vocabulary need not. Key and value heads
that are fewer than the ranks are held by several of them. No torch: the driver asks as well.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from preempt_engine.errors import ConfigError
from preempt_engine.layers.shard import Shard
from preempt_engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part of a model.

    Attributes:
        whole: the model.
        local: the same with the number of heads and the feed-forward width of this rank; what
            computes locally, such as attention and its KV cache, needs nothing else.
        query: query features of this rank.
        key_value: key features, and value features, of this rank.
        inner: feed-forward features of this rank.
        vocab: token ids of this rank.
    """

    whole: ModelConfig
    local: ModelConfig
    query: Shard
    key_value: Shard
    inner: Shard
    vocab: Shard

    @classmethod
    def of(cls, model: ModelConfig, rank: int, size: int) -> ModelShard:
        """The part of one of `size` ranks.

        Raises:
            ConfigError: the model cannot be divided so; names what does not come out even.
        """
        obstacle = _obstacle(model, size)
        if obstacle is not None:
            possible = [
                n for n in range(1, model.num_attention_heads + 1) if not _obstacle(model, n)
            ]
            raise ConfigError(
                f"tensor_parallel_size={size} cannot divide this {model.architecture}: {obstacle}.",
                f"Use one of: {', '.join(map(str, possible))}.",
            )
        query_heads = Shard.of(model.num_attention_heads, rank, size)
        group = model.num_attention_heads // model.num_key_value_heads
        first_kv = query_heads.start // group
        last_kv = (query_heads.stop - 1) // group
        kv_heads = Shard(first_kv, last_kv + 1, model.num_key_value_heads)
        inner = Shard.of(model.intermediate_size, rank, size)
        return cls(
            whole=model,
            local=dataclasses.replace(
                model,
                num_attention_heads=query_heads.size,
                num_key_value_heads=kv_heads.size,
                intermediate_size=inner.size,
            ),
            query=query_heads.times(model.head_dim),
            key_value=kv_heads.times(model.head_dim),
            inner=inner,
            vocab=Shard.of(model.vocab_size, rank, size),
        )


def _obstacle(model: ModelConfig, size: int) -> str | None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % size:
        return f"num_attention_heads={heads} is no multiple of {size}"
    if kv_heads % size and size % kv_heads:
        return f"num_key_value_heads={kv_heads} is neither a multiple nor a divisor of {size}"
    if model.intermediate_size % size:
        return f"intermediate_size={model.intermediate_size} is no multiple of {size}"
    if model.vocab_size < size:
        return f"vocab_size={model.vocab_size} is less than {size}"
    return None
