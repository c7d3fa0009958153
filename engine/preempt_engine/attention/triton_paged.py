"""Paged attention and the KV write as Triton kernels: the backend "triton".

The same few programs serve decode, chunks and prefill, and always add up in the same order, so
results do not depend on the batch: this backend needs no variant for `deterministic`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.protocol import (
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
    LayerKVCache,
)
from preempt_engine.attention.transfer import to_device
from preempt_engine.kernels.attention import AttentionWork, attend, cut_work, write_kv


class TritonAttention:
    """The backend "triton".

    Args:
        scale: factor of the scores, usually head_dim ** -0.5.
        group: query heads per KV head.
    """

    name = "triton"

    def __init__(self, scale: float, group: int) -> None:
        self.scale = scale
        self.group = group

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        device = metadata.slot_mapping.device
        items, row_tiles = cut_work(metadata.query_lens, metadata.read_lens, self.group)
        work = AttentionWork(
            query_start=to_device(np.array(metadata.query_start, dtype=np.int32), device),
            read_lens=to_device(np.array(metadata.read_lens, dtype=np.int32), device),
            block_tables=metadata.block_tables,
            items=to_device(items, device),
            row_tiles=to_device(row_tiles, device),
            block_size=metadata.block_size,
        )
        return _TritonPlan(metadata.slot_mapping, work, self.scale)

    def plan_decode(self, buffers: DecodeBuffers) -> AttentionPlan:
        """As `GraphAttention.plan_decode`: programs for the longest read, which leave early."""
        num_sequences, num_blocks = buffers.block_tables.shape
        device = buffers.slot_mapping.device
        longest = num_blocks * buffers.block_size
        items, row_tiles = cut_work([1] * num_sequences, [longest] * num_sequences, self.group)
        work = AttentionWork(
            query_start=torch.arange(num_sequences + 1, dtype=torch.int32, device=device),
            read_lens=buffers.read_lens,
            block_tables=buffers.block_tables,
            items=to_device(items, device),
            row_tiles=to_device(row_tiles, device),
            block_size=buffers.block_size,
        )
        return _TritonPlan(buffers.slot_mapping, work, self.scale)


class _TritonPlan:
    def __init__(self, slot_mapping: Tensor, work: AttentionWork, scale: float) -> None:
        self.slot_mapping = slot_mapping
        self.work = work
        self.scale = scale

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        return attend(query, cache, self.work, scale=self.scale, window=window)
