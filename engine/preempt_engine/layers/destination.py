"""Where a checkpoint's tensor, or a rank's part of it, goes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a part of a checkpoint's tensor goes.

    Attributes:
        tensor: to fill.
        shape: of the whole tensor in the checkpoint.
        index: the part of it that fills `tensor`, one slice per dimension.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...]


# A plain tensor is filled by a whole tensor of the checkpoint.
Destination = Tensor | TensorPart
