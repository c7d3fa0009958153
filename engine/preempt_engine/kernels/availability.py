"""Whether the Triton kernels can be used here. The one module that asks for Triton by name."""

from __future__ import annotations

import importlib.util

import torch


def unusable(device: torch.device) -> str:
    """Why Triton kernels cannot run on this device; "" when they can.

    On a CPU they run in Triton's interpreter only, which a process turns on for itself by setting
    TRITON_INTERPRET=1 before it imports them.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" or kernels_are_interpreted():
        return ""
    return "Triton runs on a CPU only in its interpreter (TRITON_INTERPRET=1)"


def kernels_are_interpreted() -> bool:
    """True in a process where Triton interprets kernels instead of compiling them."""
    import triton
    from triton.runtime.jit import JITFunction

    # Triton decides when a kernel is decorated; a decorated one therefore tells.
    return not isinstance(triton.jit(_nothing), JITFunction)


def _nothing() -> None:
    return None
