"""Launches the copies of whole blocks between the pool and one piece of memory."""

from __future__ import annotations

import triton
from torch import Tensor

from preempt_engine.kernels.jit import blocks as programs
from preempt_engine.kernels.launch import launch

# Elements that one program copies.
_CHUNK = 1024


def gather_blocks(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """Copy blocks out of the pool.

    Args:
        pool: [layers, 2, num_blocks, block_size, H, D], contiguous.
        block_ids: int64 [N].
        blocks: [N, layers, 2, block_size, H, D], contiguous; is filled.
    """
    _launch(programs.gather_blocks, pool, block_ids, blocks)


def scatter_blocks(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """The way back; no block is named twice."""
    _launch(programs.scatter_blocks, pool, block_ids, blocks)


def _launch(program: triton.JITFunction, pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    assert pool.is_contiguous()
    assert blocks.is_contiguous()
    num_planes, num_blocks = pool.shape[0] * pool.shape[1], pool.shape[2]
    width = pool[0, 0, 0].numel()
    grid = (block_ids.shape[0], num_planes, triton.cdiv(width, _CHUNK))
    launch(program, grid, (pool, block_ids, blocks), num_planes, num_blocks, width, chunk=_CHUNK)
