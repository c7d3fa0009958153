"""Launches the layers whose rows do not depend on their neighbours."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from preempt_engine.kernels.availability import kernels_are_interpreted
from preempt_engine.kernels.jit import layers as programs
from preempt_engine.kernels.launch import launch

# Part of the result's bits, so chosen by nothing but the dtype.
ROWS, COLUMNS = 32, 64
_DEPTH_32_BIT, _DEPTH_16_BIT = 32, 64


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with one order of summation.

    Args:
        x: [M, K].
        weight: [N, K], contiguous.
        bias: [N] or None.

    Returns:
        [M, N], in the dtype of `x`.
    """
    x = x.contiguous()
    num_rows, inner = x.shape
    num_columns = weight.shape[0]
    assert weight.is_contiguous()
    output = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    is_32_bit = x.dtype == torch.float32
    grid = (triton.cdiv(num_columns, COLUMNS), triton.cdiv(num_rows, ROWS))
    launch(
        programs.matmul,
        grid,
        (x, weight, weight if bias is None else bias, output),
        num_rows,
        num_columns,
        inner,
        has_bias=bias is not None,
        # Triton's interpreter has no 16-bit products.
        widen=is_32_bit or kernels_are_interpreted(),
        rows=ROWS,
        columns=COLUMNS,
        depth=_DEPTH_32_BIT if is_32_bit else _DEPTH_16_BIT,
    )
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.norm.rms_norm`, one program a row."""
    size = weight.shape[0]
    rows = x.reshape(-1, size).contiguous()  # [R, D]
    output = torch.empty_like(rows)
    launch(
        programs.rms_norm,
        (rows.shape[0],),
        (rows, weight, output),
        size,
        eps,
        padded_size=triton.next_power_of_2(size),
    )
    return output.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As `layers.norm.layer_norm`, one program a row."""
    size = weight.shape[0]
    rows = x.reshape(-1, size).contiguous()  # [R, D]
    output = torch.empty_like(rows)
    launch(
        programs.layer_norm,
        (rows.shape[0],),
        (rows, weight, bias, output),
        size,
        eps,
        padded_size=triton.next_power_of_2(size),
    )
    return output.view(x.shape)
