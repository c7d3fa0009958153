"""Activation functions, alone or gating a second half.

Torch's fused SiLU computes exp one way in its vector loop and another way in the scalar loop that
handles the last elements of a memory range; which elements those are depends on the batch and on
the number of threads. The invariant variant is built of `exp`, which has one code path, and of
operations that IEEE 754 rounds exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def invariant_silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), each element alike wherever it lies."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def select_activation(name: str, *, deterministic: bool) -> Activation:
    """The function that `ModelConfig.hidden_act` names."""
    if name == "silu":
        return invariant_silu if deterministic else F.silu
    assert name == "relu", name
    return F.relu


class GatedActivation(nn.Module):
    """activation(gate) * up, for gate and up packed side by side.

    Args:
        activation: of the gate.
        size: of each half.
    """

    def __init__(self, activation: Activation, size: int) -> None:
        super().__init__()
        self.activation = activation
        self.size = size

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = torch.split(gate_up, self.size, dim=-1)  # [T, 2 * size] -> 2 x [T, size]
        return self.activation(gate).mul_(up)


class PlainActivation(nn.Module):
    """activation(x).

    Args:
        activation: the function.
        size: of the last dimension.
    """

    def __init__(self, activation: Activation, size: int) -> None:
        super().__init__()
        self.activation = activation
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)  # [T, size]
