"""Rows of a table, looked up by token id or by position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preempt_engine.layers.destination import Destination


class Embedding(nn.Module):
    """A table of `num_rows` vectors.

    Args:
        num_rows: of the table.
        size: of each vector.
        dtype: of the table.
        device: of the table.
    """

    def __init__(
        self, num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_rows, size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)  # [T] -> [T, size]

    def checkpoint_tensors(self, prefix: str) -> dict[str, Destination]:
        return {f"{prefix}.weight": self.weight.data}
