"""Linear layers whose weights are laid out for oneDNN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from preempt_engine.layers.linear import FixedRowsMatmul, Linear, packed_linear
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.worker.determinism import install_row_plan

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(
        not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        reason="this torch has no oneDNN",
    ),
]

_CPU = torch.device("cpu")


@dataclasses.dataclass
class _Pair:
    """A layer and the same one with its weight packed."""

    plain: Linear
    packed: Linear
    x: torch.Tensor


def _pair(in_features: int, out_features: int, dtype: torch.dtype, bias: bool) -> _Pair:
    generator = torch.Generator().manual_seed(0)
    layers = [
        Linear(in_features, (out_features,), bias=bias, dtype=dtype, device=_CPU) for _ in range(2)
    ]
    for first, second in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        first.copy_(torch.randn(first.shape, generator=generator))
        second.copy_(first)
    layers[1].pack()
    x = torch.randn(11, in_features, generator=generator).to(dtype)
    return _Pair(layers[0], layers[1], x)


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_gives_the_same_product(bias: bool) -> None:
    pair = _pair(512, 320, torch.float32, bias)
    assert pair.packed.matmul is packed_linear
    assert pair.packed.weight.shape == pair.plain.weight.shape
    # float32 sums of 512 terms of magnitude 1 in another order
    torch.testing.assert_close(pair.packed(pair.x), pair.plain(pair.x), rtol=0, atol=2e-4)


def test_a_small_weight_stays_as_it_is() -> None:
    pair = _pair(48, 96, torch.float32, False)
    assert torch.equal(pair.packed.weight, pair.plain.weight)
    assert pair.packed.matmul is pair.plain.matmul


def test_a_weight_shared_with_another_layer_is_packed_as_a_copy() -> None:
    pair = _pair(512, 320, torch.float32, False)
    shared = Linear(512, (320,), bias=False, dtype=torch.float32, device=_CPU)
    shared.weight = pair.plain.weight
    before = pair.plain.weight.clone()
    shared.pack()
    assert torch.equal(pair.plain.weight, before)
    assert torch.equal(shared(pair.x), pair.packed(pair.x))


def test_pieces_of_fixed_size_are_products_of_the_packed_weight() -> None:
    layer = _pair(512, 320, torch.float32, False).packed
    install_row_plan([layer], RowPlan(16, fixed=True))
    assert isinstance(layer.matmul, FixedRowsMatmul)
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(1))
    pieces = [packed_linear(piece, layer.weight, None) for piece in (x[:16], x[16:])]
    assert torch.equal(layer(x), torch.cat(pieces))
    install_row_plan([layer], RowPlan(8))
    assert layer.matmul is packed_linear
