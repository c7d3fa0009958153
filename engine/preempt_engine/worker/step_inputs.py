"""From a step's message and the worker's memory to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from preempt_engine.attention.protocol import AttentionMetadata
from preempt_engine.attention.transfer import to_device
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.step import SchedulerOutput
from preempt_engine.worker.state import WorkerState

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass over T tokens, padded to T' rows.

    Attributes:
        input_ids: int64 [T'].
        positions: int64 [T'].
        metadata: what the attention backend is given.
        logits_rows: int64 [R'], rows of hidden states whose logits are wanted, padded; None
            when they are all rows in order.
        num_logits: R.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    logits_rows: Tensor | None
    num_logits: int


def build_step_inputs(
    step: SchedulerOutput, state: WorkerState, device: torch.device, row_plan: RowPlan
) -> StepInputs:
    """Lay the scheduled tokens one after another.

    Args:
        step: at least one sequence, each with at least one token.
        state: has taken in the step.
        device: of the tensors.
        row_plan: T' and R' are padded to it.
    """
    token_ids: list[int] = []
    query_start = [0]
    for item, sequence in state.rows(step):
        assert item.start <= item.logits_start <= item.end, item
        assert item.start < item.end, item
        token_ids += sequence.token_ids[item.start : item.end]
        query_start.append(len(token_ids))
    starts = np.array(query_start, dtype=np.int64)
    lengths = np.diff(starts)
    owners = np.repeat(np.arange(len(lengths)), lengths)  # [T]
    first = np.array([item.start for item in step.scheduled], dtype=np.int64)
    num_tokens = len(token_ids)
    positions = np.arange(num_tokens) - starts[owners] + first[owners]  # [T]
    tables = _block_tables(step, state)
    blocks, offsets = np.divmod(positions, state.block_size)
    slots = tables[owners, blocks].astype(np.int64) * state.block_size + offsets  # [T]
    surplus = row_plan.padded(num_tokens) - num_tokens
    return StepInputs(
        input_ids=to_device(np.pad(np.array(token_ids, dtype=np.int64), (0, surplus)), device),
        positions=to_device(np.pad(positions, (0, surplus)), device),
        metadata=AttentionMetadata(
            query_start=query_start,
            read_lens=[item.end for item in step.scheduled],
            slot_mapping=to_device(slots, device),
            block_tables=to_device(tables, device),
            block_size=state.block_size,
        ),
        logits_rows=_logits_rows(step, starts, device, row_plan),
        num_logits=step.num_logits,
    )


def _block_tables(step: SchedulerOutput, state: WorkerState) -> NDArray[np.int32]:
    """[N, B], each row cut to what its sequence reads and padded with 0."""
    counts = [-(-item.end // state.block_size) for item in step.scheduled]
    tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
    for row, count, (_, sequence) in zip(tables, counts, state.rows(step), strict=True):
        row[:count] = sequence.block_table[:count]
    return tables


def _logits_rows(
    step: SchedulerOutput, starts: Integers, device: torch.device, row_plan: RowPlan
) -> Tensor | None:
    num_tokens = int(starts[-1])
    if step.num_logits == num_tokens:
        return None
    rows = [
        np.arange(end - item.num_logits, end)
        for item, end in zip(step.scheduled, starts[1:], strict=True)
    ]
    wanted = np.concatenate(rows).astype(np.int64)  # [R]
    return to_device(np.pad(wanted, (0, row_plan.padded(len(wanted)) - len(wanted))), device)
