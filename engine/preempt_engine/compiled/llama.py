"""The Llama family on a CPU: matrix products by torch, everything between them by compiled loops.

A layer is four products and six loops. What the loops write is the same memory in every layer of a
step, seen as tensors by the products; so hardly anything is left that Python does per layer, which
on small models takes as long as the products themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from preempt_engine.attention.compiled_paged import CompiledPlan, one_token_step
from preempt_engine.attention.protocol import AttentionPlan, LayerKVCache
from preempt_engine.compiled.attention import store
from preempt_engine.compiled.layers import (
    add_and_normalise,
    normalise_heads,
    rotate,
    silu_and_multiply,
)
from preempt_engine.compiled.numbers import Array, as_array
from preempt_engine.layers.activation import invariant_silu
from preempt_engine.layers.norm import RMSNorm
from preempt_engine.models.llama import DecoderLayer, LlamaForCausalLM

_SILU = (F.silu, invariant_silu)


class CompiledLlama:
    """The forward pass of a loaded model; its weights stay the model's.

    Args:
        model: that `serves`, on a CPU.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._embed_tokens = model.embed_tokens
        self._rotary = model.rotary
        self._layers = [_Layer(layer) for layer in _decoder_layers(model)]
        self._norm = _Norm(model.norm)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile the loops, or load what was compiled before: not in the first step."""
        layer, dtype = self._layers[0], self._embed_tokens.weight.dtype
        memory = _Memory(torch.zeros(1, self._embed_tokens.weight.shape[1], dtype=dtype), layer)
        num_kv_heads = layer.num_qk_heads - layer.num_heads
        plan, cache = one_token_step(1.0, num_kv_heads, layer.head_dim, dtype)
        layer.input_norm.after(np.zeros_like(memory.hidden), memory)
        heads = torch.zeros(1, layer.num_qk_heads + num_kv_heads, layer.head_dim, dtype=dtype)
        factors = as_array(torch.zeros(1, layer.head_dim, dtype=dtype))
        layer.attend(as_array(heads), factors, factors, cache, plan, memory.attended)
        gate_up = torch.zeros(1, 2 * layer.inner, dtype=dtype)
        silu_and_multiply(as_array(gate_up), memory.activated)

    @staticmethod
    def serves(model: LlamaForCausalLM) -> bool:
        """True if the feed-forward layers are gated by SiLU."""
        return all(layer.activation.activation in _SILU for layer in _decoder_layers(model))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        attention: AttentionPlan,
    ) -> Tensor:
        """See `CausalLM.forward`; the plan is one of the backend "numba"."""
        assert isinstance(attention, CompiledPlan), attention
        embedded = self._embed_tokens(input_ids)  # [T, hidden], no view of the weights
        memory = _Memory(embedded, self._layers[0])
        cos, signed_sin = (as_array(factor[:, 0]) for factor in self._rotary(positions))
        update = np.zeros_like(memory.hidden)
        for layer, cache in zip(self._layers, kv_caches, strict=True):
            layer.input_norm.after(update, memory)
            qkv = as_array(layer.qkv(memory.normed_rows)).reshape(len(cos), -1, layer.head_dim)
            layer.attend(qkv, cos, signed_sin, cache, attention, memory.attended)
            layer.post_attention_norm.after(as_array(layer.output(memory.attended_rows)), memory)
            silu_and_multiply(as_array(layer.gate_up(memory.normed_rows)), memory.activated)
            update = as_array(layer.down(memory.activated_rows))
        self._norm.after(update, memory)
        return memory.normed_rows


def _decoder_layers(model: LlamaForCausalLM) -> list[DecoderLayer]:
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


class _Memory:
    """What a step's loops write; `*_rows` are the same memory as tensors of rows.

    Attributes:
        hidden: [T, hidden], the residual stream.
        normed: [T, hidden].
        attended: [T, H, D]; rows of padding stay 0.
        activated: [T, inner].
    """

    def __init__(self, embedded: Tensor, layer: _Layer) -> None:
        num_tokens, dtype = embedded.shape[0], embedded.dtype
        self.hidden = as_array(embedded)
        self.normed_rows = torch.empty_like(embedded)
        self.normed = as_array(self.normed_rows)
        width = layer.num_heads * layer.head_dim
        self.attended_rows = torch.zeros(num_tokens, width, dtype=dtype)
        self.attended = as_array(self.attended_rows).reshape(num_tokens, -1, layer.head_dim)
        self.activated_rows = torch.empty(num_tokens, layer.inner, dtype=dtype)
        self.activated = as_array(self.activated_rows)


class _Norm:
    def __init__(self, norm: RMSNorm) -> None:
        self.weight = as_array(norm.weight.data)
        self.eps = np.float32(norm.eps)

    def after(self, update: Array, memory: _Memory) -> None:
        """Add to the residual stream what the last product gave, and normalise."""
        add_and_normalise(memory.hidden, update, self.weight, self.eps, memory.normed)


class _Layer:
    """A layer's products, without the search for hooks of `nn.Module`, and its other weights."""

    def __init__(self, layer: DecoderLayer) -> None:
        attention = layer.attention
        self.qkv, self.output = attention.qkv.forward, attention.output.forward
        self.gate_up, self.down = layer.gate_up.forward, layer.down.forward
        self.input_norm = _Norm(layer.input_norm)
        self.post_attention_norm = _Norm(layer.post_attention_norm)
        self.query_norm, self.key_norm = (
            None if norm is None else _Norm(norm)
            for norm in (attention.query_norm, attention.key_norm)
        )
        self.window = attention.window
        self.head_dim = attention.head_dim
        self.num_heads, self.num_qk_heads = attention.num_heads, attention.num_qk_heads
        self.inner = layer.activation.size

    def attend(
        self,
        qkv: Array,
        cos: Array,
        signed_sin: Array,
        cache: LayerKVCache,
        attention: CompiledPlan,
        output: Array,
    ) -> None:
        """Queries, keys and values, [T, H + 2 * H_kv, D], which change -> [T, H, D]."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key, first = self.query_norm, self.key_norm, self.num_heads
            normalise_heads(qkv, 0, first, query.weight, query.eps)
            normalise_heads(qkv, first, self.num_qk_heads, key.weight, key.eps)
        rotate(qkv, self.num_qk_heads, cos, signed_sin)
        slots = attention.slots_of(cache)
        store(attention.slot_mapping, qkv, self.num_heads, *slots)
        attention.attend_slots(qkv, self.num_heads, slots, self.window, output)
