"""What a worker remembers between steps: token ids and block table of every sequence it serves.

Pure Python, shared by every runner. It learns of sequences only through `SchedulerOutput`, so a
scheduler that forgets to send something shows here, not somewhere in a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from preempt_engine.errors import WorkerStateDriftError
from preempt_engine.step import (
    ScheduledSequence,
    SchedulerOutput,
    SequenceKey,
    StateCheck,
    state_checksum,
)


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
        """Take in a step's deltas; afterwards every scheduled sequence is complete up to `end`.

        Raises:
            WorkerStateDriftError: the step carries a state check that does not hold.
        """
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
            if item.num_stale_tokens:
                del sequence.token_ids[-item.num_stale_tokens :]
            sequence.token_ids.extend(item.new_token_ids)
            sequence.block_table.extend(item.new_block_ids)
        if step.state_check is not None:
            self._compare(step, step.state_check)
        for item, sequence in self.rows(step):
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

    def _compare(self, step: SchedulerOutput, check: StateCheck) -> None:
        for item, expected in zip(step.scheduled, check.checksums, strict=True):
            sequence = self.sequences[item.key]
            if state_checksum(sequence.token_ids, sequence.block_table) != expected:
                raise WorkerStateDriftError(
                    f"Step {step.step_id}: the worker's copy of sequence {item.key} has "
                    f"{len(sequence.token_ids)} tokens and block table {sequence.block_table}, "
                    "which is not what the scheduler has.",
                    "A delta was lost, doubled or changed between scheduler and worker.",
                )
        if len(self.sequences) != check.num_sequences:
            raise WorkerStateDriftError(
                f"Step {step.step_id}: the worker keeps {len(self.sequences)} sequences, and the "
                f"scheduler takes it to keep {check.num_sequences}.",
                "A sequence was not dropped, or dropped too early.",
            )
