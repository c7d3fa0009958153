"""Paged attention whose bits depend on a sequence's own history only.

Keys are cut into tiles of 64 by *position*, so neither the block size nor the place of a block
matters. Scores, weights and partial outputs of a tile are matrix products of fixed inner sizes
with a padded number of query rows; partial outputs are added tile by tile in order of position,
so a tile that a query does not see adds exactly zero and the number of tiles does not matter. The
maximum that the softmax subtracts is exact in any order. Arithmetic is float32 for every dtype.

The idea of a fixed reduction order for batch invariance: He et al., "Defeating Nondeterminism in
LLM Inference", 2025. Whether this machine's matrix products keep it up is for the start-up probe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from preempt_engine.attention.paged import QueryGroup, split_into_groups, visible, write_kv
from preempt_engine.attention.protocol import AttentionMetadata, AttentionPlan, LayerKVCache
from preempt_engine.layers.row_plan import RowPlan

TILE = 64
# Scores of one pass, in elements (16 MiB of float32): bounds memory, not the result.
_MAX_SCORES = 4 * 2**20


class TorchTiledAttention:
    """The backend "torch" with `deterministic`.

    Args:
        scale: factor of the scores.
        row_plan: how many query rows a matrix product takes.
    """

    name = "torch"

    def __init__(self, scale: float, row_plan: RowPlan) -> None:
        self.scale = scale
        self.row_plan = row_plan

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        return _TorchTiledPlan(metadata, self.scale, self.row_plan)


class _TorchTiledPlan:
    def __init__(self, metadata: AttentionMetadata, scale: float, row_plan: RowPlan) -> None:
        self.slot_mapping = metadata.slot_mapping
        self.groups = [
            _TiledGroup(group, metadata.block_size, scale, row_plan)
            for group in split_into_groups(metadata)
        ]

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # [T', H, D]
        for tiled in self.groups:
            attended = tiled.attend(tiled.group.take(query), cache, window)
            tiled.group.put(attended.to(query.dtype), output)
        return output


class _TiledGroup:
    """A group with the slot of every position of every tile.

    Shapes: N sequences, L queries each, H_kv KV heads, G query heads per KV head, M = L * G rows
    padded to the row plan, S tiles.
    """

    def __init__(self, group: QueryGroup, block_size: int, scale: float, row_plan: RowPlan) -> None:
        self.group = group
        self.scale = scale
        self.row_plan = row_plan
        self.num_tiles = -(-group.read_len_max // TILE)
        positions = torch.arange(self.num_tiles * TILE, device=group.positions.device)
        # Positions past the table stand for block 0 of it: read, and masked.
        blocks = (positions // block_size).clamp_(max=group.block_tables.shape[1] - 1)
        tables = group.block_tables.index_select(1, blocks).long()  # [N, S * TILE]
        self.slots = (tables * block_size + positions % block_size).reshape(-1)
        self.key_positions = positions.view(self.num_tiles, 1, TILE)  # [S, 1, TILE]

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N * L, H, D] -> float32 [N * L, H, D]."""
        n, length = self.group.num_sequences, self.group.query_len
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = cache.key_slots.shape[1]
        groups = num_heads // num_kv_heads
        rows = self._rows(query.float() * self.scale, num_kv_heads)  # [N, H_kv, M, D]
        positions = self._row_positions(groups, rows.shape[2])  # [N, M]
        keys = self._tiles(cache.key_slots).transpose(1, 2)  # [N * H_kv * S, D, TILE]
        values = self._tiles(cache.value_slots)  # [N * H_kv * S, TILE, D]
        step = self._rows_per_pass(n * num_kv_heads)
        passes = [
            self._attend_rows(
                rows[:, :, i : i + step], positions[:, i : i + step], keys, values, window
            )
            for i in range(0, rows.shape[2], step)
        ]
        output = torch.cat(passes, dim=2)[:, :, : length * groups]  # [N, H_kv, L * G, D]
        output = output.view(n, num_kv_heads, length, groups, head_dim)
        return output.transpose(1, 2).reshape(n * length, num_heads, head_dim)

    def _attend_rows(
        self, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor, window: int | None
    ) -> Tensor:
        """[N, H_kv, m, D] -> [N, H_kv, m, D]."""
        n, num_kv_heads, m, head_dim = rows.shape
        tiles = self.num_tiles
        tiled_rows = rows[:, :, None].expand(n, num_kv_heads, tiles, m, head_dim)
        scores = torch.bmm(tiled_rows.reshape(-1, m, head_dim), keys)
        scores = scores.view(n, num_kv_heads, tiles, m, TILE)
        seen = visible(positions[:, None, :, None], self.key_positions, window)  # [N, S, m, TILE]
        scores.masked_fill_(~seen[:, None], float("-inf"))
        weights = scores.sub_(scores.amax((2, 4), keepdim=True)).exp_()
        totals = weights.sum(-1)  # [N, H_kv, S, m]
        partial = torch.bmm(weights.view(-1, m, TILE), values)
        partial = partial.view(n, num_kv_heads, tiles, m, head_dim)
        output, total = partial[:, :, 0], totals[:, :, 0]
        for tile in range(1, tiles):  # in order: the sum's bits must not depend on `tiles`
            output = output + partial[:, :, tile]
            total = total + totals[:, :, tile]
        return output / total[..., None]

    def _rows(self, query: Tensor, num_kv_heads: int) -> Tensor:
        """[N * L, H, D] -> [N, H_kv, M, D]; padding rows are zero."""
        n, length = self.group.num_sequences, self.group.query_len
        num_heads, head_dim = query.shape[1:]
        rows = query.view(n, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
        rows = rows.transpose(1, 2).reshape(n, num_kv_heads, -1, head_dim)
        surplus = self.row_plan.padded(rows.shape[2]) - rows.shape[2]
        return torch.nn.functional.pad(rows, (0, 0, 0, surplus))

    def _row_positions(self, groups: int, num_rows: int) -> Tensor:
        """Position of each row, [N, M]; padding rows stand at 0, where one key is visible."""
        positions = self.group.positions.repeat_interleave(groups, dim=1)
        return torch.nn.functional.pad(positions, (0, num_rows - positions.shape[1]))

    def _tiles(self, slots: Tensor) -> Tensor:
        """[num_slots, H_kv, D] -> float32 [N * H_kv * S, TILE, D]."""
        num_kv_heads, head_dim = slots.shape[1:]
        gathered = slots.index_select(0, self.slots).float()
        gathered = gathered.view(-1, self.num_tiles, TILE, num_kv_heads, head_dim)
        return gathered.permute(0, 3, 1, 2, 4).reshape(-1, TILE, head_dim)

    def _rows_per_pass(self, num_matrices: int) -> int:
        if self.row_plan.fixed:
            return self.row_plan.multiple
        multiple = self.row_plan.multiple
        fitting = _MAX_SCORES // (num_matrices * self.num_tiles * TILE)
        return max(multiple, fitting // multiple * multiple)
