"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3, told apart by configuration only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from preempt_engine.attention.protocol import AttentionPlan, LayerKVCache
from preempt_engine.layers.activation import GatedActivation, select_activation
from preempt_engine.layers.destination import Destination
from preempt_engine.layers.norm import RMSNorm
from preempt_engine.layers.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from preempt_engine.layers.rotary import RotaryEmbedding, rotate
from preempt_engine.models.sharding import ModelShard


class LlamaForCausalLM(nn.Module):
    """A decoder with RMSNorm, rotary positions, grouped queries and a gated feed-forward layer.

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
        assert config.rope is not None, config
        self.embed_tokens = VocabParallelEmbedding(
            shard.vocab, config.hidden_size, parallel=parallel, dtype=dtype, device=device
        )
        self.rotary = RotaryEmbedding(
            config.head_dim, max_model_len, config.rope, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(shard, parallel, window, dtype, device, deterministic)
            for window in config.layer_windows
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
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
        cos, sin = self.rotary(positions)  # [T, 1, D]
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, cos, sin, cache, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] on rank 0, [0, vocab] on other ranks."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Destinations by Hugging Face's names."""
        tensors = self.embed_tokens.checkpoint_tensors("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            tensors |= layer.checkpoint_tensors(f"model.layers.{index}")
        tensors |= self.norm.checkpoint_tensors("model.norm")
        if not self.tied:
            tensors |= self.lm_head.checkpoint_tensors("lm_head")
        return tensors


class DecoderLayer(nn.Module):
    """One block of the decoder. Arguments as of the model, but for its sliding window."""

    def __init__(
        self,
        shard: ModelShard,
        parallel: TensorParallel,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        super().__init__()
        config, hidden, inner = shard.local, shard.local.hidden_size, shard.inner
        self.input_norm = RMSNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(shard, parallel, window, dtype, device)
        self.post_attention_norm = RMSNorm(hidden, config.norm_eps, dtype=dtype, device=device)
        self.gate_up = ColumnParallelLinear(
            hidden, (inner, inner), bias=config.mlp_bias, dtype=dtype, device=device
        )
        activation = select_activation(config.hidden_act, deterministic=deterministic)
        self.activation = GatedActivation(activation, inner.size)
        self.down = RowParallelLinear(
            inner, hidden, bias=config.mlp_bias, parallel=parallel, dtype=dtype, device=device
        )

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerKVCache,
        attention: AttentionPlan,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        hidden = hidden + self.attention(self.input_norm(hidden), cos, sin, cache, attention)
        gate_up = self.gate_up(self.post_attention_norm(hidden))  # [T, 2 * inner]
        output: Tensor = hidden + self.down(self.activation(gate_up))
        return output

    def checkpoint_tensors(self, prefix: str) -> dict[str, Destination]:
        return (
            self.input_norm.checkpoint_tensors(f"{prefix}.input_layernorm")
            | self.attention.checkpoint_tensors(f"{prefix}.self_attn")
            | self.post_attention_norm.checkpoint_tensors(f"{prefix}.post_attention_layernorm")
            | self.gate_up.checkpoint_tensors(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
            | self.down.checkpoint_tensors(f"{prefix}.mlp.down_proj")
        )


class Attention(nn.Module):
    """Grouped queries with rotary positions. Arguments as of `DecoderLayer`."""

    def __init__(
        self,
        shard: ModelShard,
        parallel: TensorParallel,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        config = shard.local
        self.window = window
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_qk_heads = config.num_attention_heads + config.num_key_value_heads
        self.num_qkv_heads = self.num_qk_heads + config.num_key_value_heads
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (shard.query, shard.key_value, shard.key_value),
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallelLinear(
            shard.query,
            config.hidden_size,
            bias=config.output_bias,
            parallel=parallel,
            dtype=dtype,
            device=device,
        )
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype, device=device)
            self.key_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype, device=device)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerKVCache,
        attention: AttentionPlan,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        num_tokens = hidden.shape[0]
        qkv = self.qkv(hidden).view(num_tokens, self.num_qkv_heads, self.head_dim)
        query_key = qkv[:, : self.num_qk_heads]  # [T, H + H_kv, D]
        if self.query_norm is not None and self.key_norm is not None:
            query = self.query_norm(query_key[:, : self.num_heads])
            key = self.key_norm(query_key[:, self.num_heads :])
            query_key = torch.cat((query, key), dim=1)
        query_key = rotate(query_key, cos, sin)
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        attention.write_kv(cache, key, qkv[:, self.num_qk_heads :])
        attended = attention.attend(query, cache, self.window)  # [T, H, D]
        projected: Tensor = self.output(attended.reshape(num_tokens, -1))
        return projected

    def checkpoint_tensors(self, prefix: str) -> dict[str, Destination]:
        tensors = self.qkv.checkpoint_tensors(
            f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"
        )
        tensors |= self.output.checkpoint_tensors(f"{prefix}.o_proj")
        if self.query_norm is not None and self.key_norm is not None:
            tensors |= self.query_norm.checkpoint_tensors(f"{prefix}.q_norm")
            tensors |= self.key_norm.checkpoint_tensors(f"{prefix}.k_norm")
        return tensors
