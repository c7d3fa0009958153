"""The copies between a device's blocks and the host's: keys and values of every layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from preempt_engine.errors import ConfigError
from preempt_engine.worker import swap_space
from preempt_engine.worker.swap_space import SwapSpace

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[needs_cuda, pytest.mark.gpu])]
OUT = [(5, 2), (0, 0), (3, 3), (7, 4), (1, 7)]  # runs of host blocks, and a lone one


def numbered_pool(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[layers, 2, num_blocks, block_size, heads, width]; every element is another number."""
    shape = (3, 2, 8, 4, 2, 4)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device)
    return numbers.reshape(shape).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_blocks", [1, 2, 100])
def test_blocks_come_back_as_they_went(
    device: str, batch_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 3 * 2 * 4 * 2 * 4 * 4
    monkeypatch.setattr(swap_space, "BUFFER_BYTES", batch_blocks * block_bytes)
    pool = numbered_pool(device)
    before = pool.clone()
    space = SwapSpace(pool, num_host_blocks=8)
    space.swap_out(OUT)
    space.wait()
    pool.fill_(-1)
    targets = {2: 6, 0: 1, 3: 0, 4: 2, 7: 3}
    space.swap_in(list(targets.items()))
    for source, host in OUT:
        assert torch.equal(pool[:, :, targets[host]], before[:, :, source])
    assert (pool[:, :, [4, 5, 7]] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_launched_after_waiting_does_not_disturb_the_copy(device: str) -> None:
    pool = numbered_pool(device)
    before = pool.clone()
    space = SwapSpace(pool, num_host_blocks=8)
    for _ in range(20):
        space.swap_out(OUT)
        space.wait()
        pool[:, :, [source for source, _ in OUT]] = -1
        space.swap_in([(host, source) for source, host in OUT])
        assert torch.equal(pool, before)


def test_a_swap_space_of_no_blocks_takes_no_memory() -> None:
    SwapSpace(numbered_pool("cpu"), num_host_blocks=0)


def test_more_than_the_host_has_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cannot hold 1099511627776 blocks of swap space"):
        SwapSpace(numbered_pool("cpu"), num_host_blocks=2**40)
