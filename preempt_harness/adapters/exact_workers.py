"""Workers that hold the exact KV model and compute what they are handed, one cache per rank.

They stand behind the engine's own scheduler where that runs "in the loop". They know no engine:
rows come from the adapter, which takes them from what the engine hands to its attention backend,
and never from the scheduler's account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from preempt_engine.exact import EOS_TOKEN_ID, ExactCache, combine_digests
from preempt_harness import record
from preempt_harness.adapters.listening import common_length

VOCAB_SIZE = 64
END_TOKEN_ID = EOS_TOKEN_ID


@dataclass(frozen=True)
class Row:
    """One sequence's share of a step, as a rank's attention backend is given it.

    Attributes:
        seq: "request.0".
        start: position of the first token.
        token_ids: to be computed.
        slots: where each is written, block * block size + offset.
        table: the block table.
        read_len: positions [0, read_len) are read.
        num_logits: so many of the last positions give logits.

    Nobody may change the lists later: tokens and slots stand in the record as they are.
    """

    seq: str
    start: int
    token_ids: list[int]
    slots: list[int]
    table: list[int]
    read_len: int
    num_logits: int = 1


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions [start, end) through a block table.

    Raises:
        IndexError: the table is too short.
    """
    return [
        table[position // block_size] * block_size + position % block_size
        for position in range(start, end)
    ]


class ExactWorkers:
    """The exact KV model behind every rank.

    Args:
        num_blocks, block_size: of the pool, blocks that nobody can have included.
        num_ranks: each has a cache of its own.
    """

    def __init__(self, num_blocks: int, block_size: int, num_ranks: int = 1) -> None:
        self._caches = [ExactCache(num_blocks, block_size, salt=rank) for rank in range(num_ranks)]
        self._tables: list[dict[str, list[int]]] = [{} for _ in range(num_ranks)]

    def compute(
        self,
        step: int,
        rows_of_rank: Sequence[Sequence[Row]],
        add: Callable[[record.Computed], None],
    ) -> list[list[int]]:
        """All rows write, then all read, in each rank.

        Args:
            step: its number.
            rows_of_rank: per rank, the same sequences in the same order.
            add: takes a `Computed` event a row, before anything is computed.

        Returns:
            Per row, a greedy token for each of its logits.

        Raises:
            IndexError: a row names a block or a position that is not there.
        """
        for rank, rows in enumerate(rows_of_rank):
            for row in rows:
                add(self._computed(step, rank, row))
        shares: list[list[int]] = []
        for cache, rows in zip(self._caches, rows_of_rank, strict=True):
            for row in rows:
                cache.write(row.seq, row.start, row.token_ids, row.slots, row.table)
            digests: list[int] = []
            for row in rows:
                first = row.read_len - row.num_logits
                digests += cache.read(row.seq, row.read_len, row.table, first)
            shares.append(digests)
        tokens = [digest % VOCAB_SIZE for digest in combine_digests(shares)]
        chosen = []
        for row in rows_of_rank[0]:
            chosen.append(tokens[: row.num_logits])
            tokens = tokens[row.num_logits :]
        return chosen

    def _computed(self, step: int, rank: int, row: Row) -> record.Computed:
        tables, table = self._tables[rank], row.table
        before = tables.get(row.seq, [])
        keep = len(before)
        if table != before:
            keep = common_length(before, table)
            tables[row.seq] = list(table)
        return record.Computed(
            step,
            rank,
            row.seq,
            row.start,
            token_ids=row.token_ids,
            written_slots=row.slots,
            table_keep=keep,
            table_new=table[keep:],
            read_len=row.read_len,
        )
