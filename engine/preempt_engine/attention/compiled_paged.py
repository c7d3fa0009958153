"""Paged attention in loops compiled for a CPU: the backend "numba".

A query reads its keys and values where they lie, so nothing is gathered, padded or masked. Its bits
depend on its own history only; `deterministic` needs nothing more. Without it, chunks so long that
matrix products pay off are left to torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.paged import split_into_groups
from preempt_engine.attention.protocol import AttentionMetadata, AttentionPlan, LayerKVCache
from preempt_engine.attention.torch_paged import PagedGroup
from preempt_engine.compiled.attention import attention_loop, find_slots, store
from preempt_engine.compiled.numbers import Array, as_array

# Queries of a sequence from which on matrix products are quicker.
_LONG_CHUNK = 64


class CompiledAttention:
    """The backend "numba".

    Args:
        scale: factor of the scores, usually head_dim ** -0.5.
        exact: never leave a chunk to torch, so that bits do not depend on how tokens are cut.
    """

    name = "numba"

    def __init__(self, scale: float, *, exact: bool) -> None:
        self.scale = scale
        self.exact = exact
        self._arrays: dict[LayerKVCache, _Slots] = {}

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        return _CompiledPlan(self, metadata, None if self.exact else _LONG_CHUNK)

    def slots_of(self, cache: LayerKVCache) -> _Slots:
        """The arrays of a layer's memory, which is the same in every step."""
        slots = self._arrays.get(cache)
        if slots is None:
            arrays = as_array(cache.key_slots), as_array(cache.value_slots)
            slots = self._arrays[cache] = _Slots(*arrays)
        return slots


class _Slots(NamedTuple):
    """Of a layer, [num_slots, H_kv, D] each."""

    key: Array
    value: Array


class _CompiledPlan:
    """Shapes as in `AttentionPlan`; M queries are served by loops, K is their longest read."""

    def __init__(
        self, backend: CompiledAttention, metadata: AttentionMetadata, long_chunk: int | None
    ) -> None:
        self.backend = backend
        self.scale = np.float32(backend.scale)
        self.slot_mapping = as_array(metadata.slot_mapping)  # [T]
        query_lens, read_lens = np.array(metadata.query_lens), np.array(metadata.read_lens)
        sequences = np.repeat(np.arange(len(query_lens)), query_lens)  # [T]
        tokens = np.arange(len(sequences))
        ends = tokens + (read_lens - np.array(metadata.query_start[1:]))[sequences] + 1  # [T]
        self.long_chunks: list[PagedGroup] = []
        if long_chunk is not None and max(metadata.query_lens) >= long_chunk:
            served = (query_lens < long_chunk)[sequences]
            tokens, sequences, ends = tokens[served], sequences[served], ends[served]
            self.long_chunks = [
                PagedGroup(group, metadata.block_size, backend.scale)
                for group in split_into_groups(metadata, long_chunk)
            ]
        self.tokens, self.sequences, self.ends = tokens, sequences, ends  # [M] each
        self.slots = np.empty((len(read_lens), ends.max(initial=0)), np.int64)  # [N, K]
        find_slots(as_array(metadata.block_tables), metadata.block_size, self.slots)
        used = (self.slots, self.slot_mapping)
        self.lowest_slot = min(slots.min(initial=0) for slots in used)
        self.highest_slot = max(slots.max(initial=0) for slots in used)

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        slots = self.backend.slots_of(cache)
        self._check(slots)
        store(self.slot_mapping, as_array(key), as_array(value), *slots)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        slots = self.backend.slots_of(cache)
        self._check(slots)
        num_tokens, num_heads, head_dim = query.shape
        query = query.contiguous()
        # Rows of padding are to be finite.
        make = torch.empty if num_tokens == self.slot_mapping.shape[0] else torch.zeros
        output = make(query.shape, dtype=query.dtype)
        attention_loop(head_dim, num_heads // slots.key.shape[1])(
            as_array(query),
            *slots,
            self.slots,
            self.tokens,
            self.sequences,
            self.ends,
            self.slots.shape[1] if window is None else window,
            self.scale,
            as_array(output),
        )
        for chunk in self.long_chunks:
            chunk.group.put(chunk.attend(chunk.group.take(query), cache, window), output)
        return output

    def _check(self, slots: _Slots) -> None:
        """Loops do not look where they read; a wrong block table must not become a wild read."""
        num_slots = slots.key.shape[0]
        if self.lowest_slot < 0 or self.highest_slot >= num_slots:
            raise IndexError(
                f"A block table leads to slots {self.lowest_slot} to {self.highest_slot}; "
                f"the memory has {num_slots}."
            )
