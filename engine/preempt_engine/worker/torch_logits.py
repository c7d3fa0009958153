"""A step's logits on a torch device, as `LogitsBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TorchLogits:
    """Rows of logits.

    Args:
        logits: [num_rows, vocab_size], any floating dtype and device.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def argmax(self, rows: Sequence[int]) -> list[int]:
        """Token id of the largest logit of each of `rows`; the lowest id wins a tie."""
        if not rows:
            return []
        logits = self.logits
        if list(rows) != list(range(self.num_rows)):
            logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
        # Both return the first of several maxima; on a CPU, NumPy's is 10 to 30 times faster.
        if logits.device.type == "cpu":
            winners: list[int] = logits.float().numpy().argmax(-1).tolist()
        else:
            winners = logits.argmax(dim=-1).tolist()
        return winners

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one row, float32 [vocab_size], a copy."""
        row = self.logits[index].to("cpu", torch.float32, copy=True)
        values: NDArray[np.float32] = row.numpy()
        return values
