"""OPT (Zhang et al., 2022): LayerNorm before each half, learned positions, a plain feed-forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from preempt_engine.attention.protocol import AttentionPlan, LayerKVCache
from preempt_engine.layers.activation import PlainActivation, select_activation
from preempt_engine.layers.destination import Destination
from preempt_engine.layers.embedding import Embedding
from preempt_engine.layers.norm import LayerNorm
from preempt_engine.layers.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from preempt_engine.models.sharding import ModelShard

# The checkpoints keep two unused rows before position 0, a leftover of fairseq's padding index.
_POSITION_OFFSET = 2


class OPTForCausalLM(nn.Module):
    """The variant that all sizes but 350m use.

    Args:
        shard: this rank's part of the model.
        parallel: the ranks.
        max_model_len: positions [0, max_model_len) will be used.
        dtype: of the weights.
        device: of the weights.
        deterministic: use layers whose elements do not depend on their neighbours.
    """

    def __init__(
        self,
        shard: ModelShard,
        parallel: TensorParallel,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        super().__init__()
        config = shard.whole
        assert max_model_len <= config.max_position_embeddings, (max_model_len, config)
        self.embed_tokens = VocabParallelEmbedding(
            shard.vocab, config.hidden_size, parallel=parallel, dtype=dtype, device=device
        )
        self.embed_positions = Embedding(
            config.max_position_embeddings + _POSITION_OFFSET,
            config.hidden_size,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(
            _DecoderLayer(shard, parallel, dtype, device, deterministic)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.lm_head = VocabParallelHead(
            config.hidden_size, shard.vocab, parallel=parallel, dtype=dtype, device=device
        )
        self.tied = config.tie_word_embeddings
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        attention: AttentionPlan,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        hidden = self.embed_tokens(input_ids)  # [T, hidden]
        hidden = hidden + self.embed_positions(positions + _POSITION_OFFSET)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, cache, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] on rank 0, [0, vocab] on other ranks."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Destinations by Hugging Face's names."""
        prefix = "model.decoder"
        tensors = self.embed_tokens.checkpoint_tensors(f"{prefix}.embed_tokens")
        tensors |= self.embed_positions.checkpoint_tensors(f"{prefix}.embed_positions")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _DecoderLayer)
            tensors |= layer.checkpoint_tensors(f"{prefix}.layers.{index}")
        tensors |= self.norm.checkpoint_tensors(f"{prefix}.final_layer_norm")
        if not self.tied:
            tensors |= self.lm_head.checkpoint_tensors("lm_head")
        return tensors


class _DecoderLayer(nn.Module):
    def __init__(
        self,
        shard: ModelShard,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        super().__init__()
        config, hidden, inner = shard.local, shard.local.hidden_size, shard.inner
        self.heads_shape = (3 * config.num_attention_heads, config.head_dim)
        self.attention_norm = LayerNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.qkv = ColumnParallelLinear(
            hidden, (shard.query,) * 3, bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.output = RowParallelLinear(
            shard.query,
            hidden,
            bias=config.output_bias,
            parallel=parallel,
            dtype=dtype,
            device=device,
        )
        self.final_norm = LayerNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.up = ColumnParallelLinear(
            hidden, (inner,), bias=config.mlp_bias, dtype=dtype, device=device
        )
        activation = select_activation(config.hidden_act, deterministic=deterministic)
        self.activation = PlainActivation(activation, inner.size)
        self.down = RowParallelLinear(
            inner, hidden, bias=config.mlp_bias, parallel=parallel, dtype=dtype, device=device
        )

    def forward(self, hidden: Tensor, cache: LayerKVCache, attention: AttentionPlan) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        num_tokens = hidden.shape[0]
        qkv = self.qkv(self.attention_norm(hidden)).view(num_tokens, *self.heads_shape)
        query, key, value = qkv.chunk(3, dim=1)  # 3 x [T, H, D]
        attention.write_kv(cache, key, value)
        attended = attention.attend(query, cache, None)  # [T, H, D]
        hidden = hidden + self.output(attended.reshape(num_tokens, -1))
        inner = self.activation(self.up(self.final_norm(hidden)))  # [T, inner]
        output: Tensor = hidden + self.down(inner)
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, Destination]:
        attention = f"{prefix}.self_attn"
        return (
            self.attention_norm.checkpoint_tensors(f"{attention}_layer_norm")
            | self.qkv.checkpoint_tensors(
                f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"
            )
            | self.output.checkpoint_tensors(f"{attention}.out_proj")
            | self.final_norm.checkpoint_tensors(f"{prefix}.final_layer_norm")
            | self.up.checkpoint_tensors(f"{prefix}.fc1")
            | self.down.checkpoint_tensors(f"{prefix}.fc2")
        )
