"""What a worker remembers between steps: token ids and block table of every sequence it serves.

Pure Python, shared by every runner. It learns of sequences only through `SchedulerOutput`, so a
scheduler that forgets to send something shows here, not somewhere in a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey


@dataclass(slots=True)
class WorkerSequence:
    """A worker's copy of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)


class WorkerState:
    """The sequences of one worker.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: dict[SequenceKey, WorkerSequence] = {}

    def apply(self, step: SchedulerOutput) -> None:
        """Take in a step's deltas; afterwards every scheduled sequence is complete up to `end`."""
        for parent, child in step.forks:
            known = self.sequences[parent]
            self.sequences[child] = WorkerSequence(list(known.token_ids), list(known.block_table))
        for key in step.dropped:
            self.sequences.pop(key, None)
        for item in step.scheduled:
            if item.reset:
                self.sequences[item.key] = WorkerSequence()
            sequence = self.sequences[item.key]
            if item.num_stale_blocks:
                del sequence.block_table[-item.num_stale_blocks :]
            sequence.token_ids.extend(item.new_token_ids)
            sequence.block_table.extend(item.new_block_ids)
            assert len(sequence.token_ids) >= item.end, (
                f"sequence {item.key}: the step computes up to {item.end}, "
                f"the worker knows {len(sequence.token_ids)} tokens"
            )
            assert len(sequence.block_table) * self.block_size >= item.end, (
                f"sequence {item.key}: the step computes up to {item.end}, the worker has "
                f"{len(sequence.block_table)} blocks of {self.block_size}"
            )

    def rows(self, step: SchedulerOutput) -> Iterator[tuple[ScheduledSequence, WorkerSequence]]:
        """The scheduled sequences with this worker's copy of each, in row order."""
        for item in step.scheduled:
            yield item, self.sequences[item.key]
