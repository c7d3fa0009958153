"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), computed in float32.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        dtype: of the weight.
        device: of the weight.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        # Rounded to the dtype before the weight comes in, as in the reference implementation.
        return F.rms_norm(x, self.weight.shape, None, self.eps).mul_(self.weight)  # [..., D]

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.weight": self.weight.data}


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias.

    Args:
        size: of the last dimension.
        eps: added to the variance.
        dtype: of the parameters.
        device: of the parameters.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)  # [..., D]

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.weight": self.weight.data, f"{prefix}.bias": self.bias.data}
