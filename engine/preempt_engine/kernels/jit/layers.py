"""Triton programs of layers whose rows must not depend on their neighbours.

Tiles have one shape whatever the number of rows, and each element is summed in one order: along
the inner dimension, never split over programs. The idea: He et al., "Defeating Nondeterminism in
LLM Inference", 2025; the norms are those of `layers/norm.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def matmul(
    x,
    weight,
    bias,
    output,
    num_rows,
    num_columns,
    inner,
    has_bias: tl.constexpr,
    widen: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """One tile of x @ weight.T + bias, summed in float32. Grid: (column tiles, row tiles).

    Args:
        x: [num_rows, inner].
        weight: [num_columns, inner].
        bias: [num_columns], read if `has_bias`.
        output: [num_rows, num_columns].
        widen: multiply in float32, rather than in the type of `x` with float32 sums.
    """
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    total = tl.zeros([rows, columns], tl.float32)
    row_inside, column_inside = row < num_rows, column < num_columns
    x_rows = x + row[:, None].to(tl.int64) * inner
    weight_rows = weight + column[None, :].to(tl.int64) * inner
    for start in range(0, inner, depth):
        at = start + tl.arange(0, depth)
        inside = at < inner
        left = tl.load(x_rows + at[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight_rows + at[:, None], mask=column_inside[None, :] & inside[:, None], other=0.0
        )
        if widen:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None].to(tl.int64) * num_columns + column[None, :],
        total.to(output.dtype.element_ty),
        mask=row_inside[:, None] & column_inside[None, :],
    )


@triton.jit
def rms_norm(x, weight, output, size, eps, padded_size: tl.constexpr):
    """One row of x / rms(x) * weight.

    Args:
        x, output: [num_rows, size].
        weight: [size].
    """
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, padded_size)
    inside = at < size
    wide = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / size
    normed = wide * tl.rsqrt(mean_square + eps)
    # Rounded before the weight is applied, as in the reference.
    normed = normed.to(output.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row + at, scaled.to(output.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm(x, weight, bias, output, size, eps, padded_size: tl.constexpr):
    """One row of (x - mean) / std * weight + bias.

    Args:
        x, output: [num_rows, size].
        weight, bias: [size].
    """
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, padded_size)
    inside = at < size
    wide = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scaled += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row + at, scaled.to(output.dtype.element_ty), mask=inside)
