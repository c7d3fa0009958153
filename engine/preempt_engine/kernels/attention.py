"""Launches paged attention and the KV write; cuts a step into work for the programs.

How the work is cut decides how fast it is, never a bit of the result (see `jit/attention.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from preempt_engine.attention.protocol import LayerKVCache
from preempt_engine.kernels.jit import attention as programs
from preempt_engine.kernels.jit.blocks import write_kv as write_kv_program
from preempt_engine.kernels.launch import launch

# Keys of one matrix product, positions of one split and query rows of one tile. Part of the
# result's bits, so the same for every step and every kind of GPU.
TILE = 64
SPLIT = 256
ROWS = 16
# Most work items into which single queries are cut; bounds the memory of their parts.
_MOST_ITEMS = 2048
# `tl.dot` takes no smaller inner size.
_SMALLEST_DIM = 16
_NO_WINDOW = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work, on the device.

    Attributes:
        query_start: int32 [N + 1].
        read_lens: int32 [N].
        block_tables: int32 [N, B].
        items: int32 [W, 4], what each program attends to: sequence, row tile counted from that
            of its first query, first split, one past the last.
        row_tiles: int32 [R, 4], which items are parts of the same rows: sequence, row tile,
            first item, one past the last.
        block_size: tokens per block.
    """

    query_start: Tensor
    read_lens: Tensor
    block_tables: Tensor
    items: Tensor
    row_tiles: Tensor
    block_size: int


def cut_work(
    query_lens: Sequence[int], read_lens: Sequence[int], group: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Items and row tiles of a step.

    A sequence with one query is read by as many programs as it has splits. Where there are
    programs enough, with more queries or many sequences, each takes all splits of its rows.

    Args:
        query_lens: [N] queries of each sequence.
        read_lens: [N] positions that each reads.
        group: query heads per KV head.

    Returns:
        int32 [W, 4] and int32 [R, 4], see `AttentionWork`.
    """
    items: list[tuple[int, int, int, int]] = []
    row_tiles: list[tuple[int, int, int, int]] = []
    slots = row_slots(group)
    few = len(read_lens) * -(-max(read_lens) // SPLIT) <= _MOST_ITEMS
    for sequence, (query_len, read_len) in enumerate(zip(query_lens, read_lens, strict=True)):
        num_splits = -(-read_len // SPLIT)
        step = 1 if query_len == 1 and few else num_splits
        first_tile = (read_len - query_len) * slots // ROWS
        for tile in range(-(-read_len * slots // ROWS) - first_tile):
            first_item = len(items)
            items += [(sequence, tile, split, split + step) for split in range(0, num_splits, step)]
            row_tiles.append((sequence, tile, first_item, len(items)))
    return np.array(items, dtype=np.int32), np.array(row_tiles, dtype=np.int32)


def row_slots(group: int) -> int:
    """Query rows that a position takes: a power of two, so that it never lies across tiles that
    it could fit into.
    """
    return int(triton.next_power_of_2(group))


def attend(
    query: Tensor, cache: LayerKVCache, work: AttentionWork, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention through block tables, as `AttentionPlan.attend`.

    Args:
        query: [T', H, D]; heads of a token lie in one piece.
        cache: of the layer, contiguous.
        work: of the step.
        scale: factor of the scores.
        window: a query at p sees positions (p - window, p]; None sees [0, p].

    Returns:
        [T', H, D]; rows of no sequence are zero.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.key_slots.shape[1]
    assert query.stride()[1:] == (head_dim, 1), query.stride()
    dim = max(_SMALLEST_DIM, triton.next_power_of_2(head_dim))
    num_items = work.items.shape[0]
    parts = (num_items, num_kv_heads, ROWS)
    partial_output = torch.empty((*parts, dim), dtype=torch.float32, device=query.device)
    partial_highest = torch.empty(parts, dtype=torch.float32, device=query.device)
    partial_total = torch.empty_like(partial_highest)
    result = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    sizes = {
        "group": num_heads // num_kv_heads,
        "slots": row_slots(num_heads // num_kv_heads),
        "split": SPLIT,
        "rows": ROWS,
        "head_dim": head_dim,
        "dim": dim,
        # A fused multiply-add rounds once where two operations round twice, and whether the
        # compiler makes one depends on the code around it.
        "enable_fp_fusion": False,
    }
    parts_of_items = (partial_output, partial_highest, partial_total)
    launch(
        programs.attend,
        (num_items, num_kv_heads),
        (
            query,
            cache.key_slots,
            cache.value_slots,
            work.block_tables,
            work.query_start,
            work.read_lens,
            work.items,
            *parts_of_items,
        ),
        scale,
        _NO_WINDOW if window is None else window,
        query.stride(0),
        work.block_tables.stride(0),
        cache.key_slots.stride(0),
        num_kv_heads,
        block_size=work.block_size,
        tile=TILE,
        **sizes,
    )
    launch(
        programs.finish,
        (work.row_tiles.shape[0], num_kv_heads),
        (*parts_of_items, work.query_start, work.read_lens, work.row_tiles, result),
        num_kv_heads,
        num_heads,
        **sizes,
    )
    return result


def write_kv(slot_mapping: Tensor, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
    """Store the first T rows of key and value, [T', H_kv, D], at the slots [T]."""
    num_kv_heads, head_dim = key.shape[1:]
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1), (key.stride(), value.stride())
    width = num_kv_heads * head_dim
    launch(
        write_kv_program,
        (slot_mapping.shape[0],),
        (key, value, cache.key_slots, cache.value_slots, slot_mapping),
        key.stride(0),
        value.stride(0),
        width=width,
        padded_width=triton.next_power_of_2(width),
    )
