"""What both torch backends share: splitting a step into groups, and storing keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.protocol import AttentionMetadata, LayerKVCache
from preempt_engine.attention.transfer import to_device


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Sequences with equally many queries, attended to together.

    Attributes:
        rows: the group's N * L tokens among the step's: a slice, or int64 indices.
        num_sequences: N.
        query_len: L.
        positions: int64 [N, L], position of each query.
        block_tables: int32 [N, B].
        read_len_max: longest read of the group.
        causal_from_zero: one sequence whose queries are all positions that it reads.
    """

    rows: slice | Tensor
    num_sequences: int
    query_len: int
    positions: Tensor
    block_tables: Tensor
    read_len_max: int
    causal_from_zero: bool

    def take(self, tokens: Tensor) -> Tensor:
        """The group's rows of [T', ...] -> [N * L, ...]."""
        if isinstance(self.rows, slice):
            return tokens[self.rows]
        return tokens.index_select(0, self.rows)

    def put(self, values: Tensor, tokens: Tensor) -> None:
        """Store [N * L, ...] as the group's rows of [T', ...]."""
        if isinstance(self.rows, slice):
            tokens[self.rows] = values
        else:
            tokens.index_copy_(0, self.rows, values)


def split_into_groups(metadata: AttentionMetadata) -> list[QueryGroup]:
    """One group of all sequences with a single query (decode), one group per longer chunk."""
    query_lens = metadata.query_lens
    decoding = [i for i, length in enumerate(query_lens) if length == 1]
    groups = [_decode(metadata, decoding)] if decoding else []
    groups += [_chunk(metadata, i, length) for i, length in enumerate(query_lens) if length > 1]
    return groups


def _decode(metadata: AttentionMetadata, members: list[int]) -> QueryGroup:
    device = metadata.slot_mapping.device
    read_len_max = max(metadata.read_lens[i] for i in members)
    tables = metadata.block_tables[:, : -(-read_len_max // metadata.block_size)]
    rows: slice | Tensor = slice(0, len(members))
    if len(members) < metadata.num_sequences:
        rows = _int64([metadata.query_start[i] for i in members], device)
        tables = tables.index_select(0, _int64(members, device))
    last = _int64([metadata.read_lens[i] - 1 for i in members], device)
    return QueryGroup(
        rows=rows,
        num_sequences=len(members),
        query_len=1,
        positions=last[:, None],
        block_tables=tables,
        read_len_max=read_len_max,
        causal_from_zero=False,
    )


def _int64(values: list[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def _chunk(metadata: AttentionMetadata, i: int, length: int) -> QueryGroup:
    first, read_len = metadata.query_start[i], metadata.read_lens[i]
    num_blocks = -(-read_len // metadata.block_size)
    device = metadata.slot_mapping.device
    return QueryGroup(
        rows=slice(first, first + length),
        num_sequences=1,
        query_len=length,
        positions=torch.arange(read_len - length, read_len, device=device)[None],
        block_tables=metadata.block_tables[i : i + 1, :num_blocks],
        read_len_max=read_len,
        causal_from_zero=length == read_len,
    )


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees; both arguments broadcast. `window` as in `AttentionPlan.attend`."""
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    return mask


def write_kv(slot_mapping: Tensor, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
    """Store the first T rows of key and value, [T', H_kv, D], at the slots [T]."""
    num_tokens = slot_mapping.shape[0]
    cache.key_slots.index_copy_(0, slot_mapping, key[:num_tokens])
    cache.value_slots.index_copy_(0, slot_mapping, value[:num_tokens])
