"""How compiled loops see tensors: as NumPy arrays, bfloat16 as its bits.

`widen` and `narrow` are compiled for each dtype. Arithmetic is in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.core import types
from numba.extending import overload
from torch import Tensor

Array = npt.NDArray[Any]
_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(function: _Loop) -> _Loop:
    """Compile at the first call with arguments of a kind, and keep the result on disk.

    Sums may be reordered, so that they run on vector registers; the order depends on their length
    only. Infinities and NaN, which poisoned blocks hold, are kept.
    """
    return _compile(function, {"reassoc", "contract", "nsz"})


def compiled_in_order(function: _Loop) -> _Loop:
    """The same for loops whose operations must keep their order."""
    return _compile(function, {"contract"})


def compiled_exactly(function: _Loop) -> _Loop:
    """The same for loops in which each operation rounds by IEEE 754, on its own."""
    return _compile(function, set())


def _compile(function: _Loop, fast_math: set[str]) -> _Loop:
    jit = partial(
        numba.njit, fastmath=fast_math, error_model="numpy", boundscheck=False, nogil=True
    )
    try:
        loop = jit(cache=True)(function)
    except RuntimeError:  # neither beside the package nor in the user's cache may files be written
        loop = jit()(function)
    return cast(_Loop, loop)


def as_array(tensor: Tensor) -> Array:
    """The same memory; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def widen(element: Any) -> Any:
    """An element of an array as float32; for compiled loops only."""
    raise NotImplementedError("Only compiled loops can call this.")


def narrow(value: Any, array: Any) -> Any:
    """A float32 as an element of `array`, rounded to nearest, ties to even; likewise."""
    raise NotImplementedError("Only compiled loops can call this.")


@overload(widen, inline="always")
def _widen(element: Any) -> Any:
    def same(element: Any) -> Any:
        return element

    def from_bits(element: Any) -> Any:
        return np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)

    return same if isinstance(element, types.Float) else from_bits


@overload(narrow, inline="always")
def _narrow(value: Any, array: Any) -> Any:
    def same(value: Any, array: Any) -> Any:
        return value

    def to_bits(value: Any, array: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + half) >> np.uint32(16))

    return same if isinstance(array.dtype, types.Float) else to_bits


_LOG2_E = np.float32(1.44269504)
_LN_2_HIGH = np.float32(0.693359375)  # few bits, so that its multiples are exact
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
# A minimax polynomial for (exp(r) - 1 - r) / r^2 on [-ln(2) / 2, ln(2) / 2].
_C0, _C1, _C2 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C3, _C4 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3)
_C5 = np.float32(1.9875691500e-4)


@compiled_in_order
def exponential(x: Any) -> Any:
    """exp(x) of a float32, within 2e-7 of it; arguments outside of [-87, 88] count as the ends.

    2^n exp(r) with |r| <= ln(2) / 2, by a polynomial and by the bits of the exponent: without a
    call, so that a loop of it runs on vector registers. After Cephes (Moshier, 1992).
    """
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    tail = _C0 + r * (_C1 + r * (_C2 + r * (_C3 + r * (_C4 + r * _C5))))
    power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (_ONE + (r + r * r * tail)) * power
