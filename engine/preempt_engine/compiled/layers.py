"""Layers between matrix products, one row after the other, and their place in a model.

Each rounds to the dtype where the plain layer does, so both give the same numbers but for the last
bits of float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preempt_engine.compiled.numbers import (
    Array,
    as_array,
    compiled,
    compiled_exactly,
    compiled_in_order,
    exponential,
    narrow,
    widen,
)
from preempt_engine.layers.activation import GatedActivation, invariant_silu
from preempt_engine.layers.norm import RMSNorm
from preempt_engine.layers.rotary import RotaryEmbedding

_ZERO, _ONE = np.float32(0), np.float32(1)
_SILU = (F.silu, invariant_silu)


def install_compiled_layers(modules: Iterable[nn.Module]) -> None:
    """Let the layers that have a compiled loop use it."""
    for module in modules:
        if isinstance(module, RMSNorm):
            module.kernel = rms_norm
        elif isinstance(module, RotaryEmbedding):
            module.rotation = CompiledRotation
        elif isinstance(module, GatedActivation) and module.activation in _SILU:
            module.kernel = silu_and_multiply


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.norm.rms_norm`; [..., D] -> [..., D]."""
    rows = x.reshape(-1, x.shape[-1])
    output = torch.empty_like(rows)
    _rms_norm(as_array(rows), as_array(weight), np.float32(eps), as_array(output))
    return output.view(x.shape)


@compiled
def _rms_norm(x: Array, weight: Array, eps: np.float32, output: Array) -> None:
    width = x.shape[1]
    for row in range(x.shape[0]):
        squares = _ZERO
        for i in range(width):
            element = widen(x[row, i])
            squares += element * element
        factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            normed = widen(narrow(widen(x[row, i]) * factor, output))
            output[row, i] = narrow(normed * widen(weight[i]), output)


class CompiledRotation:
    """As `layers.rotary.PlainRotation`."""

    def __init__(self, cos: Tensor, signed_sin: Tensor) -> None:
        self.cos, self.signed_sin = as_array(cos), as_array(signed_sin)

    def rotate(self, heads: Tensor, num_rotated: int) -> Tensor:
        shape = (heads.shape[0], num_rotated, heads.shape[2])
        output = torch.empty(shape, dtype=heads.dtype)
        _rotate(as_array(heads.contiguous()), self.cos, self.signed_sin, as_array(output))
        return output


@compiled_exactly
def _rotate(heads: Array, cos: Array, signed_sin: Array, output: Array) -> None:
    half = heads.shape[2] // 2
    for token in range(output.shape[0]):
        for head in range(output.shape[1]):
            for i in range(half):
                first, second = widen(heads[token, head, i]), widen(heads[token, head, half + i])
                swapped = widen(narrow(second * widen(signed_sin[token, i]), output))
                kept = widen(narrow(first * widen(cos[token, i]), output))
                output[token, head, i] = narrow(swapped + kept, output)
                swapped = widen(narrow(first * widen(signed_sin[token, half + i]), output))
                kept = widen(narrow(second * widen(cos[token, half + i]), output))
                output[token, head, half + i] = narrow(swapped + kept, output)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; [T, 2 * size] -> [T, size]."""
    num_rows, width = gate_up.shape
    output = torch.empty((num_rows, width // 2), dtype=gate_up.dtype)
    _silu_and_multiply(as_array(gate_up), as_array(output))
    return output


@compiled_in_order
def _silu_and_multiply(gate_up: Array, output: Array) -> None:
    size = output.shape[1]
    for row in range(output.shape[0]):
        for i in range(size):
            gate = widen(gate_up[row, i])
            activated = widen(narrow(gate / (_ONE + exponential(-gate)), output))
            output[row, i] = narrow(activated * widen(gate_up[row, size + i]), output)
