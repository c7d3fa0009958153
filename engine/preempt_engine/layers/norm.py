"""Normalisation over the last dimension."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32."""
    # Rounded to the dtype before the weight comes in, as in the reference implementation.
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), computed in float32.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        dtype: of the weight.
        device: of the weight.

    Attributes:
        kernel: how it is computed; the model runner replaces it where plain operations are not
            batch-invariant.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        self.kernel: Callable[[Tensor, Tensor, float], Tensor] = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.eps)  # [..., D]

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.weight": self.weight.data}


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias.

    Args:
        size: of the last dimension.
        eps: added to the variance.
        dtype: of the parameters.
        device: of the parameters.

    Attributes:
        kernel: how it is computed; the model runner replaces it where plain operations are not
            batch-invariant.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor] = layer_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.bias, self.eps)  # [..., D]

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.weight": self.weight.data, f"{prefix}.bias": self.bias.data}
