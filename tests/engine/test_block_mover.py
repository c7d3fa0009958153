"""Whole blocks out of the pool and back, by every way there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from preempt_engine.worker.block_mover import BlockMover, TorchBlockMover, TritonBlockMover
from preempt_engine.worker.swap_space import SwapSpace

pytest.importorskip("triton")

_MOVERS: dict[str, BlockMover] = {"torch": TorchBlockMover(), "triton": TritonBlockMover()}
_QUICK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    max_examples=8,
)


def _numbered_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Another number in every element, as far as the dtype can tell them apart."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32, device=device).reshape(shape).to(dtype)


@_QUICK
@given(
    data=st.data(),
    shape=st.tuples(
        st.integers(1, 2),
        st.just(2),
        st.integers(1, 6),
        st.sampled_from([1, 3, 16, 100]),
        st.sampled_from([1, 2]),
        st.sampled_from([4, 12]),
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@pytest.mark.parametrize("name", list(_MOVERS))
def test_blocks_come_out_side_by_side_and_go_back_where_they_are_named(
    name: str,
    kernel_device: torch.device,
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    ids = data.draw(
        st.lists(st.integers(0, shape[2] - 1), min_size=1, max_size=4, unique=True), label="ids"
    )
    targets = data.draw(st.permutations(range(shape[2])), label="targets")[: len(ids)]
    pool = _numbered_pool(shape, dtype, kernel_device)
    expected = pool.clone()
    blocks = _MOVERS[name].gather(pool, ids)
    assert blocks.is_contiguous()
    for index, block in enumerate(ids):
        assert torch.equal(blocks[index], pool[:, :, block])
    _MOVERS[name].scatter(pool, targets, blocks)
    for block, target in zip(ids, targets, strict=True):
        expected[:, :, target] = _numbered_pool(shape, dtype, kernel_device)[:, :, block]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("name", list(_MOVERS))
def test_swapped_blocks_return_by_every_mover(name: str, kernel_device: torch.device) -> None:
    pool = _numbered_pool((2, 2, 5, 3, 2, 4), torch.float32, kernel_device)
    before = pool.clone()
    space = SwapSpace(pool, num_host_blocks=3, mover=_MOVERS[name])
    space.swap_out([(4, 0), (1, 2)])
    space.wait()
    pool.fill_(-1)
    space.swap_in([(0, 2), (2, 4)])
    assert torch.equal(pool[:, :, 2], before[:, :, 4])
    assert torch.equal(pool[:, :, 4], before[:, :, 1])
    assert (pool[:, :, [0, 1, 3]] == -1).all()
