"""How every kernel is launched: on the device of its tensors, whichever is the current one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def launch(
    program: Any, grid: Sequence[int], tensors: Sequence[Tensor], *numbers: object, **sizes: object
) -> None:
    """Launch a Triton program.

    Args:
        program: decorated with `triton.jit`.
        grid: number of programs in each dimension.
        tensors: its first arguments; the first of them says the device.
        *numbers: its further arguments.
        **sizes: constants, and options of the compiler.
    """
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        program[tuple(grid)](*tensors, *numbers, **sizes)
