"""Paged attention on torch's operators: the fast path of the torch backend.

Sequences with equally many queries are one call. Decode gathers the keys through the block tables,
and adds up the values where they lie: each is a row of a table, and a query's output is a weighted
bag of rows. Chunks use torch's scaled dot product attention. Results depend on the batch in the
last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from preempt_engine.attention.paged import (
    GroupReads,
    QueryGroup,
    hide,
    split_into_groups,
    write_kv,
)
from preempt_engine.attention.protocol import AttentionMetadata, AttentionPlan, LayerKVCache


class TorchPagedAttention:
    """The backend "torch" without `deterministic`.

    Args:
        scale: factor of the scores, usually head_dim ** -0.5.
    """

    name = "torch"

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        return _TorchPagedPlan(metadata, self.scale)


class _TorchPagedPlan:
    def __init__(self, metadata: AttentionMetadata, scale: float) -> None:
        self.slot_mapping = metadata.slot_mapping
        self.groups = [
            _PagedGroup(group, metadata.block_size, scale) for group in split_into_groups(metadata)
        ]

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        if len(self.groups) == 1 and self.groups[0].group.covers(query.shape[0]):
            return self.groups[0].attend(query, cache, window)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # [T', H, D]
        for paged in self.groups:
            attended = paged.attend(paged.group.take(query), cache, window)
            paged.group.put(attended, output)
        return output


class _PagedGroup:
    """A group with what it reads, and its masks as layers ask for them.

    Shapes: N sequences, L queries each, S the longest read, H_kv KV heads, G query heads per KV
    head. Scores are float32 for every dtype.
    """

    def __init__(self, group: QueryGroup, block_size: int, scale: float) -> None:
        self.group = group
        self.scale = scale
        self.reads = GroupReads(group, group.read_len_max, block_size)
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N * L, H, D] -> [N * L, H, D]."""
        if window is not None and window >= self.group.read_len_max:
            window = None
        if self.group.query_len == 1:
            return self._decode(query, cache, window)
        return self._attend_chunks(query, cache, window)

    def _decode(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N, H, D] -> [N, H, D]."""
        keys = self.reads.gather(cache.key_slots).float()  # [N, H_kv, S, D]
        n, num_kv_heads, _, head_dim = keys.shape
        # The query heads of a KV head take the place of query positions.
        queries = query.float().reshape(n * num_kv_heads, -1, head_dim)  # [N * H_kv, G, D]
        mask = self._mask(window, keys.dtype, num_kv_heads)  # [N, H_kv, 1, S]
        scores = torch.baddbmm(
            mask.flatten(0, 1), queries, keys.flatten(0, 1).mT, alpha=self.scale
        )  # [N * H_kv, G, S]
        weights = scores.softmax(-1).to(query.dtype).view(n, num_kv_heads, *scores.shape[1:])
        return self.reads.weighted_sum(weights, cache.value_slots).view(query.shape)

    def _attend_chunks(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N * L, H, D] -> [N * L, H, D]."""
        queries = query.view(self.group.num_sequences, -1, *query.shape[1:])  # [N, L, H, D]
        keys = self.reads.gather(cache.key_slots)  # [N, H_kv, S, D]
        causal = self.group.causal_from_zero and window is None
        output = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            self.reads.gather(cache.value_slots),
            attn_mask=None if causal else self._mask(window, query.dtype),
            is_causal=causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )  # [N, H, L, D]
        return output.transpose(1, 2).reshape(query.shape)

    def _mask(self, window: int | None, dtype: torch.dtype, num_heads: int = 1) -> Tensor:
        """See `hide`; [N, num_heads, L, S]."""
        mask = self.masks.get((window, dtype))
        if mask is None:
            group = self.group
            mask = hide(group.positions, group.read_len_max, window, dtype)
            mask = self.masks[window, dtype] = mask.repeat(1, num_heads, 1, 1)
        return mask
