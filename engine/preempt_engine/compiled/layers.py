"""What stands between the matrix products of a Llama, row by row, in arrays.

Each loop rounds to the dtype where the plain layer does, so both give the same numbers but for the
last bits of float32.
"""

from __future__ import annotations

import numpy as np

from preempt_engine.compiled.numbers import (
    Array,
    compiled,
    compiled_exactly,
    compiled_in_order,
    exponential,
    narrow,
    widen,
)

_ZERO, _ONE = np.float32(0), np.float32(1)


@compiled
def normalise(row: Array, weight: Array, eps: np.float32, output: Array) -> None:
    """`layers.norm.rms_norm` of one row, [D]; `output` may be the row itself."""
    squares = _ZERO
    for i in range(row.shape[0]):
        element = widen(row[i])
        squares += element * element
    factor = _ONE / np.sqrt(squares / np.float32(row.shape[0]) + eps)
    for i in range(row.shape[0]):
        normed = widen(narrow(widen(row[i]) * factor, output))
        output[i] = narrow(normed * widen(weight[i]), output)


@compiled
def add_and_normalise(
    hidden: Array, update: Array, weight: Array, eps: np.float32, output: Array
) -> None:
    """Add the update to the hidden states, in place, and normalise the sum; [T, D] each."""
    for token in range(hidden.shape[0]):
        for i in range(hidden.shape[1]):
            total = widen(hidden[token, i]) + widen(update[token, i])
            hidden[token, i] = narrow(total, hidden)
        normalise(hidden[token], weight, eps, output[token])


@compiled
def normalise_heads(heads: Array, first: int, end: int, weight: Array, eps: np.float32) -> None:
    """RMSNorm of heads [first, end) of [T, H', D], each by itself, in place."""
    for token in range(heads.shape[0]):
        for head in range(first, end):
            normalise(heads[token, head], weight, eps, heads[token, head])


@compiled_exactly
def rotate(heads: Array, end: int, cos: Array, signed_sin: Array) -> None:
    """`layers.rotary.rotate` of heads [0, end) of [T, H', D], in place; factors are [T, D]."""
    half = heads.shape[2] // 2
    for token in range(heads.shape[0]):
        for head in range(end):
            for i in range(half):
                first, second = widen(heads[token, head, i]), widen(heads[token, head, half + i])
                swapped = widen(narrow(second * widen(signed_sin[token, i]), heads))
                kept = widen(narrow(first * widen(cos[token, i]), heads))
                heads[token, head, i] = narrow(swapped + kept, heads)
                swapped = widen(narrow(first * widen(signed_sin[token, half + i]), heads))
                kept = widen(narrow(second * widen(cos[token, half + i]), heads))
                heads[token, head, half + i] = narrow(swapped + kept, heads)


@compiled_in_order
def silu_and_multiply(gate_up: Array, output: Array) -> None:
    """silu(gate) * up; [T, 2 * size] -> [T, size]."""
    size = output.shape[1]
    for token in range(output.shape[0]):
        for i in range(size):
            gate = widen(gate_up[token, i])
            activated = widen(narrow(gate / (_ONE + exponential(-gate)), output))
            output[token, i] = narrow(activated * widen(gate_up[token, size + i]), output)
