"""The ranks of one engine, joined by torch.distributed: gloo on a CPU, NCCL on GPUs.

Lives in a worker process only, where the process group, a global of torch, can hurt no other
engine. Sums are gathered and added in the order of ranks, because the collective's own sum may be
added in an order that depends on the size of the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from preempt_engine.errors import CollectiveError

# The driver's limits are the ones that count: they can tell which rank is at fault.
_TIMEOUT = timedelta(days=1)


class ProcessGroup:
    """This process as one of the ranks.

    Args:
        rank: of this process.
        size: number of ranks.
        store_fd: file descriptor of an empty file that all ranks share.
        device: of the tensors.

    Raises:
        CollectiveError: the ranks could not be joined.
    """

    def __init__(self, rank: int, size: int, store_fd: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        with self._naming("joining the ranks"):
            dist.init_process_group(
                backend,
                # A file without a name: there is no port and no path that another could take.
                store=dist.FileStore(  # type: ignore[attr-defined]
                    f"/proc/self/fd/{store_fd}", size
                ),
                rank=rank,
                world_size=size,
                timeout=_TIMEOUT,
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum in the order of ranks, in float32 or wider, rounded once."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._naming("an all-reduce"):
            dist.all_gather(parts, x.contiguous())
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0 the tensors of all ranks; elsewhere an empty list."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        with self._naming("a gather"):
            dist.gather(x.contiguous(), parts or None, dst=0)
        return parts

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        with self._naming("an agreement"):
            dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return int(values.item())

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    @contextmanager
    def _naming(self, operation: str) -> Iterator[None]:
        """Failures of a collective are told apart from those of the model."""
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"{operation} failed: {error}.",
                "Another rank is gone, or ranks did not do the same.",
                self.rank,
            ) from error
