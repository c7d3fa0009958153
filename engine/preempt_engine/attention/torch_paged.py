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

from preempt_engine.attention.paged import QueryGroup, split_into_groups, visible, write_kv
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
        if len(self.groups) == 1 and self.groups[0].covers(query.shape[0]):
            return self.groups[0].attend(query, cache, window)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # [T', H, D]
        for paged in self.groups:
            attended = paged.attend(paged.group.take(query), cache, window)
            paged.group.put(attended, output)
        return output


class _PagedGroup:
    """A group with what it reads, and its masks as layers ask for them.

    Shapes: N sequences, L queries each, S the longest read, H_kv KV heads, G query heads per KV
    head. A *row* is one head of one slot: row = slot * H_kv + head.
    """

    def __init__(self, group: QueryGroup, block_size: int, scale: float) -> None:
        self.group = group
        self.scale = scale
        positions = torch.arange(group.read_len_max, device=group.positions.device)
        blocks = group.block_tables.index_select(1, positions // block_size).long()  # [N, S]
        self.slots = blocks * block_size + positions % block_size
        self.key_rows: Tensor | None = None  # [N * H_kv * S]
        self.value_rows: Tensor | None = None  # [N * H, S]
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def covers(self, num_tokens: int) -> bool:
        """True if the group is the whole step, in order."""
        return self.group.rows == slice(0, num_tokens)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N * L, H, D] -> [N * L, H, D]."""
        if window is not None and window >= self.group.read_len_max:
            window = None
        if self.group.query_len == 1:
            return self._decode(query, cache, window)
        return self._attend_chunks(query, cache, window)

    def _decode(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N, H, D] -> [N, H, D]."""
        num_heads, head_dim = query.shape[1:]
        key_rows, value_rows = self._rows(num_heads, cache)
        keys = cache.key_slots.view(-1, head_dim).index_select(0, key_rows)
        keys = keys.view(-1, self.group.read_len_max, head_dim)  # [N * H_kv, S, D]
        # The query heads of a KV head take the place of query positions.
        queries = query.reshape(keys.shape[0], -1, head_dim)  # [N * H_kv, G, D]
        scores = torch.bmm(queries * self.scale, keys.mT)  # [N * H_kv, G, S]
        mask = self._mask(window, query.dtype)  # [N, 1, 1, S]
        if mask is not None:
            scores.view(self.group.num_sequences, -1, *scores.shape[1:]).add_(mask)
        weights = scores.softmax(-1).view(value_rows.shape)  # [N * H, S]
        values = cache.value_slots.view(-1, head_dim)
        output = F.embedding_bag(value_rows, values, mode="sum", per_sample_weights=weights)
        return output.view(query.shape)

    def _attend_chunks(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N * L, H, D] -> [N * L, H, D]."""
        n, (num_heads, head_dim) = self.group.num_sequences, query.shape[1:]
        key_rows, _ = self._rows(num_heads, cache)
        causal = self.group.causal_from_zero and window is None

        def gather(slots: Tensor) -> Tensor:
            rows = slots.view(-1, head_dim).index_select(0, key_rows)
            return rows.view(n, -1, self.group.read_len_max, head_dim)  # [N, H_kv, S, D]

        keys = gather(cache.key_slots)
        output = F.scaled_dot_product_attention(
            query.view(n, -1, num_heads, head_dim).transpose(1, 2),  # [N, H, L, D]
            keys,
            gather(cache.value_slots),
            attn_mask=None if causal else self._mask(window, query.dtype),  # [N, 1, L, S]
            is_causal=causal,
            scale=self.scale,
            enable_gqa=num_heads != keys.shape[1],
        )
        return output.transpose(1, 2).reshape(query.shape)

    def _rows(self, num_heads: int, cache: LayerKVCache) -> tuple[Tensor, Tensor]:
        """Rows of keys by KV head, [N * H_kv * S], and of values by query head, [N * H, S]."""
        if self.key_rows is None or self.value_rows is None:
            num_kv_heads = cache.key_slots.shape[1]
            heads = torch.arange(num_kv_heads, device=self.slots.device)
            rows = self.slots[:, None] * num_kv_heads + heads[:, None]  # [N, H_kv, S]
            groups = num_heads // num_kv_heads
            self.key_rows = rows.reshape(-1)
            self.value_rows = rows.repeat_interleave(groups, dim=1).flatten(0, 1)
        return self.key_rows, self.value_rows

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Added to the scores: 0 where visible, -inf elsewhere; [N, 1, L, S]. None if all is."""
        group = self.group
        if group.query_len == 1 and group.read_len_min == group.read_len_max and window is None:
            return None
        mask = self.masks.get((window, dtype))
        if mask is None:
            positions = group.positions[:, None, :, None]  # [N, 1, L, 1]
            keys = torch.arange(group.read_len_max, device=positions.device)
            seen = visible(positions, keys, window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[window, dtype] = mask.masked_fill_(~seen, float("-inf"))
        return mask
