"""Linear layers with packed weights.

Several projections of the same input are one matrix product; the layer remembers where each of
them lies so that a checkpoint's separate tensors can be loaded into it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preempt_engine.layers.destination import Destination

# (x [M, K], weight [N, K], bias [N] or None) -> [M, N]
Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Elements of the smallest weight that oneDNN multiplies sooner than torch's default: its calls cost
# 8 us more, its products take a half to a third of the time.
_PACKED_SIZE_MIN = 2**17


class Linear(nn.Module):
    """x @ weight.T + bias, for one projection or several packed ones.

    Args:
        in_features: K.
        out_sizes: rows of each packed projection; their sum is N.
        bias: add one.
        dtype: of the parameters.
        device: of the parameters.

    Attributes:
        product: how this kind of weight is multiplied.
        matmul: how the product is computed: `product`, or pieces of it when the determinism probe
            finds that whole products are not batch-invariant.
    """

    def __init__(
        self,
        in_features: int,
        out_sizes: tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.out_sizes = out_sizes
        shape = (sum(out_sizes), in_features)
        self.weight = nn.Parameter(
            torch.empty(shape, dtype=dtype, device=device), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(shape[0], dtype=dtype, device=device), requires_grad=False
            )
        self.product: Matmul = F.linear
        self.matmul: Matmul = self.product

    def local(self, x: Tensor) -> Tensor:
        """What this rank alone computes; the whole layer, unless a subclass has a part of it."""
        return self.matmul(x, self.weight, self.bias)  # [M, K] -> [M, N]

    def forward(self, x: Tensor) -> Tensor:
        return self.local(x)

    def pack(self) -> None:
        """Lay the weight out for oneDNN, if it is worth it; once it is loaded, and for good.

        The layout is opaque: afterwards only the product can read the weight. A weight shared with
        another layer is packed as a copy.
        """
        if self.weight.numel() >= _PACKED_SIZE_MIN and _onednn_serves(self.weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.matmul = self.product = packed_linear

    def checkpoint_tensors(self, *prefixes: str) -> dict[str, Destination]:
        """Destinations of the packed projections, named in the order of `out_sizes`."""
        assert len(prefixes) == len(self.out_sizes), (prefixes, self.out_sizes)
        tensors: dict[str, Destination] = {}
        start = 0
        for prefix, size in zip(prefixes, self.out_sizes, strict=True):
            tensors[f"{prefix}.weight"] = self.weight.data[start : start + size]
            if self.bias is not None:
                tensors[f"{prefix}.bias"] = self.bias.data[start : start + size]
            start += size
        return tensors


def _onednn_serves(weight: Tensor) -> bool:
    """True if torch has oneDNN for this CPU and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a weight that `Linear.pack` has laid out; [M, K] -> [M, N]."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


class FixedRowsMatmul:
    """A product computed in pieces of always the same number of rows.

    With one shape there is one kernel and one order of summation, whatever the batch. Slower
    than one product of all rows; used only where padding is not enough.

    Args:
        num_rows: of every piece; callers pass a multiple of it.
        product: of one piece.
    """

    def __init__(self, num_rows: int, product: Matmul = F.linear) -> None:
        self.num_rows = num_rows
        self.product = product

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert x.shape[0] % self.num_rows == 0, (x.shape, self.num_rows)
        pieces = torch.split(x, self.num_rows)
        return torch.cat([self.product(piece, weight, bias) for piece in pieces])
