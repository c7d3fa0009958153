"""Paged attention whose bits depend on a sequence's own history only.

Keys are cut into tiles of 64 by *position*, so neither the block size nor the place of a block
matters. The scores of a tile are a matrix product of fixed sizes but for a padded number of query
rows. Softmax works on one row at a time, a vector register after the other, and values are added in
order of position, so keys that a query does not see add exact zeros at the end of either sum and
the number of tiles does not matter. Scores are float32 for every dtype.

The idea of a fixed reduction order for batch invariance: He et al., "Defeating Nondeterminism in
LLM Inference", 2025. Whether this machine's matrix products keep it up is for the start-up probe.
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
        if len(self.groups) == 1 and self.groups[0].group.covers(query.shape[0]):
            return self.groups[0].attend(query, cache, window)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # [T', H, D]
        for tiled in self.groups:
            attended = tiled.attend(tiled.group.take(query), cache, window)
            tiled.group.put(attended, output)
        return output


class _TiledGroup:
    """A group with what it reads, in whole tiles, and its masks as layers ask for them.

    Shapes: N sequences, L queries each, H_kv KV heads, G query heads per KV head, M = L * G rows
    padded to the row plan, S tiles, K = S * TILE positions.
    """

    def __init__(self, group: QueryGroup, block_size: int, scale: float, row_plan: RowPlan) -> None:
        self.group = group
        self.scale = scale
        self.row_plan = row_plan
        self.num_tiles = -(-group.read_len_max // TILE)
        self.reads = GroupReads(group, self.num_tiles * TILE, block_size)
        self.masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """[N * L, H, D] -> [N * L, H, D]."""
        keys = self.reads.gather(cache.key_slots).float()  # [N, H_kv, K, D]
        n, num_kv_heads, _, head_dim = keys.shape
        keys = keys.view(-1, TILE, head_dim).mT  # [N * H_kv * S, D, TILE]
        rows = query.view(n, self.group.query_len, num_kv_heads, -1, head_dim).transpose(1, 2)
        groups = rows.shape[3]
        rows = rows.reshape(n, num_kv_heads, -1, head_dim).float() * self.scale
        step = self._rows_per_pass(n * num_kv_heads)
        passes = [
            self._attend_rows(part, i * step, groups, keys, cache, window)
            for i, part in enumerate(torch.split(rows, step, dim=2))
        ]
        output = passes[0] if len(passes) == 1 else torch.cat(passes, dim=2)  # [N, H_kv, L * G, D]
        output = output.view(n, num_kv_heads, -1, groups, head_dim)
        return output.transpose(1, 2).reshape(query.shape)

    def _attend_rows(
        self,
        rows: Tensor,
        first: int,
        groups: int,
        keys: Tensor,
        cache: LayerKVCache,
        window: int | None,
    ) -> Tensor:
        """[N, H_kv, m, D], the rows [first, first + m) -> [N, H_kv, m, D]."""
        n, num_kv_heads, m, head_dim = rows.shape
        padded = F.pad(rows, (0, 0, 0, self.row_plan.padded(m) - m))
        tiled = padded[:, :, None].expand(-1, -1, self.num_tiles, -1, -1)
        scores = torch.bmm(tiled.reshape(keys.shape[0], -1, head_dim), keys)
        scores = scores.view(n, num_kv_heads, self.num_tiles, -1, TILE)[:, :, :, :m]
        scores = scores.transpose(2, 3).reshape(n, num_kv_heads, m, -1)  # [N, H_kv, m, K]
        mask = self.masks.get((window, first))
        if mask is None:
            positions = self.group.positions.repeat_interleave(groups, dim=1)  # [N, L * G]
            mask = hide(positions[:, first : first + m], scores.shape[3], window, scores.dtype)
            self.masks[window, first] = mask
        weights = (scores + mask).softmax(-1).to(cache.value_slots.dtype)
        return self.reads.weighted_sum(weights, cache.value_slots)

    def _rows_per_pass(self, num_matrices: int) -> int:
        if self.row_plan.fixed:
            return self.row_plan.multiple
        multiple = self.row_plan.multiple
        fitting = _MAX_SCORES // (num_matrices * self.num_tiles * TILE)
        return max(multiple, fitting // multiple * multiple)
