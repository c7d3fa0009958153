"""KVSan of steady steps: whole runs of slots compared with what they should be, and written.

Owns the conditions under which nothing can be wrong with any of the steps, and what the steps leave
behind then. It names no mistake: where one condition fails, the steps are judged one by one, by
`sanitizer.py`, as if this file did not exist.

A row is sound when the table it reads through is the one it had, or has new blocks at its end, or
is the first of a stay; all that lies before it was read and found right, or came as a prefix hit
and is right; its tokens are its own and known by then; every slot is the table's; and the blocks it
writes are its sequence's alone, by the tables of the workers and of the scheduler. Then no row
touches what another one reads, and their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from preempt_harness.checks._kvsan_state import BlockIndex, Context, Reader
from preempt_harness.checks.shadow import Shadow, Write, slots_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import SchedulerTables, num_blocks_for


def is_sound(
    steps: SteadySteps,
    row: int,
    reader: Reader,
    told: Mapping[str, Sequence[int]],
    context: Context,
    shadow: Shadow,
    index: BlockIndex,
) -> bool:
    """Whether one row of the steps needs no closer look.

    Args:
        steps: of one rank.
        row: of them.
        reader: its sequence, as the rank knows it.
        told: sequence -> tokens that it is given after each step, one each.
        context, shadow, index: of the rank.
    """
    own, start, end = reader.tokens, steps.starts[row], steps.ends[row]
    coming = told.get(reader.seq, ())
    if (
        reader.dirty
        or reader.corrupt
        or len(own.ids) != own.num_known  # some are provisional
        or start + steps.lengths[row] > own.num_known
        or end > own.num_known + max(0, len(coming) - 1)
    ):
        return False
    size = context.block_size
    first, num_needed = start // size, num_blocks_for(end, size)
    token_ids, written = steps.computed_ids(row), steps.written_slots(row)
    table = _table(steps, row, reader)
    if table is None:
        return False
    blocks = table[first:num_needed]
    return (
        len(blocks) == num_needed - first
        and written == slots_of(blocks, start, end, size)
        and token_ids == [*own.ids[start:], *coming][: end - start]
        and min(token_ids) >= 0
        and max(token_ids) < (context.vocab_size or math.inf)
        and _are_its_alone(blocks, reader, context, index)
        and (
            _goes_on(start, table, num_needed, reader, context, shadow, index)
            if reader.indexed
            else _begins(start, table, num_needed, reader, context, shadow, index)
        )
    )


def added_blocks(steps: SteadySteps, row: int, reader: Reader) -> Sequence[int]:
    """Entries of a sound row's table that were not its reader's before the steps."""
    if reader.indexed:
        return steps.table_change(row)[1]
    return _table(steps, row, reader) or ()


def _table(steps: SteadySteps, row: int, reader: Reader) -> list[int] | None:
    """The table of the first step, None where it has lost entries that its reader has."""
    keep, new = steps.table_change(row)
    known = len(reader.table)
    if reader.indexed:
        if keep < known or (new and keep > known):
            return None
        return [*reader.table, *new] if new else reader.table
    return [*reader.table[:keep], *new] if keep <= known else None


def _goes_on(
    start: int,
    table: Sequence[int],
    num_needed: int,
    reader: Reader,
    context: Context,
    shadow: Shadow,
    index: BlockIndex,
) -> bool:
    """Whether a row that has computed before goes on where it stopped."""
    return (
        reader.verified == start
        and (not start or _last_read(reader, shadow) == reader.tokens.values[start - 1])
        and _owns(reader, table[reader.owned : num_needed], context.tables)
        and _are_unread(table[len(reader.table) :], context, index)
    )


def _begins(
    start: int,
    table: Sequence[int],
    num_needed: int,
    reader: Reader,
    context: Context,
    shadow: Shadow,
    index: BlockIndex,
) -> bool:
    """Whether a stay begins with the first row behind the prefix hits, whose content is right."""
    size, tables, values = context.block_size, context.tables, reader.tokens.values
    lease = None if tables is None else tables.leases.get(reader.seq)
    if (
        lease is None
        or reader.computed is not None
        or lease.num_cached * size != start
        or len(set(table)) != len(table)
        or not lease.born.keys() >= set(table[:num_needed])
        or not _are_unread(table[lease.num_cached :], context, index)
    ):
        return False
    for number, block in enumerate(table[: lease.num_cached]):
        if shadow.values(block) != values[number * size : (number + 1) * size]:
            return False
    return True


def go_on(
    steps: SteadySteps,
    row: int,
    reader: Reader,
    context: Context,
    shadow: Shadow,
    index: BlockIndex,
    tick: int,
) -> None:
    """What one sound row leaves behind; its tokens have been told."""
    added = added_blocks(steps, row, reader)
    if not reader.indexed:
        assert context.tables is not None
        reader.table, reader.indices, reader.indexed = [], {}, True
        reader.lease = context.tables.leases[reader.seq]
        reader.computed = steps.starts[row]
    for block in added:
        reader.table.append(block)
        index.add(reader, len(reader.table) - 1)
    start, end, length = steps.starts[row], steps.ends[row], steps.lengths[row]
    numbers = range(steps.step, steps.last_step + 1)
    writes = [Write(reader.seq, step, tick) for step in numbers]
    if length > 1 and len(writes) == 1:
        writes *= length
    elif length > 1:
        writes = list(chain.from_iterable([[write] * length for write in writes]))
    size, values, position = shadow.block_size, reader.tokens.values, start
    while position < end:
        entry, offset = divmod(position, size)
        stop = min(end, position - offset + size)
        held, part = shadow.slots(reader.table[entry]), slice(offset, offset + stop - position)
        held.values[part] = values[position:stop]
        held.writes[part] = writes[position - start : stop - start]
        position = stop
    reader.verified = end
    reader.owned = max(reader.owned, num_blocks_for(end, size))
    reader.extend_computed(start, end)


def _last_read(reader: Reader, shadow: Shadow) -> int:
    """Content of the last position that was read and found right."""
    index, offset = divmod(reader.verified - 1, shadow.block_size)
    return shadow.values(reader.table[index])[offset]


def _owns(reader: Reader, blocks: Sequence[int], tables: SchedulerTables | None) -> bool:
    """Whether the scheduler gave the sequence the blocks; true where its account is not seen."""
    if tables is None:
        return True
    lease = tables.leases.get(reader.seq)
    if lease is None or lease is not reader.lease or reader.computed is None:
        return False
    return lease.born.keys() >= set(blocks)


def _are_its_alone(
    blocks: Sequence[int], reader: Reader, context: Context, index: BlockIndex
) -> bool:
    """Whether blocks are in the pool, and by either account no other table has them."""
    references = {} if context.tables is None else context.tables.refs
    for block in blocks:
        own = reader.indices.get(block, 0)
        if (
            not 0 <= block < context.num_blocks
            or own > 1
            or len(index.entries.get(block, ())) > own
            or references.get(block, 0) > 1
        ):
            return False
    return True


def _are_unread(blocks: Sequence[int], context: Context, index: BlockIndex) -> bool:
    """Whether new entries are blocks of the pool that no table has, each named once."""
    if len(set(blocks)) != len(blocks):
        return False
    return not any(
        not 0 <= block < context.num_blocks or index.entries.get(block) for block in blocks
    )
