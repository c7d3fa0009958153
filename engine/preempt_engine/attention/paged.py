"""What both torch backends share: groups of sequences, where they read, and storing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.protocol import AttentionMetadata, LayerKVCache
from preempt_engine.attention.transfer import to_device

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
        causal_from_zero: each sequence's queries are all positions that it reads.
    """

    rows: slice | Tensor
    num_sequences: int
    query_len: int
    positions: Tensor
    block_tables: Tensor
    read_len_max: int
    causal_from_zero: bool

    def covers(self, num_tokens: int) -> bool:
        """True if the group is the whole step, in order and without padding."""
        return isinstance(self.rows, slice) and self.rows == slice(0, num_tokens)

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


def _group(metadata: AttentionMetadata, members: list[int], length: int, whole: bool) -> QueryGroup:
    device = metadata.slot_mapping.device
    read_lens = [metadata.read_lens[i] for i in members]
    first, read_len_max = members[0], max(read_lens)
    tables = metadata.block_tables[:, : -(-read_len_max // metadata.block_size)]
    ends = _int64(read_lens, device)
    offsets = torch.arange(length, device=device)
    rows: slice | Tensor
    if members == list(range(first, first + len(members))):
        start = metadata.query_start[first]
        rows = slice(start, start + length * len(members))
        tables = tables[first : first + len(members)]
    else:
        starts = _int64([metadata.query_start[i] for i in members], device)
        rows = (starts[:, None] + offsets).reshape(-1)
        tables = tables.index_select(0, _int64(members, device))
    return QueryGroup(
        rows=rows,
        num_sequences=len(members),
        query_len=length,
        positions=ends[:, None] - length + offsets,
        block_tables=tables,
        read_len_max=read_len_max,
        causal_from_zero=whole,
    )


def _int64(values: list[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


class GroupReads:
    """Where in a layer's memory a group's keys and values lie. The same for every layer.

    A *row* is one head of one slot, row = slot * H_kv + head: keys and values, seen as tables of
    rows [num_slots * H_kv, D], give a sequence's history head by head without a copy in between.

    Args:
        group: of a step.
        num_positions: K, how many positions are read; those past a block table stand for its last
            block and are to be masked.
        block_size: tokens per block.
    """

    def __init__(self, group: QueryGroup, num_positions: int, block_size: int) -> None:
        positions = torch.arange(num_positions, device=group.positions.device)
        blocks = (positions // block_size).clamp_(max=group.block_tables.shape[1] - 1)
        tables = group.block_tables.index_select(1, blocks).long()  # [N, K]
        self.slots = tables * block_size + positions % block_size
        self._rows: Tensor | None = None
        self._bags: dict[int, tuple[Tensor, Tensor]] = {}

    def gather(self, slots: Tensor) -> Tensor:
        """[num_slots, H_kv, D] -> [N, H_kv, K, D]."""
        num_kv_heads, head_dim = slots.shape[1:]
        rows = self._rows_of(num_kv_heads)
        gathered = slots.view(-1, head_dim).index_select(0, rows.view(-1))
        return gathered.view(*rows.shape, head_dim)

    def weighted_sum(self, weights: Tensor, slots: Tensor) -> Tensor:
        """Sum over the positions of weight times row, in order of position, rows left in place.

        Args:
            weights: [N, H_kv, M, K], of the dtype of the slots.
            slots: [num_slots, H_kv, D].

        Returns:
            [N, H_kv, M, D].
        """
        n, num_kv_heads, num_rows, num_positions = weights.shape
        bags = self._bags.get(num_rows)
        if bags is None:
            rows = self._rows_of(num_kv_heads)[:, :, None].expand(weights.shape).reshape(-1)
            starts = torch.arange(0, rows.shape[0], num_positions, device=rows.device)
            bags = self._bags[num_rows] = (rows, starts)
        output: Tensor = torch.embedding_bag(
            slots.view(-1, slots.shape[2]),
            *bags,
            mode=0,  # sum
            per_sample_weights=weights.reshape(-1),
        )[0]
        return output.view(n, num_kv_heads, num_rows, -1)

    def _rows_of(self, num_kv_heads: int) -> Tensor:
        """[N, H_kv, K]."""
        if self._rows is None:
            heads = torch.arange(num_kv_heads, device=self.slots.device)[:, None]
            self._rows = self.slots[:, None] * num_kv_heads + heads
        return self._rows


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees; both arguments broadcast. `window` as in `AttentionPlan.attend`."""
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    return mask


def hide(positions: Tensor, num_positions: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Added to scores: 0 where a query sees a key, -inf elsewhere.

    Args:
        positions: [N, M], of each row of queries.
        num_positions: K.
        window: as in `AttentionPlan.attend`.
        dtype: of the scores.

    Returns:
        [N, 1, M, K].
    """
    keys = torch.arange(num_positions, device=positions.device)
    seen = visible(positions[:, None, :, None], keys, window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf"))


def write_kv(slot_mapping: Tensor, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
    """Store the first T rows of key and value, [T', H_kv, D], at the slots [T]."""
    num_tokens = slot_mapping.shape[0]
    cache.key_slots.index_copy_(0, slot_mapping, key[:num_tokens])
    cache.value_slots.index_copy_(0, slot_mapping, value[:num_tokens])
