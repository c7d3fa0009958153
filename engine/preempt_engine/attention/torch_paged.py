"""Paged attention with torch's scaled dot product attention: the fast path of the torch backend.

Keys and values are gathered through the block tables into a padded batch. All decoding sequences
are one call; prefill chunks are one call each. Results depend on the batch in the last bits.
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
        self.scale = scale
        self.slot_mapping = metadata.slot_mapping
        self.groups = [_GatheredGroup(group) for group in split_into_groups(metadata)]

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        if len(self.groups) == 1 and self.groups[0].covers(query.shape[0]):
            return self.groups[0].attend(query, cache, window, self.scale)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # [T', H, D]
        for gathered in self.groups:
            queries = gathered.group.take(query)
            gathered.group.put(gathered.attend(queries, cache, window, self.scale), output)
        return output


class _GatheredGroup:
    """A group with its gathering index, and its masks as layers ask for them."""

    def __init__(self, group: QueryGroup) -> None:
        self.group = group
        self.block_ids = group.block_tables.reshape(-1)  # [N * B]
        self.masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def covers(self, num_tokens: int) -> bool:
        """True if the group is the whole step, in order."""
        return self.group.rows == slice(0, num_tokens)

    def attend(
        self, query: Tensor, cache: LayerKVCache, window: int | None, scale: float
    ) -> Tensor:
        """[N * L, H, D] -> [N * L, H, D]."""
        group = self.group
        if window is not None and window >= group.read_len_max:
            window = None
        keys = self._gather(cache.key_blocks)  # [N, H_kv, S, D]
        values = self._gather(cache.value_blocks)
        n, length = group.num_sequences, group.query_len
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = keys.shape[1]
        if length == 1:
            # The query heads of a KV head take the place of query positions.
            queries = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
            mask = self._mask(window, query.dtype)  # [N, 1, 1, S]
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scale
            )  # [N, H_kv, H / H_kv, D]
            return output.reshape(n, num_heads, head_dim)
        causal = group.causal_from_zero and window is None
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],  # [1, H, L, D]
            keys,
            values,
            attn_mask=None if causal else self._mask(window, query.dtype),  # [1, 1, L, S]
            is_causal=causal,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        return output[0].transpose(0, 1)

    def _gather(self, blocks: Tensor) -> Tensor:
        """[num_blocks, block_size, H_kv, D] -> [N, H_kv, S, D], S the longest read."""
        gathered = blocks.index_select(0, self.block_ids)
        gathered = gathered.view(self.group.num_sequences, -1, *blocks.shape[2:])
        return gathered[:, : self.group.read_len_max].transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Added to the scores: 0 where visible, -inf elsewhere; [N, 1, L, S]."""
        mask = self.masks.get((window, dtype))
        if mask is None:
            positions = self.group.positions[:, None, :, None]  # [N, 1, L, 1]
            keys = torch.arange(self.group.read_len_max, device=positions.device)
            seen = visible(positions, keys, window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[window, dtype] = mask.masked_fill_(~seen, float("-inf"))
        return mask
