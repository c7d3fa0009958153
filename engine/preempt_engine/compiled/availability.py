"""Whether compiled loops can be used here. Numba itself is imported with the loops only."""

from __future__ import annotations

import importlib.util

import torch

_DTYPES = (torch.float32, torch.bfloat16)


def unusable(device: torch.device, dtype: torch.dtype) -> str:
    """Why the compiled loops cannot run; "" when they can."""
    if device.type != "cpu":
        return "its loops are for a CPU"
    if dtype not in _DTYPES:
        return f"its loops do not know {dtype}"
    if importlib.util.find_spec("numba") is None:
        return 'Numba is not installed (pip install "preempt-harness[cpu]")'
    return ""
