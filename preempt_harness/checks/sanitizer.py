"""KVSan of one rank: applies a step's writes to shadow memory and judges its reads.

    phase 1  block tables change; who holds which block is compared with the scheduler's leases
    phase 2  all rows of the step write            (a forward pass writes a layer's KV first ...)
    phase 3  all rows of the step read [0, end)    (... and attends afterwards)

Reads are judged incrementally. A position that was right stays right until its block is written,
copied to, swapped or poisoned, its table entry changes, or its own token turns out to be another;
each of these marks what must be read again. The cost of a step is in proportion to the tokens
scheduled, the table entries changed and the blocks invalidated, whatever the context's length.
`full` reads every position of every row instead, and is the reference for the incremental way.

Most rows are of one token and as they should be: the sequence's own token, into its own slot, after
the content that its own history leads to. Incrementally, such a row is recognised by a handful of
comparisons (`_write_rows`), and so is a read that only its own write can have changed
(`_read_rows`); whatever is not like that takes the long way, which names what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from preempt_harness.checks._kvsan_state import (
    BlockIndex,
    Context,
    Reader,
    classify_bad_read,
)
from preempt_harness.checks._kvsan_steady import added_blocks, go_on, is_sound
from preempt_harness.checks.chain import UNWRITTEN, extend, root
from preempt_harness.checks.finding import Code
from preempt_harness.checks.own_tokens import OwnTokens
from preempt_harness.checks.shadow import Shadow, Write, slots_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import SHARED, Lease, num_blocks_for
from preempt_harness.checks.trace import ComputedRows
from preempt_harness.record import Computed


class RankSanitizer:
    """Shadow memory and readers of one rank."""

    def __init__(self, rank: int, context: Context) -> None:
        self.rank = rank
        self._num_operations = 0
        self._context = context
        self._shadow = Shadow(context.block_size)
        self._readers: dict[str, Reader] = {}
        self._index = BlockIndex()

    @property
    def num_operations(self) -> int:
        """Slots written and read, entries compared, blocks invalidated."""
        return self._num_operations + self._index.num_operations

    # What happens to sequences ----------------------------------------------------------------

    def deliver(self, seqs: Iterable[str], token_ids: Iterable[Sequence[int]]) -> None:
        """Real tokens arrived; provisional ones that were others must not be read any more."""
        readers = self._readers
        for seq, own_ids in zip(seqs, token_ids, strict=True):
            reader = readers.get(seq)
            if reader is None:
                continue
            changed = reader.tokens.deliver(own_ids)
            if changed is not None:
                reader.verified = min(reader.verified, changed)

    def lose_blocks(self, seq: str, keeps_contents: bool = False) -> None:
        """The sequence gave up its blocks; whatever it reads next is to be verified from 0.

        Args:
            keeps_contents: they were swapped out, so that what was computed is still computed.
        """
        reader = self._readers.get(seq)
        if reader is None:
            return
        self._index.remove(reader, 0)
        reader.forget(keeps_contents)

    # What happens to blocks ---------------------------------------------------------------------

    def poison(self, step: int, blocks: Sequence[int], tick: int) -> None:
        """The worker overwrote blocks with the poison pattern."""
        valid = self._valid_blocks(step, blocks, "poisons")
        for block in valid:
            self._check_unused(step, block)
        self._shadow.poison(valid, Write("", step, tick))
        self._index.mark(valid)

    def _check_unused(self, step: int, block: int) -> None:
        """Nobody has the block, by both accounts, since a step before this one.

        One account alone may lag behind the other where steps are decided ahead.
        """
        tables = self._context.tables
        holders = [
            seq
            for seq in dict.fromkeys(seq for seq, _ in self._index.entries.get(block, ()))
            if tables is not None and tables.has_held(seq, block, step)
        ]
        if not holders:
            return
        self._context.listing.report(
            Code.KVSAN_SHARED_WRITE,
            step,
            f"the worker poisons block {block} as free, which {', '.join(holders)} has",
            once=block,
            seq=holders[0],
            block=block,
            rank=self.rank,
        )
        self._context.spoiled.add(block)

    def copy(self, step: int, pairs: Sequence[tuple[int, int]], tick: int) -> None:
        """The worker copied device blocks."""
        valid = self._valid_pairs(step, pairs, source=True, target=True)
        self._shadow.copy(valid, tick)
        self._index.mark(target for _, target in valid)

    def swap_out(self, step: int, pairs: Sequence[tuple[int, int]], tick: int) -> None:
        """The worker copied device blocks to the host."""
        self._shadow.swap_out(self._valid_pairs(step, pairs, source=True, target=False), tick)

    def swap_in(self, step: int, pairs: Sequence[tuple[int, int]], tick: int) -> None:
        """The worker copied host blocks to the device."""
        valid = self._valid_pairs(step, pairs, source=False, target=True)
        self._shadow.swap_in(valid, tick)
        self._index.mark(target for _, target in valid)

    # A step -------------------------------------------------------------------------------------

    def compute(self, rows: ComputedRows, tick: int) -> None:
        """All rows of one step."""
        readers = self._take_tables(rows)
        writes = [Write(seq, rows.step, tick) for seq in rows.seqs]
        order = self._write_order(rows, readers)
        if self._context.full:
            for index in order:
                self._write(rows.rows[index], readers[index], writes[index])
            for row, reader, write in zip(rows.rows, readers, writes, strict=True):
                self._read(row, reader, write)
        else:
            self._write_rows(rows, readers, writes, order)
            self._read_rows(rows, readers, writes)

    def goes_on(self, steps: SteadySteps, told: Mapping[str, Sequence[int]]) -> bool:
        """Whether nothing can be wrong with steady steps after which these tokens are told."""
        for row, seq in enumerate(steps.seqs):
            reader = self._readers.get(seq) or self._reader(seq)
            if not is_sound(steps, row, reader, told, self._context, self._shadow, self._index):
                return False
        added = [
            block
            for row, seq in enumerate(steps.seqs)
            for block in added_blocks(steps, row, self._readers[seq])
        ]
        return len(set(added)) == len(added)

    def go_on(self, steps: SteadySteps, tick: int) -> None:
        """Take in steps of which `goes_on` was true, after their tokens."""
        self._num_operations += 2 * steps.num_tokens
        for row, seq in enumerate(steps.seqs):
            reader = self._readers[seq]
            go_on(steps, row, reader, self._context, self._shadow, self._index, tick)

    def _reader(self, seq: str) -> Reader:
        reader = self._readers.get(seq)
        if reader is None:
            known = self._context.known.get(seq, [])
            reader = self._readers[seq] = Reader(seq, OwnTokens(known))
        return reader

    # Phase 1 --------------------------------------------------------------------------------------

    def _take_tables(self, rows: ComputedRows) -> list[Reader]:
        tables, size, full = self._context.tables, self._context.block_size, self._context.full
        readers = [self._readers.get(seq) or self._reader(seq) for seq in rows.seqs]
        for row, reader in zip(rows.rows, readers, strict=True):
            if row.table_new or row.table_keep < len(reader.table) or not reader.indexed:
                self._change_table(row, reader)
        if tables is not None:
            leases = tables.leases_at(rows.step, rows.seqs)
            for index, (reader, lease, end) in enumerate(
                zip(readers, leases, rows.ends, strict=True)
            ):
                if lease is not reader.lease or end > reader.owned * size or full:
                    self._check_lease(rows.rows[index], reader, lease)
        return readers

    def _change_table(self, row: Computed, reader: Reader) -> None:
        keep = min(row.table_keep, len(reader.table))
        if not reader.indexed:
            reader.table = reader.table[:keep] + row.table_new
            reader.indices = {}
            reader.indexed = True
            self._add_to_index(reader, 0, row.step)
        else:
            self._index.remove(reader, keep)
            reader.table[keep:] = row.table_new
            reader.verified = min(reader.verified, keep * self._context.block_size)
            reader.owned = min(reader.owned, keep)
            self._add_to_index(reader, keep, row.step)

    def _add_to_index(self, reader: Reader, start: int, step: int) -> None:
        for index in range(start, len(reader.table)):
            block = reader.table[index]
            if not 0 <= block < self._context.num_blocks:
                self._report(
                    reader,
                    Code.KVSAN_ID_RANGE,
                    step,
                    f"entry {index} of its block table is {block}; the pool has blocks 0 to "
                    f"{self._context.num_blocks - 1}",
                    block=block,
                )
            if not self._index.add(reader, index):
                self._report(
                    reader,
                    Code.KVSAN_DOUBLE_MAP,
                    step,
                    f"its block table names block {block} at {reader.table.index(block)} and "
                    f"again at {index}",
                    block=block,
                    position=index * self._context.block_size,
                )

    def _check_lease(self, row: Computed, reader: Reader, lease: Lease | None) -> None:
        """Every block that the row touches must be the sequence's by the scheduler's account."""
        if reader.computed is None:
            first = lease.num_cached * self._context.block_size if lease is not None else row.start
            reader.computed = first
        if lease is not reader.lease or lease is None or self._context.full:
            reader.owned = 0
            reader.lease = lease
        end = row.start + len(row.token_ids)
        needed = min(num_blocks_for(end, self._context.block_size), len(reader.table))
        for index in range(reader.owned, needed):
            self._num_operations += 1
            block = reader.table[index]
            if lease is None or block not in lease.born:
                self._report_foreign_block(row, reader, index, block)
                break
        reader.owned = needed

    def _report_foreign_block(self, row: Computed, reader: Reader, index: int, block: int) -> None:
        assert self._context.tables is not None
        holders = self._context.tables.holders(block)
        owner = f"{', '.join(holders)} holds it" if holders else "nobody holds it"
        position = index * self._context.block_size
        self._report(
            reader,
            Code.KVSAN_USE_AFTER_FREE,
            row.step,
            f"the worker uses block {block} for positions from {position}, but by the "
            f"scheduler's account the sequence does not hold it and {owner}",
            block=block,
            position=position,
        )

    # Phase 2 --------------------------------------------------------------------------------------

    def _write_order(self, rows: ComputedRows, readers: Sequence[Reader]) -> Iterable[int]:
        """Rows such that a row comes after the one that writes what it continues from.

        A row continues from position start - 1; when that slot is written in the same step by
        another row (a prefix hit on a block that is being filled), that row writes first.
        """
        if len(readers) == 1:
            return (0,)
        before = self._slots_before(rows, readers)
        if set().union(*[row.written_slots for row in rows.rows]).isdisjoint(before):
            return range(len(before))
        writers = {slot: index for index, row in enumerate(rows.rows) for slot in row.written_slots}
        order: dict[int, None] = {}
        for index in range(len(before)):
            path: list[int] = []
            current: int | None = index
            while current is not None and current not in order and current not in path:
                path.append(current)
                slot = before[current]
                current = writers.get(slot) if slot is not None else None
            order.update(dict.fromkeys(reversed(path)))
        return order

    def _slots_before(self, rows: ComputedRows, readers: Sequence[Reader]) -> list[int | None]:
        """The slot that each row continues from; None where there is none."""
        size = self._context.block_size
        before: list[int | None] = []
        for reader, start in zip(readers, rows.starts, strict=True):
            index, offset = divmod(start - 1, size)
            table = reader.table
            before.append(table[index] * size + offset if 0 <= index < len(table) else None)
        return before

    def _slot_of(self, reader: Reader, position: int) -> int | None:
        index, offset = divmod(position, self._context.block_size)
        if not 0 <= index < len(reader.table):
            return None
        return reader.table[index] * self._context.block_size + offset

    def _write_rows(
        self,
        rows: ComputedRows,
        readers: Sequence[Reader],
        writes: Sequence[Write],
        order: Iterable[int],
    ) -> None:
        """`_write` each row; for tokens that are as they should be, without the long way."""
        context, device, entries = self._context, self._shadow.device, self._index.entries
        size, num_blocks = context.block_size, context.num_blocks
        vocab_size = context.vocab_size or math.inf
        references = {} if context.tables is None else context.tables.refs
        for row_index in order:
            row, reader = rows.rows[row_index], readers[row_index]
            own, table, position = reader.tokens, reader.table, row.start
            index, offset = divmod(position, size)
            if (
                len(row.token_ids) == 1 == len(row.written_slots)
                and position < len(own.ids)
                and row.token_ids[0] == (token_id := own.ids[position])
                and 0 <= token_id < vocab_size
                and index < len(table)
                and 0 <= (block := table[index]) < num_blocks
                and row.written_slots[0] == block * size + offset
                and references.get(block, 0) < 2
                and (slots := device.get(block)) is not None
                and (
                    slots.values[offset - 1] == own.values[position - 1]
                    if offset
                    else self._continued_from(row, reader) == own.value_before(position)
                )
            ):
                self._num_operations += 1
                slots.values[offset] = own.values[position]
                slots.writes[offset] = writes[row_index]
                if reader.verified > position:
                    reader.verified = position
                if len(entries[block]) > 1:
                    self._index.mark((block,), but=reader)
            elif not self._write_run(row, reader, writes[row_index]):
                self._write(row, reader, writes[row_index])

    def _write_run(self, row: Computed, reader: Reader, write: Write) -> bool:
        """`_write` tokens that are all as they should be, block by block; False if one is not."""
        context, own, token_ids = self._context, reader.tokens, row.token_ids
        size, start, end = context.block_size, row.start, row.start + len(row.token_ids)
        first = start // size
        blocks = reader.table[first : num_blocks_for(end, size)]
        if (
            not token_ids
            or own.ids[start:end] != token_ids
            or min(token_ids) < 0
            or max(token_ids) >= (context.vocab_size or math.inf)
            or not all(0 <= block < context.num_blocks for block in blocks)
            or self._continued_from(row, reader) != own.value_before(start)
        ):
            return False
        if slots_of(blocks, start, end, size) != row.written_slots:
            return False
        if context.tables is not None:
            references = context.tables.refs
            if any(references.get(block, 0) > 1 for block in blocks):
                return False
        self._num_operations += len(token_ids)
        reader.verified = min(reader.verified, start)
        position = start
        for block in blocks:
            offset = position % size
            stop = min(end, position - offset + size)
            held, part = self._shadow.slots(block), slice(offset, offset + stop - position)
            held.values[part] = own.values[position:stop]
            held.writes[part] = [write] * (stop - position)
            position = stop
        self._index.mark(blocks, but=reader)
        return True

    def _write(self, row: Computed, reader: Reader, write: Write) -> None:
        context = self._context
        previous = self._continued_from(row, reader)
        reader.verified = min(reader.verified, row.start)
        touched: set[int] = set()
        astray: set[int] = set()
        for index, token_id in enumerate(row.token_ids):
            self._num_operations += 1
            position = row.start + index
            self._check_token(row, reader, position, token_id)
            previous = extend(previous, token_id, position)
            expected = self._slot_of(reader, position)
            slot = row.written_slots[index] if index < len(row.written_slots) else None
            if slot is None or slot != expected:
                self._report_wrong_slot(row, reader, position, slot, expected)
            if slot is not None and 0 <= slot < context.num_blocks * context.block_size:
                block, offset = divmod(slot, context.block_size)
                slots = self._shadow.slots(block)
                self._check_shared(row, reader, position, slot, previous)
                slots.values[offset] = previous
                slots.writes[offset] = write
                (touched if slot == expected else astray).add(block)
            if slot != expected:
                previous = UNWRITTEN if expected is None else self._shadow.read(expected)
        if len(row.written_slots) > len(row.token_ids):
            extra = row.written_slots[len(row.token_ids)]
            self._report_wrong_slot(row, reader, row.start + len(row.token_ids), extra, None)
        self._index.mark(touched, but=reader)
        self._index.mark(astray)

    def _continued_from(self, row: Computed, reader: Reader) -> int:
        if row.start == 0:
            return root()
        slot = self._slot_of(reader, row.start - 1)
        return UNWRITTEN if slot is None else self._shadow.read(slot)

    def _check_token(self, row: Computed, reader: Reader, position: int, token_id: int) -> None:
        vocab_size = self._context.vocab_size
        own = reader.tokens.propose(position, token_id)
        if own and token_id >= 0 and not (vocab_size and token_id >= vocab_size):
            return
        what = (
            "which is no token of the vocabulary"
            if own
            else f"where the sequence's own token is {reader.tokens.ids[position]}"
        )
        self._report(
            reader,
            Code.KVSAN_TOKEN_MISMATCH,
            row.step,
            f"the worker computes token {token_id} at position {position}, {what}",
            position=position,
        )

    def _report_wrong_slot(
        self, row: Computed, reader: Reader, position: int, slot: int | None, expected: int | None
    ) -> None:
        where = "to no slot" if slot is None else f"to slot {slot}"
        right = (
            f"its block table has only {len(reader.table)} blocks of {self._context.block_size}"
            if expected is None
            else f"its block table says slot {expected}"
        )
        self._report(
            reader,
            Code.KVSAN_WRONG_SLOT,
            row.step,
            f"position {position} is written {where}, but {right}",
            position=position,
            block=None if slot is None else slot // self._context.block_size,
        )
        if slot is not None and 0 <= slot < self._context.num_blocks * self._context.block_size:
            self._context.spoiled.add(slot // self._context.block_size)

    def _check_shared(
        self, row: Computed, reader: Reader, position: int, slot: int, value: int
    ) -> None:
        """Nobody writes new content to a block that others rely on.

        Its first owner may still fill slots that it has not filled: blocks are often offered to
        the prefix cache in the step that computes them.
        """
        tables = self._context.tables
        block, offset = divmod(slot, self._context.block_size)
        if tables is None or tables.refs.get(block, 0) < 2 or reader.lease is None:
            return
        slots = self._shadow.slots(block)
        before = slots.writes[offset]
        born = reader.lease.born.get(block, SHARED)
        if born != SHARED and (before is None or before.tick < born or before.seq == ""):
            return
        # A swap brings back whole blocks, and with them what lies in slots not filled yet.
        if born != SHARED and position >= (reader.computed or 0):
            return
        if slots.values[offset] == value:
            return
        others = [seq for seq in tables.holders(block) if seq != row.seq]
        self._context.listing.report(
            Code.KVSAN_SHARED_WRITE,
            row.step,
            f"position {position} is written to block {block}, which "
            f"{', '.join(others) or 'another entry'} shares; it should be copied first",
            once=block,
            seq=reader.seq,
            position=position,
            block=block,
            rank=self.rank,
        )
        self._context.spoiled.add(block)

    # Phase 3 --------------------------------------------------------------------------------------

    def _read_rows(
        self, rows: ComputedRows, readers: Sequence[Reader], writes: Sequence[Write]
    ) -> None:
        """`_read` each row; where only the last position is new, without the long way."""
        size, device = self._context.block_size, self._shadow.device
        for row, reader, write, end in zip(rows.rows, readers, writes, rows.ends, strict=True):
            own, position = reader.tokens, row.start
            index = position // size
            if (
                reader.verified == position == end - 1
                and row.read_len == end <= len(own.values)
                and not reader.dirty
                and index < len(reader.table)
                and (slots := device.get(reader.table[index])) is not None
                and slots.values[position % size] == own.values[position]
            ):
                self._num_operations += 1
                reader.verified = end
                if reader.computed == position:
                    reader.computed = end
                else:
                    reader.extend_computed(position, end)
                if reader.corrupt:
                    write.tainted = True
            else:
                self._read(row, reader, write)

    def _read(self, row: Computed, reader: Reader, write: Write) -> None:
        end = row.start + len(row.token_ids)
        if row.read_len != end:
            self._report_read_len(row, reader, end)
        block_size = self._context.block_size
        limit = min(row.read_len, end, len(reader.table) * block_size, len(reader.tokens.values))
        reader.verified = min(reader.verified, limit)
        for index in self._to_verify(reader, limit):
            first = self._first_bad(reader, index, limit)
            if first is not None and index not in reader.bad:
                reader.bad.add(index)
                self._judge(row, reader, first)
        reader.verified = limit
        reader.dirty.clear()
        reader.extend_computed(row.start, end)
        write.tainted = reader.corrupt

    def _to_verify(self, reader: Reader, limit: int) -> Iterable[int]:
        """Table indices to read, ascending."""
        block_size = self._context.block_size
        end = num_blocks_for(limit, block_size)
        if self._context.full:
            return range(end)
        start = reader.verified // block_size
        again = sorted(index for index in reader.dirty if index < start)
        return [*again, *range(start, end)]

    def _first_bad(self, reader: Reader, index: int, limit: int) -> int | None:
        """First position of the table's entry that does not hold the reader's own history."""
        block_size = self._context.block_size
        first = index * block_size
        last = min(first + block_size, limit)
        expected = reader.tokens.values[first:last]
        self._num_operations += last - first
        block = reader.table[index]
        found = self._shadow.slots(block).values
        if found[: last - first] == expected:
            return None
        return first + next(
            offset for offset, value in enumerate(expected) if found[offset] != value
        )

    def _judge(self, row: Computed, reader: Reader, position: int) -> None:
        index, offset = divmod(position, self._context.block_size)
        block = reader.table[index]
        slots = self._shadow.slots(block)
        value, write = slots.values[offset], slots.writes[offset]
        explained = block in self._context.spoiled or (write is not None and write.tainted)
        if reader.corrupt or explained:
            reader.corrupt = True
            self._context.listing.count("bad reads that follow from a listed finding")
            return
        code, detail = classify_bad_read(row.start, reader, position, block, value, write)
        self._report(
            reader,
            code,
            row.step,
            f"position {position} is read from block {block}, but {detail}",
            position=position,
            block=block,
        )

    def _report_read_len(self, row: Computed, reader: Reader, end: int) -> None:
        what = (
            f"positions [{end}, {row.read_len}) are not computed yet"
            if row.read_len > end
            else f"positions [{row.read_len}, {end}) are left out"
        )
        self._context.listing.report(
            Code.KVSAN_READ_LEN,
            row.step,
            f"attention reads {row.read_len} positions where the sequence has {end}: {what}",
            once=(reader.seq, reader.incarnation),
            seq=reader.seq,
            position=min(end, row.read_len),
            rank=self.rank,
        )

    # Helpers --------------------------------------------------------------------------------------

    def _report(
        self,
        reader: Reader,
        code: Code,
        step: int,
        what: str,
        position: int | None = None,
        block: int | None = None,
    ) -> None:
        """List the first finding of an incarnation that explains wrong contents from here on."""
        if reader.corrupt:
            return
        reader.corrupt = True
        self._context.listing.report(
            code,
            step,
            what,
            once=(reader.seq, reader.incarnation),  # the same on another rank
            seq=reader.seq,
            position=position,
            block=block,
            rank=self.rank,
        )

    def _valid_blocks(self, step: int, blocks: Sequence[int], verb: str) -> list[int]:
        valid = []
        for block in blocks:
            if 0 <= block < self._context.num_blocks:
                valid.append(block)
                continue
            self._context.listing.report(
                Code.KVSAN_ID_RANGE,
                step,
                f"rank {self.rank} {verb} block {block}; the pool has blocks 0 to "
                f"{self._context.num_blocks - 1}",
                once=block,
                block=block,
                rank=self.rank,
            )
        return valid

    def _valid_pairs(
        self, step: int, pairs: Sequence[tuple[int, int]], *, source: bool, target: bool
    ) -> list[tuple[int, int]]:
        """Pairs whose device blocks exist; `source` and `target` say which side is the device."""
        valid = []
        for pair in pairs:
            device = [
                block for block, on_device in zip(pair, (source, target), strict=True) if on_device
            ]
            if len(self._valid_blocks(step, device, "copies")) == len(device):
                valid.append(pair)
        return valid
