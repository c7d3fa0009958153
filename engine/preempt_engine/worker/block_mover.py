"""Whole KV blocks out of the pool into one piece of memory, and back; all layers together.

A block's layers lie far apart in the pool. Copies inside it and swaps both need them side by side:
the first so that every source is read before any block is written, the second because a block
crosses to the host in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.transfer import to_device
from preempt_engine.kernels import availability


class BlockMover(Protocol):
    """Moves blocks of a pool [layers, 2, num_blocks, block_size, H, D]."""

    def gather(self, pool: Tensor, block_ids: Sequence[int]) -> Tensor:
        """A copy of these blocks, [N, layers, 2, block_size, H, D]."""
        ...

    def scatter(self, pool: Tensor, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Fill these blocks of the pool; none is named twice.

        Args:
            pool: the pool.
            block_ids: [N].
            blocks: [N, layers, 2, block_size, H, D], contiguous.
        """
        ...


class TorchBlockMover:
    """With torch's indexing; gathering copies twice."""

    def gather(self, pool: Tensor, block_ids: Sequence[int]) -> Tensor:
        blocks = pool.index_select(2, index_tensor(block_ids, pool.device))
        return blocks.permute(2, 0, 1, 3, 4, 5).contiguous()

    def scatter(self, pool: Tensor, block_ids: Sequence[int], blocks: Tensor) -> None:
        index = index_tensor(block_ids, pool.device)
        pool.index_copy_(2, index, blocks.permute(1, 2, 0, 3, 4, 5))


class TritonBlockMover:
    """With Triton kernels that copy once."""

    def gather(self, pool: Tensor, block_ids: Sequence[int]) -> Tensor:
        from preempt_engine.kernels.blocks import gather_blocks

        blocks = pool.new_empty((len(block_ids), *pool.shape[:2], *pool.shape[3:]))
        gather_blocks(pool, index_tensor(block_ids, pool.device), blocks)
        return blocks

    def scatter(self, pool: Tensor, block_ids: Sequence[int], blocks: Tensor) -> None:
        from preempt_engine.kernels.blocks import scatter_blocks

        scatter_blocks(pool, index_tensor(block_ids, pool.device), blocks)


def select_block_mover(device: torch.device) -> BlockMover:
    """Triton on a GPU where it is installed, else torch."""
    if device.type == "cuda" and not availability.unusable(device):
        return TritonBlockMover()
    return TorchBlockMover()


def index_tensor(block_ids: Sequence[int], device: torch.device) -> Tensor:
    """int64 [N]; on a GPU nobody waits for the copy."""
    return to_device(np.array(block_ids, dtype=np.int64), device)
