"""Batch-invariant Triton layers: on a GPU if there is one, else in Triton's interpreter.

The interpreter multiplies with numpy, whose matrix product gives a row other bits at another
place of a tile; a GPU's does not. Where bits are compared, a product that adds in one order
stands in for it, so what is tested is the order in which the programs themselves add.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

pytest.importorskip("triton")

from preempt_engine.kernels import availability, layers
from preempt_engine.layers import norm
from preempt_engine.layers.linear import Linear
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.worker.determinism import (
    CANDIDATES,
    install_invariant_kernels,
    install_row_plan,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Float32 against float64: sums of 100 products of magnitude 1.
_TOLERANCE = 1e-4
_BFLOAT16_ULP = 2.0**-7
_QUICK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    max_examples=10,
)
_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device)


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rtol = 1e-5 if dtype == torch.float32 else 2 * _BFLOAT16_ULP
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), rtol=rtol, atol=_TOLERANCE)


@_QUICK
@given(
    rows=st.integers(1, 40),
    inner=st.integers(1, 100),
    columns=st.integers(1, 90),
    biased=st.booleans(),
    dtype=_dtypes,
)
def test_the_product_is_the_product(
    kernel_device: torch.device,
    rows: int,
    inner: int,
    columns: int,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    x = _random(rows, inner, dtype=dtype, device=kernel_device)
    weight = _random(columns, inner, dtype=dtype, device=kernel_device, seed=1)
    bias = _random(columns, dtype=dtype, device=kernel_device, seed=2) if biased else None
    expected = x.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    _close(layers.matmul(x, weight, bias), expected, dtype)


@_QUICK
@given(rows=st.integers(1, 5), size=st.integers(1, 300), dtype=_dtypes)
def test_norms_are_those_of_torch(
    kernel_device: torch.device, rows: int, size: int, dtype: torch.dtype
) -> None:
    x = _random(rows, 2, size, dtype=dtype, device=kernel_device)[:, :1]  # not contiguous
    weight = _random(size, dtype=dtype, device=kernel_device, seed=1)
    bias = _random(size, dtype=dtype, device=kernel_device, seed=2)
    wide = x.double(), weight.double(), bias.double()
    root_mean_square = (wide[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    _close(layers.rms_norm(x, weight, 1e-5), wide[0] / root_mean_square * wide[1], dtype)
    _close(layers.layer_norm(x, weight, bias, 1e-5), norm.layer_norm(*wide, 1e-5), dtype)


def _in_one_order(left: NDArray[np.float32], right: NDArray[np.float32], **_: object) -> object:
    total = np.zeros((left.shape[0], right.shape[1]), dtype=np.float32)
    for index in range(left.shape[1]):
        total += left[:, index, None] * right[None, index]
    return total


@_QUICK
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_has_the_same_bits_in_every_batch(
    kernel_device: torch.device, data: st.DataObject, dtype: torch.dtype
) -> None:
    x = _random(70, 40, dtype=dtype, device=kernel_device)
    weight = _random(20, 40, dtype=dtype, device=kernel_device, seed=1)
    scale = weight[0]
    rows = data.draw(st.lists(st.integers(0, 69), min_size=1, max_size=70), label="rows")
    with pytest.MonkeyPatch.context() as patch:
        if availability.kernels_are_interpreted():
            patch.setattr(np, "matmul", _in_one_order)
        for run in (
            lambda rows: layers.matmul(rows, weight, None),
            lambda rows: layers.rms_norm(rows, scale, 1e-5),
            lambda rows: layers.layer_norm(rows, scale, scale, 1e-5),
        ):
            assert torch.equal(run(x[rows]), run(x)[rows])


def test_on_a_gpu_norms_and_products_are_triton_s_and_need_no_padding() -> None:
    cpu = torch.device("cpu")
    modules: list[nn.Module] = [
        norm.RMSNorm(8, 1e-5, dtype=torch.float32, device=cpu),
        norm.LayerNorm(8, 1e-5, dtype=torch.float32, device=cpu),
        Linear(8, (4,), bias=False, dtype=torch.float32, device=cpu),
    ]
    assert install_invariant_kernels(modules, cpu) == (CANDIDATES, None)
    assert modules[0].kernel is norm.rms_norm
    candidates, matmul = install_invariant_kernels(modules, torch.device("cuda"))
    assert candidates[0] == RowPlan(1)
    assert [modules[0].kernel, modules[1].kernel] == [layers.rms_norm, layers.layer_norm]
    install_row_plan(modules, candidates[0], matmul)
    assert modules[2].matmul is layers.matmul
    install_row_plan(modules, RowPlan(16, fixed=True), matmul)
    assert modules[2].matmul is not layers.matmul
