"""Host memory for blocks that are swapped out, and the copies there and back.

Knows blocks by id only. A block lies in one piece on the host, all layers together, so that it
moves in one copy whatever the number of layers; neighbours on the host move together. In between
lies a buffer on the device (`block_mover.py`); many blocks pass it in batches.

On a GPU the host memory is pinned and blocks leave on a stream of their own, beside the step's
computation; `SchedulerOutput` says why that is safe. `wait` makes the next step come after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from preempt_engine.errors import ConfigError
from preempt_engine.worker.block_mover import BlockMover, select_block_mover

Pairs = Sequence[tuple[int, int]]

BUFFER_BYTES = 64 * 2**20


class SwapSpace:
    """The host's side of a pool of KV blocks.

    Args:
        pool: the device's blocks, [layers, 2, num_blocks, block_size, H, D].
        num_host_blocks: size of the swap space.
        mover: gathers and scatters the device's blocks; None takes the device's best.

    Raises:
        ConfigError: the host has not that much memory to give.
    """

    def __init__(self, pool: Tensor, num_host_blocks: int, mover: BlockMover | None = None) -> None:
        self._pool = pool
        layers, kinds, _, *block = pool.shape
        shape = (num_host_blocks, layers, kinds, *block)
        block_bytes = math.prod(shape[1:]) * pool.dtype.itemsize
        self._batch = max(1, BUFFER_BYTES // block_bytes)
        pinned = pool.device.type == "cuda" and num_host_blocks > 0
        try:
            self._host = torch.empty(shape, dtype=pool.dtype, pin_memory=pinned)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"The host cannot hold {num_host_blocks} blocks of swap space.",
                "Lower swap_space_blocks or swap_space_bytes.",
            ) from error
        self._stream = _new_stream(pool.device) if pinned else None
        self._mover = mover or select_block_mover(pool.device)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs, perhaps beside what is launched next."""
        if self._stream is None:
            self._for_batches(self._copy_out, pairs)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            self._for_batches(self._copy_out, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (host block, device block) pairs, before what is launched next."""
        self._for_batches(self._copy_in, pairs)

    def wait(self) -> None:
        """What is launched next comes after all copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)

    def _for_batches(self, copy: Callable[[Pairs], None], pairs: Pairs) -> None:
        for first in range(0, len(pairs), self._batch):
            copy(pairs[first : first + self._batch])

    def _copy_in(self, pairs: Pairs) -> None:
        buffer = self._pool.new_empty((len(pairs), *self._host.shape[1:]))  # [N, layers, 2, ...]
        for first, last, host in _runs([host for host, _ in pairs]):
            buffer[first:last].copy_(self._host[host : host + last - first], non_blocking=True)
        self._mover.scatter(self._pool, [device for _, device in pairs], buffer)

    def _copy_out(self, pairs: Pairs) -> None:
        buffer = self._mover.gather(self._pool, [device for device, _ in pairs])
        for first, last, host in _runs([host for _, host in pairs]):
            self._host[host : host + last - first].copy_(buffer[first:last], non_blocking=True)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first index, one past the last, first id) of stretches with consecutive ids."""
    first = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield first, index, block_ids[first]
            first = index


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
