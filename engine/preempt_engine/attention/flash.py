"""Paged attention by the flash-attn package (Dao, 2023): the backend "flash-attn".

It reads keys through the block table itself, from blocks of a multiple of 256 tokens; other sizes
are refused before an engine is built. How it cuts the work depends on the batch, so its results
do too; with `deterministic` the start-up probe says whether they do here.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.paged import write_kv
from preempt_engine.attention.protocol import (
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
    LayerKVCache,
)
from preempt_engine.attention.transfer import to_device

BLOCK_MULTIPLE = 256  # "Paged KV cache block size must be divisible by 256", flash_attn 2.5 to 2.8
_LARGEST_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True, slots=True)
class FlashFunctions:
    """The two functions of the package that are used.

    Attributes:
        varlen: `flash_attn.flash_attn_varlen_func`.
        with_kvcache: `flash_attn.flash_attn_with_kvcache`.
    """

    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any]

    @classmethod
    def installed(cls) -> FlashFunctions:
        """Of the installed package."""
        package = importlib.import_module("flash_attn")
        return cls(package.flash_attn_varlen_func, package.flash_attn_with_kvcache)


def unusable(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why flash-attn cannot be used here; "" when it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if device.type != "cuda":
        return "flash-attn needs a CUDA device"
    if block_size % BLOCK_MULTIPLE:
        return f"flash-attn needs a block_size that is a multiple of {BLOCK_MULTIPLE}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "flash-attn computes in float16 and bfloat16 only"
    if head_dim % 8 or head_dim > _LARGEST_HEAD_DIM:
        return f"flash-attn needs a head width that is a multiple of 8, {_LARGEST_HEAD_DIM} at most"
    return ""


class FlashAttention:
    """The backend "flash-attn".

    Args:
        scale: factor of the scores.
        functions: of the package.
    """

    name = "flash-attn"

    def __init__(self, scale: float, functions: FlashFunctions) -> None:
        self.scale = scale
        self.functions = functions

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        device = metadata.slot_mapping.device
        read_lens = to_device(np.array(metadata.read_lens, dtype=np.int32), device)
        if metadata.num_tokens == metadata.num_sequences:
            buffers = DecodeBuffers(
                metadata.slot_mapping, metadata.block_tables, read_lens, metadata.block_size
            )
            return self.plan_decode(buffers)
        key_start = np.concatenate(([0], np.cumsum(metadata.read_lens))).astype(np.int32)
        return _VarlenPlan(
            self,
            metadata,
            query_start=to_device(np.array(metadata.query_start, dtype=np.int32), device),
            key_start=to_device(key_start, device),
        )

    def plan_decode(self, buffers: DecodeBuffers) -> AttentionPlan:
        """As `GraphAttention.plan_decode`."""
        return _DecodePlan(self, buffers)


class _VarlenPlan:
    def __init__(
        self,
        backend: FlashAttention,
        metadata: AttentionMetadata,
        *,
        query_start: Tensor,
        key_start: Tensor,
    ) -> None:
        self.backend = backend
        self.metadata = metadata
        self.query_start = query_start
        self.key_start = key_start

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.metadata.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        metadata = self.metadata
        attended: Tensor = self.backend.functions.varlen(
            query[: metadata.num_tokens],
            cache.key_blocks,
            cache.value_blocks,
            cu_seqlens_q=self.query_start,
            cu_seqlens_k=self.key_start,
            max_seqlen_q=max(metadata.query_lens),
            max_seqlen_k=max(metadata.read_lens),
            softmax_scale=self.backend.scale,
            causal=True,
            window_size=_window_size(window),
            block_table=metadata.block_tables,
        )  # [T, H, D]
        return _with_padding(attended, query)


class _DecodePlan:
    def __init__(self, backend: FlashAttention, buffers: DecodeBuffers) -> None:
        self.backend = backend
        self.buffers = buffers

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.buffers.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        buffers = self.buffers
        num_sequences = buffers.read_lens.shape[0]
        attended: Tensor = self.backend.functions.with_kvcache(
            query[:num_sequences, None],  # [N, 1, H, D]
            cache.key_blocks,
            cache.value_blocks,
            cache_seqlens=buffers.read_lens,
            block_table=buffers.block_tables,
            softmax_scale=self.backend.scale,
            causal=True,
            window_size=_window_size(window),
        )  # [N, 1, H, D]
        return _with_padding(attended[:, 0], query)


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys to the left and right of a query's own position; -1 is no limit."""
    return (-1 if window is None else window - 1, 0)


def _with_padding(attended: Tensor, query: Tensor) -> Tensor:
    """[T, H, D] -> [T', H, D]."""
    surplus = query.shape[0] - attended.shape[0]
    return torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, surplus)) if surplus else attended
