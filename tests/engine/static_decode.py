"""Decode attention in torch that reads everything from the device, and a stand-in for CUDA graphs.

With these, captured steps are tested on a CPU: the stand-in runs a step again where a GPU would
replay its launches, in the same memory and with the same plan.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from preempt_engine.attention.paged import write_kv
from preempt_engine.attention.protocol import AttentionPlan, DecodeBuffers, LayerKVCache
from preempt_engine.attention.torch_paged import TorchPagedAttention


class StaticTorchAttention(TorchPagedAttention):
    """The torch backend, with decode steps that can be captured: it gathers the whole tables."""

    def plan_decode(self, buffers: DecodeBuffers) -> AttentionPlan:
        return _StaticPlan(buffers, self.scale)


class _StaticPlan:
    def __init__(self, buffers: DecodeBuffers, scale: float) -> None:
        self.buffers = buffers
        self.scale = scale

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.buffers.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        tables, read_lens = self.buffers.block_tables.long(), self.buffers.read_lens.long()
        group = query.shape[1] // cache.key_blocks.shape[2]
        keys = cache.key_blocks[tables].flatten(1, 2).repeat_interleave(group, 2)  # [N, S, H, D]
        values = cache.value_blocks[tables].flatten(1, 2).repeat_interleave(group, 2)
        at = torch.arange(keys.shape[1])
        seen = at < read_lens[:, None]
        if window is not None:
            seen &= at >= read_lens[:, None] - window
        scores = torch.einsum("nhd,nshd->nhs", query, keys) * self.scale
        weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), -1)
        return torch.einsum("nhs,nshd->nhd", weights, values)


class EagerCapture:
    """Runs what was captured again, into the memory of the first result.

    Attributes:
        captured: numbers of rows, in order of capture.
        replayed: numbers of rows, in order of replay.
    """

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = run().clone()
        self.captured.append(output.shape[0])

        def replay() -> Tensor:
            self.replayed.append(output.shape[0])
            return output.copy_(run())

        return replay
