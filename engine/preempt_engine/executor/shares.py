"""How the results of the ranks become one `LogitsBatch` in the driver.

Each rank encodes its share of a step's result; the driver combines the shares. The exact model
adds the ranks' digests. A real model's logits are whole on rank 0 only, which sends the argmax of
every row, and whole rows only of sequences that ask for them. Imports no torch, and numpy only to
read a row.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from preempt_engine.config import EngineConfig
from preempt_engine.errors import WireProtocolError
from preempt_engine.exact import ExactLogits, combine_digests
from preempt_engine.step import LogitsBatch, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ShareCodec(Protocol):
    """Both ends of one model's results."""

    def encode(self, rank: int, step: SchedulerOutput, logits: LogitsBatch) -> bytes:
        """A rank's share, from what its runner returned."""
        ...

    def combine(self, step: SchedulerOutput, shares: Sequence[bytes]) -> LogitsBatch:
        """The step's logits, from the shares of all ranks in order.

        Raises:
            WireProtocolError: a share is not of this step.
        """
        ...


def select_share_codec(config: EngineConfig, vocab_size: int) -> ShareCodec:
    """The codec of the configured model."""
    return ExactShares(vocab_size) if config.is_exact else ModelShares(vocab_size)


class ExactShares:
    """Digests, 8 bytes a row and rank.

    Args:
        vocab_size: tokens in the vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, rank: int, step: SchedulerOutput, logits: LogitsBatch) -> bytes:
        """This rank's digest of every row."""
        digests = cast("ExactLogits", logits).digests
        return struct.pack(f"<{len(digests)}Q", *digests)

    def combine(self, step: SchedulerOutput, shares: Sequence[bytes]) -> ExactLogits:
        """The sum of the digests."""
        num_rows = step.num_logits
        for rank, share in enumerate(shares):
            if len(share) != 8 * num_rows:
                raise _wrong_share(step, rank, len(share), 8 * num_rows)
        digests = combine_digests([struct.unpack(f"<{num_rows}Q", share) for share in shares])
        return ExactLogits(digests, self._vocab_size)


class ModelShares:
    """From rank 0: the argmax of every row, then the rows that are wanted whole.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, rank: int, step: SchedulerOutput, logits: LogitsBatch) -> bytes:
        """4 bytes a row, and 4 * vocab_size for each whole row; nothing from other ranks."""
        if rank != 0:
            return b""
        ids = logits.argmax(range(logits.num_rows))
        wholes = [logits.row(row).astype("<f4").tobytes() for row in _whole_rows(step)]
        return struct.pack(f"<{len(ids)}I", *ids) + b"".join(wholes)

    def combine(self, step: SchedulerOutput, shares: Sequence[bytes]) -> ReceivedLogits:
        """What rank 0 sent."""
        num_rows, whole_rows = step.num_logits, _whole_rows(step)
        expected = 4 * num_rows + 4 * self._vocab_size * len(whole_rows)
        for rank, share in enumerate(shares):
            if len(share) != (expected if rank == 0 else 0):
                raise _wrong_share(step, rank, len(share), expected if rank == 0 else 0)
        argmax = struct.unpack_from(f"<{num_rows}I", shares[0])
        offset = 4 * num_rows
        offsets = {
            row: offset + 4 * self._vocab_size * index for index, row in enumerate(whole_rows)
        }
        return ReceivedLogits(argmax, self._vocab_size, shares[0], offsets)


class ReceivedLogits:
    """A `LogitsBatch` of which only the argmax, and some rows, have reached the driver.

    Args:
        argmax: of each row.
        vocab_size: columns.
        data: where whole rows lie, as little-endian float32.
        offsets: row -> its first byte in `data`.
    """

    def __init__(
        self, argmax: Sequence[int], vocab_size: int, data: bytes, offsets: dict[int, int]
    ) -> None:
        self._argmax = argmax
        self.vocab_size = vocab_size
        self._data = data
        self._offsets = offsets

    @property
    def num_rows(self) -> int:
        return len(self._argmax)

    def argmax(self, rows: Sequence[int]) -> list[int]:
        """Token id of the largest logit of each of `rows`."""
        return [self._argmax[row] for row in rows]

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one row, float32 [vocab_size], a copy."""
        import numpy as np

        assert index in self._offsets, f"row {index} was not asked for (`full_logits`)"
        return np.frombuffer(self._data, "<f4", self.vocab_size, self._offsets[index]).astype(
            np.float32
        )


def _whole_rows(step: SchedulerOutput) -> list[int]:
    rows: list[int] = []
    first_row = 0
    for item in step.scheduled:
        if item.full_logits:
            rows += range(first_row, first_row + item.num_logits)
        first_row += item.num_logits
    return rows


def _wrong_share(
    step: SchedulerOutput, rank: int, num_bytes: int, expected: int
) -> WireProtocolError:
    return WireProtocolError(
        f"Step {step.step_id}: rank {rank} sent {num_bytes} bytes of results, expected {expected}.",
        "The rank computed other rows than the scheduler asked for.",
    )
