"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from preempt_engine.models.config import RopeParameters


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines for positions [0, max_model_len).

    The angle is a float32 product, as in the reference implementation; its cosine is taken in
    float64 and rounded, so that an entry does not depend on where in the table it was computed.

    Args:
        head_dim: D, even.
        max_model_len: rows of the tables.
        parameters: base and scaling of the frequencies.
        dtype: of the heads that are rotated.
        device: of the tables.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_model_len: int,
        parameters: RopeParameters,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        frequencies = inverse_frequencies(head_dim, parameters)  # [D / 2]
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).double()  # [max_model_len, D / 2]
        self.register_buffer("cos", angles.cos().float().to(device, dtype), persistent=False)
        self.register_buffer("sin", angles.sin().float().to(device, dtype), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for `rotate`.

        Args:
            positions: int64 [T].

        Returns:
            cosines and signed sines, each [T, 1, D].
        """
        cos = self.cos.index_select(0, positions)  # [T, D / 2]
        sin = self.sin.index_select(0, positions)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) of every head.

    Args:
        x: [T, H, D].
        cos: [T, 1, D].
        signed_sin: [T, 1, D]; its first half is negated, so the swapped halves need no sign.

    Returns:
        [T, H, D].
    """
    half = x.shape[-1] // 2
    return x.roll(half, -1).mul_(signed_sin).add_(x * cos)  # each operation rounds by IEEE 754


def inverse_frequencies(head_dim: int, parameters: RopeParameters) -> Tensor:
    """Angle per position of each pair, float32 [D / 2].

    "llama3" is the scaling of Llama 3.1 (`transformers.modeling_rope_utils`): wavelengths longer
    than `original / low_freq_factor` are stretched by `factor`, those shorter than
    `original / high_freq_factor` are kept, and a linear ramp joins the two.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / parameters.theta**exponents  # [D / 2]
    if parameters.rope_type == "default":
        return frequencies
    if parameters.rope_type == "linear":
        return frequencies / parameters.factor
    assert parameters.rope_type == "llama3", parameters
    # 0 where the wavelength is long, 1 where it is short
    turns = parameters.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / parameters.factor + kept * frequencies
