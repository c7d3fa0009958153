"""What both torch backends share: splitting a step into groups, and storing keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from preempt_engine.attention.protocol import AttentionMetadata, LayerKVCache

# Reads up to this many tokens are padded to each other.
_SHORT_READ = 256


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
        read_len_min: shortest read of the group.
        causal_from_zero: each sequence's queries are all positions that it reads.
    """

    rows: slice | Tensor
    num_sequences: int
    query_len: int
    positions: Tensor
    block_tables: Tensor
    read_len_max: int
    read_len_min: int
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
    """As few groups as waste little: equally many queries, and reads of similar length."""
    members: dict[tuple[int, int, bool], list[int]] = {}
    for i, (length, read_len) in enumerate(
        zip(metadata.query_lens, metadata.read_lens, strict=True)
    ):
        whole = length == read_len > 1
        members.setdefault((length, _padded_read(read_len), whole), []).append(i)
    return [_group(metadata, rows, key[0], key[2]) for key, rows in members.items()]


def _padded_read(read_len: int) -> int:
    """A power of two. Short reads are all alike: one more group costs more than their padding."""
    return max(_SHORT_READ, 1 << (read_len - 1).bit_length())


def _group(
    metadata: AttentionMetadata, members: list[int], length: int, whole: bool
) -> QueryGroup:
    device = metadata.slot_mapping.device
    read_lens = [metadata.read_lens[i] for i in members]
    first, read_len_max = members[0], max(read_lens)
    tables = metadata.block_tables[:, : -(-read_len_max // metadata.block_size)]
    ends = torch.tensor(read_lens, device=device)
    offsets = torch.arange(length, device=device)
    rows: slice | Tensor
    if members == list(range(first, first + len(members))):
        start = metadata.query_start[first]
        rows = slice(start, start + length * len(members))
        tables = tables[first : first + len(members)]
    else:
        starts = torch.tensor([metadata.query_start[i] for i in members], device=device)
        rows = (starts[:, None] + offsets).reshape(-1)
        tables = tables.index_select(0, torch.tensor(members, device=device))
    return QueryGroup(
        rows=rows,
        num_sequences=len(members),
        query_len=length,
        positions=ends[:, None] - length + offsets,
        block_tables=tables,
        read_len_max=read_len_max,
        read_len_min=min(read_lens),
        causal_from_zero=whole,
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
