"""Triton programs that move keys and values: into slots, and whole blocks out of and into the pool.

They copy elements of any type as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kv(
    key,
    value,
    keys,
    values,
    slot_mapping,
    key_stride,
    value_stride,
    width: tl.constexpr,
    padded_width: tl.constexpr,
):
    """One token's key and value, all heads, to its slot.

    Args:
        key, value: [T', H_kv, D], `width` = H_kv * D elements in one piece for each token.
        keys, values: [num_slots, H_kv, D].
        slot_mapping: int64 [T].
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    elements = tl.arange(0, padded_width)
    inside = elements < width
    tl.store(
        keys + slot * width + elements,
        tl.load(key + token * key_stride + elements, mask=inside),
        mask=inside,
    )
    tl.store(
        values + slot * width + elements,
        tl.load(value + token * value_stride + elements, mask=inside),
        mask=inside,
    )


@triton.jit
def gather_blocks(pool, block_ids, buffer, num_planes, num_blocks, width, chunk: tl.constexpr):
    """One chunk of one plane of one block, from the pool to a buffer.

    A plane is a layer's keys or its values. Grid: (blocks, planes, chunks).

    Args:
        pool: [num_planes, num_blocks, width].
        block_ids: int64 [N].
        buffer: [N, num_planes, width].
    """
    index, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + index)
    elements = tl.program_id(2) * chunk + tl.arange(0, chunk)
    inside = elements < width
    source = pool + (plane * num_blocks + block) * width
    target = buffer + (index * num_planes + plane) * width
    tl.store(target + elements, tl.load(source + elements, mask=inside), mask=inside)


@triton.jit
def scatter_blocks(pool, block_ids, buffer, num_planes, num_blocks, width, chunk: tl.constexpr):
    """The way back of `gather_blocks`; no block may be named twice."""
    index, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + index)
    elements = tl.program_id(2) * chunk + tl.arange(0, chunk)
    inside = elements < width
    source = buffer + (index * num_planes + plane) * width
    target = pool + (plane * num_blocks + block) * width
    tl.store(target + elements, tl.load(source + elements, mask=inside), mask=inside)
