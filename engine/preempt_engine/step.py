"""What a step carries from the scheduler to the workers, and back.

Owns the messages only. They are deltas: a worker keeps the token ids and the block table of every
sequence it knows, so a decode step costs a few bytes per sequence whatever its length. Nothing here
knows tensors, processes or the scheduler.

    positions of one sequence            0        start            end    num_tokens
                                         |--cached--|--scheduled----|--later--|
    rows of logits the step must return                    [logits_start, end)

Tokens beyond those a sequence has are drafts: they are sent with the step that computes them, and
the step after it cuts off those that were rejected.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class SequenceKey(NamedTuple):
    """One branch of one request; the key of everything that a step moves."""

    request_id: str
    branch: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}.{self.branch}"


class ScheduledSequence(msgspec.Struct, gc=False):
    """The part of a step that concerns one sequence.

    Attributes:
        key: the sequence.
        start: first position to compute; KV of [0, start) is already in the cache.
        end: one past the last position to compute.
        logits_start: the step returns logits for positions [logits_start, end);
            equal to `end` when nobody needs them (a chunk that is not the last).
        reset: the worker forgets what it knew of this sequence; `new_token_ids` and
            `new_block_ids` are then complete. True on admission and on every re-admission.
        new_token_ids: ids that follow those the worker already has.
        new_block_ids: blocks that follow those in the worker's block table.
        num_stale_blocks: so many entries at the end of the worker's block table are cut off
            before `new_block_ids` are appended: the last one after a copy-on-write, all of them
            after a swap-in. 0 on `reset`.
        num_stale_tokens: so many ids at the end of the worker's are cut off before `new_token_ids`
            are appended: drafts of an earlier step that were rejected. 0 on `reset`.
        full_logits: somebody reads whole rows; otherwise each row's argmax is enough.
    """

    key: SequenceKey
    start: int
    end: int
    logits_start: int
    reset: bool
    new_token_ids: list[int]
    new_block_ids: Seq[int]
    num_stale_blocks: int = 0
    full_logits: bool = True
    num_stale_tokens: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_logits(self) -> int:
        return self.end - self.logits_start


@dataclass(slots=True)
class StateCheck:
    """What every worker must know once it has taken in the step (`debug_worker_state`).

    Attributes:
        num_sequences: how many sequences it keeps.
        checksums: `state_checksum` of each scheduled sequence, in the order of `scheduled`.
    """

    num_sequences: int
    checksums: list[int]


def state_checksum(token_ids: Seq[int], block_table: Seq[int]) -> int:
    """CRC-32 of all tokens and blocks of a sequence, and of where the ones end."""
    return zlib.crc32(array("q", [len(token_ids), *token_ids, *block_table]))


class SchedulerOutput(msgspec.Struct):
    """One step's work. A worker applies the fields in the order they are listed.

    Copies between host and device may run beside the computation within these limits: `swap_in`
    is done before a later field reads its destinations; `swap_out` may begin as soon as earlier
    steps have written its sources, and end with the step. Nothing else in the step touches either
    end of a `swap_out`, nor the host end of a `swap_in`, and the scheduler hands none of those
    blocks out before the step is done.

    Attributes:
        step_id: counts from 0; every event of the step carries it.
        forks: (parent, child): the child begins with all that the worker knows of the parent.
        dropped: sequences the worker must forget (finished, aborted, preempted by recompute). A
            sequence that is swapped out is kept: its tokens are not sent again.
        poison_block_ids: freed blocks to fill with a large finite pattern (`poison=True`).
        swap_in: (host block, device block) pairs.
        block_copies: (source, destination) pairs; every source is read before any destination,
            or any slot of a scheduled token, is written.
        scheduled: sequences to compute, in the order of their rows; may be empty.
        swap_out: (device block, host block) pairs.
        state_check: what the worker must know by then, or None.
    """

    step_id: int
    forks: list[tuple[SequenceKey, SequenceKey]] = []
    dropped: list[SequenceKey] = []
    poison_block_ids: list[int] = []
    swap_in: list[tuple[int, int]] = []
    block_copies: list[tuple[int, int]] = []
    scheduled: list[ScheduledSequence] = []
    swap_out: list[tuple[int, int]] = []
    state_check: StateCheck | None = None

    @property
    def has_work(self) -> bool:
        """False when there is nothing to send: neither rows nor blocks to swap."""
        return bool(self.scheduled or self.swap_out or self.swap_in)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(item.end - item.start for item in self.scheduled)

    @property
    def num_logits(self) -> int:
        return sum(item.end - item.logits_start for item in self.scheduled)


class LogitsBatch(Protocol):
    """Rows of logits of one step: [num_rows, vocab_size], wherever they live.

    Rows stand in the order of `SchedulerOutput.scheduled`, and within a sequence by position.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def argmax(self, rows: Seq[int]) -> list[int]:
        """Token id of the largest logit of each of `rows`; the lowest id wins a tie."""
        ...

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one row, float32 [vocab_size]; the caller may write to the result."""
        ...


class StepHandle(Protocol):
    """A launched step. `result` blocks until it is done and may be called once."""

    def result(self) -> LogitsBatch: ...
