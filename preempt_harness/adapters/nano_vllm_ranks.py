"""nano-vllm's ranks without a GPU: how a step reaches them, and what they hand to attention.

Each rank is a process of its own in the engine and a copy of its modules here. Sequences go to the
ranks above 0 by the engine's own pickling; the engine's own preparation makes a step's inputs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.exact_workers import Row
from preempt_harness.adapters.nano_vllm_source import NanoVllm
from preempt_harness.adapters.scheduler_log import Log

# The engine itself has blocks of 256 and their multiples only. A message holds whole block tables,
# which smaller blocks lengthen beyond all proportion, so its size is shown from there on.
_REAL_BLOCK_SIZE = 256


class Ranks:
    """All ranks of one engine.

    Args:
        folder: of the `nanovllm` package.
        num_ranks: how many there are.
        block_size: tokens per block, as the scheduler knows it.
        tells_block_size: the ranks above 0 know it as well; else they keep the engine's default, as
            its spawned processes do.
        name_of: the engine's sequence -> request.

    Attributes:
        copies: of the engine's modules, one a rank.
        shows_messages: sizes of messages are recorded.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        block_size: int,
        *,
        tells_block_size: bool,
        name_of: Callable[[Any], str],
    ) -> None:
        self.copies = [_load(folder, rank) for rank in range(num_ranks)]
        self.shows_messages = num_ranks > 1 and block_size >= _REAL_BLOCK_SIZE
        self._block_size = block_size
        self._name = name_of
        for rank, copy in enumerate(self.copies):
            told = tells_block_size or not rank
            copy.sequence_class.block_size = block_size if told else _default_block_size(folder)

    @property
    def driver(self) -> NanoVllm:
        """Rank 0, which has the scheduler."""
        return self.copies[0]

    def rows(self, sequences: Sequence[Any], is_prefill: bool, log: Log) -> list[list[Row]]:
        """What each rank's attention backend is handed in a step.

        Args:
            sequences: that are scheduled, as rank 0 has them.
            is_prefill: as the scheduler says.
            log: takes the messages that are sent, and that the step is launched.

        Raises:
            Exception: whatever the engine's preparation raises, with the request that it fails on.
        """
        received = [sequences, *self._send(sequences, is_prefill, log)]
        log.launched()
        return [
            self._rows_of(rank, given, sequences, is_prefill, log.step)
            for rank, given in enumerate(received)
        ]

    def _send(self, sequences: Sequence[Any], is_prefill: bool, log: Log) -> list[list[Any]]:
        """The sequences as the ranks above 0 receive them."""
        if len(self.copies) == 1:
            return []
        with self.driver.registered():
            message = pickle.dumps(["run", list(sequences), is_prefill])
        received = []
        for rank, copy in enumerate(self.copies[1:], start=1):
            if self.shows_messages:
                log.add(record.StepSent(log.step, rank=rank, num_bytes=len(message)))
            with copy.registered():
                received.append(pickle.loads(message)[1])
        return received

    def _rows_of(
        self, rank: int, given: Sequence[Any], sent: Sequence[Any], is_prefill: bool, step: int
    ) -> list[Row]:
        try:
            prepared = self.copies[rank].prepare(given, is_prefill, self._block_size)
        except Exception as error:
            self._explain(error, rank, given, sent, is_prefill, step)
            raise
        context = prepared.context
        if len(context.slot_mapping) != len(prepared.input_ids):
            raise AssertionError(
                f"rank {rank} is given {len(context.slot_mapping)} slots for "
                f"{len(prepared.input_ids)} tokens"
            )
        rows = []
        for index, sequence in enumerate(given):
            part = slice(index, index + 1)
            read_len = context.context_lens[index] if not is_prefill else 0
            if is_prefill:
                part = slice(*context.cu_seqlens_q[index : index + 2])
                first, last = context.cu_seqlens_k[index : index + 2]
                read_len = last - first
            table = sequence.block_table
            if context.block_tables is not None:
                table = [block for block in context.block_tables[index] if block != -1]
            rows.append(
                Row(
                    seq=f"{self._name(sent[index])}.0",
                    start=(prepared.positions[part] or [read_len])[0],
                    token_ids=prepared.input_ids[part],
                    slots=context.slot_mapping[part],
                    table=list(table),
                    read_len=read_len,
                )
            )
        return rows

    def _explain(
        self,
        error: Exception,
        rank: int,
        given: Sequence[Any],
        sent: Sequence[Any],
        is_prefill: bool,
        step: int,
    ) -> None:
        """Name the request whose state a rank cannot work with, and what its copy lacks."""
        for sequence, original in zip(given, sent, strict=True):
            try:
                self.copies[rank].prepare([sequence], is_prefill, self._block_size)
            except type(error):
                lost = sorted(vars(original).keys() - vars(sequence).keys())
                named = [name for name in lost if f"'{name}'" in str(error)] or lost
                error.args = (
                    f"{error}: rank {rank} cannot prepare {self._name(original)} in step {step}, "
                    f"which comes to it for {'prefill' if is_prefill else 'decode'} with "
                    f"{original.num_tokens} tokens, {original.num_completion_tokens} of them "
                    f"outputs; what the scheduler knows of it and the message to rank {rank} left "
                    f"out: {', '.join(named) or '-'}",
                )
                return


def last_tokens(rows: Sequence[Row], tokens: list[int]) -> list[int]:
    """A token per sequence, from the logits that the engine takes for it.

    They are those of the last of all tokens up to the sequence's end, which is another sequence's
    where it has none of its own; before the first stands the last, by Python's index -1.

    Args:
        rows: one a sequence.
        tokens: the best token of each row that computes any.

    Raises:
        IndexError: no row computes any.
    """
    if not tokens:
        cached = ", ".join(row.seq.removesuffix(".0") for row in rows)
        raise IndexError(
            f"the step computes no token, and there are no logits to take: the prefix cache holds "
            f"all tokens of {cached}"
        )
    chosen, index = [], -1
    for row in rows:
        index += bool(row.token_ids)
        chosen.append(tokens[index])
    return chosen


@lru_cache(maxsize=32)
def _load(folder: Path, rank: int) -> NanoVllm:
    return NanoVllm(folder)


@lru_cache(maxsize=8)
def _default_block_size(folder: Path) -> int:
    return int(NanoVllm(folder).sequence_class.block_size)
