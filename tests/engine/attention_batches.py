"""Batches of paged sequences for tests of attention kernels, with dense attention as the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from preempt_engine.attention.protocol import AttentionMetadata, LayerKVCache
from preempt_engine.worker.kv_cache import POISON


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of one layer."""

    query: int
    kv: int
    dim: int

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclasses.dataclass
class Batch:
    """Sequences in a poisoned pool, each with a chunk [start, end) to compute."""

    cache: LayerKVCache
    metadata: AttentionMetadata
    query: Tensor  # [T, H, D]
    key: Tensor
    value: Tensor
    expected: Tensor  # float32 [T, H, D]


@dataclasses.dataclass(frozen=True)
class PagedSequence:
    """Queries, keys and values of every position of one sequence."""

    query: Tensor
    key: Tensor
    value: Tensor


def random_sequence(length: int, heads: Heads, seed: int) -> PagedSequence:
    """Normal numbers, float32."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(length, heads.query, heads.dim, generator=generator)
    key, value = (torch.randn(length, heads.kv, heads.dim, generator=generator) for _ in range(2))
    return PagedSequence(query, key, value)


def lay_out(
    sequences: Sequence[PagedSequence],
    chunks: Sequence[tuple[int, int]],
    block_size: int,
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    seed: int = 0,
) -> Batch:
    """Put the sequences into scattered blocks; positions before each chunk are stored."""
    device = device or torch.device("cpu")
    counts = [-(-end // block_size) for _, end in chunks]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    heads = sequences[0].key.shape[1:]
    pool = torch.full((2, num_blocks, block_size, *heads), POISON, dtype=dtype)
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int32)
    query_start, slots, parts = [0], [], []
    cache = LayerKVCache(pool[0], pool[1])
    taken = 0
    for i, (sequence, (start, end)) in enumerate(zip(sequences, chunks, strict=True)):
        tables[i, : counts[i]] = order[taken : taken + counts[i]].int()
        taken += counts[i]
        positions = torch.arange(end)
        where = tables[i, positions // block_size].long() * block_size + positions % block_size
        query, key, value = (
            tensor[:end].to(dtype) for tensor in (sequence.query, sequence.key, sequence.value)
        )
        cache.key_slots[where[:start]] = key[:start]
        cache.value_slots[where[:start]] = value[:start]
        slots.append(where[start:])
        query_start.append(query_start[-1] + end - start)
        output = dense_attention(query[start:], key, value, window)
        parts.append((query[start:], key[start:], value[start:], output))
    query, key, value, expected = (
        torch.cat(column).to(device) for column in zip(*parts, strict=True)
    )
    pool = pool.to(device)
    metadata = AttentionMetadata(
        query_start,
        [end for _, end in chunks],
        torch.cat(slots).to(device),
        tables.to(device),
        block_size,
    )
    return Batch(LayerKVCache(pool[0], pool[1]), metadata, query, key, value, expected)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention of the last queries of one sequence, in float64, rounded to float32.

    Args:
        query: [L, H, D], of the last L positions.
        key: [S, H_kv, D].
        value: [S, H_kv, D].
        window: as in `AttentionPlan.attend`.
    """
    length, num_heads, head_dim = query.shape
    read_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    keys = key.double().repeat_interleave(group, dim=1)  # [S, H, D]
    values = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("lhd,shd->hls", query.double(), keys) * head_dim**-0.5
    at = torch.arange(read_len)
    positions = at[read_len - length :, None]  # [L, 1]
    seen = at <= positions
    if window is not None:
        seen &= at > positions - window
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("hls,shd->lhd", weights, values).float()
