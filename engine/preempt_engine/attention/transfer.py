"""Small arrays of a step on their way from the host to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array's values; on a CPU it shares the array's memory.

    On a GPU the copy starts from pinned memory, so nobody waits for it: the host goes on to build
    the next array, and what is launched next on the current stream comes after the copy.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
