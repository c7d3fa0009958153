"""Triton programs of paged attention: keys in tiles, tiles in splits, splits merged in order.

    positions   | tile | tile | tile | tile | tile | tile | tile ...
    splits      |          split 0          |      split 1      ...

A query row's result is a fold over its splits, and a split's over its tiles, each in order of
position and from a fresh start. Tiles and splits lie at fixed positions, so it does not matter how
many there are, which of them one program takes, or what else is in the batch: one that a row does
not see changes nothing. Only `attend` adds up products, with the same tile shapes for decode,
chunk and prefill; merging is elementwise, and has the same bits wherever it is done as long as
multiplications and additions are not fused (the launcher sees to that).

Query rows are tiled by position as well. Row `position * slots + head` of a sequence, `slots`
being the query heads of a KV head rounded up to a power of two, is row `... % rows` of tile
`... // rows`; a query stands at the same place of its tile whichever chunk brings it, so nothing
is asked of the matrix unit but to compute a product twice in the same way.

Sources: fixed split sizes for batch invariance, He et al., "Defeating Nondeterminism in LLM
Inference", 2025; the partial softmax, Milakov and Gimelshein, 2018, and Dao et al., 2022 and 2023;
keys through a block table, Kwon et al., 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(highest, total, output, other_highest, other_total, other_output):
    """Two parts of a softmax-weighted sum as one: scores' maximum, sum of weights, sum of values.

    A part that saw nothing has maximum -inf and zeros, and leaves the other as it is.
    """
    joint = tl.maximum(highest, other_highest)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    kept = tl.exp(highest - base)
    added = tl.exp(other_highest - base)
    total = total * kept + other_total * added
    output = output * kept[:, None] + other_output * added[:, None]
    return joint, total, output


@triton.jit
def attend_split(
    query,
    positions,
    keys,
    values,
    table,
    first,
    last,
    read_len,
    window,
    slot_stride,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
):
    """Positions [first, last) of one split; `first` is the start of a tile.

    Args:
        query: float32 [rows, dim], scaled.
        positions: int32 [rows]; -1 for a row that is none.
        keys, values: the KV head's first element in slot 0.
        table: the sequence's block table.
    """
    dims = tl.arange(0, dim)
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    output = tl.zeros([rows, dim], tl.float32)
    for start in range(first, last, tile):
        at = start + tl.arange(0, tile)
        inside = at < read_len
        blocks = tl.load(table + at // block_size, mask=inside, other=0).to(tl.int64)
        slots = (blocks * block_size + at % block_size) * slot_stride  # [tile]
        stored = inside[:, None] & (dims < head_dim)[None, :]  # [tile, dim]
        key = tl.load(keys + slots[:, None] + dims[None, :], mask=stored, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(tl.float32)), input_precision="ieee")
        seen = inside[None, :] & (at[None, :] <= positions[:, None])  # [rows, tile]
        seen = seen & (at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        tile_highest = tl.max(scores, 1)
        base = tl.where(tile_highest == float("-inf"), 0.0, tile_highest)
        weights = tl.exp(scores - base[:, None])
        value = tl.load(values + slots[:, None] + dims[None, :], mask=stored, other=0.0)
        weighted = tl.dot(weights, value.to(tl.float32), input_precision="ieee")
        highest, total, output = merge(
            highest, total, output, tile_highest, tl.sum(weights, 1), weighted
        )
    return highest, total, output


# Arguments that change from step to step; a variant for each kind of number would be compiled.
@triton.jit(do_not_specialize=["window", "table_stride"])
def attend(
    query,
    keys,
    values,
    tables,
    query_start,
    read_lens,
    items,
    partial_output,
    partial_highest,
    partial_total,
    scale,
    window,
    query_stride,
    table_stride,
    slot_stride,
    num_kv_heads,
    group: tl.constexpr,
    slots: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    split: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
):
    """One work item, one KV head: some splits for one tile of query rows, merged into one part.

    Args:
        query: [T', H, head_dim] with stride `query_stride` between tokens.
        keys, values: [num_slots, H_kv, head_dim].
        tables: int32 [N, B].
        query_start: int32 [N + 1].
        read_lens: int32 [N].
        items: int32 [W, 4]: sequence, row tile counted from that of its first query, first
            split, one past the last split.
        partial_output: float32 [W, H_kv, rows, dim].
        partial_highest, partial_total: float32 [W, H_kv, rows].
    """
    item, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(items + item * 4)
    tile_index = tl.load(items + item * 4 + 1)
    first_split = tl.load(items + item * 4 + 2)
    last_split = tl.load(items + item * 4 + 3)
    read_len = tl.load(read_lens + sequence)
    if first_split * split >= read_len:
        return  # a table wider than this sequence needs: nothing to read, and nobody asks for it
    token = tl.load(query_start + sequence)
    start = read_len - (tl.load(query_start + sequence + 1) - token)  # position of its first query
    row = (start * slots // rows + tile_index) * rows + tl.arange(0, rows)
    position, head = row // slots, row % slots
    real = (position >= start) & (position < read_len) & (head < group)
    positions = tl.where(real, position, -1)
    dims = tl.arange(0, dim)
    offsets = (token + position - start).to(tl.int64) * query_stride
    offsets += (kv_head * group + head) * head_dim
    query_tile = tl.load(
        query + offsets[:, None] + dims[None, :],
        mask=real[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    )
    query_tile = query_tile.to(tl.float32) * scale
    last_split = tl.minimum(last_split, tl.cdiv(read_len, split))
    # What the rows see together: [lowest, highest_end).
    highest_end = tl.max(positions, 0) + 1
    lowest = tl.maximum(tl.maximum(tl.min(position, 0), start) - window + 1, 0)
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    output = tl.zeros([rows, dim], tl.float32)
    for index in range(first_split, last_split):
        first = tl.maximum(index * split, lowest // tile * tile)
        last = tl.minimum((index + 1) * split, highest_end)
        split_highest, split_total, split_output = attend_split(
            query_tile,
            positions,
            keys + kv_head * head_dim,
            values + kv_head * head_dim,
            tables + sequence.to(tl.int64) * table_stride,
            first,
            last,
            read_len,
            window,
            slot_stride,
            block_size,
            tile,
            rows,
            head_dim,
            dim,
        )
        highest, total, output = merge(
            highest, total, output, split_highest, split_total, split_output
        )
    part = (item * num_kv_heads + kv_head).to(tl.int64) * rows + tl.arange(0, rows)  # [rows]
    tl.store(partial_output + part[:, None] * dim + dims[None, :], output)
    tl.store(partial_highest + part, highest)
    tl.store(partial_total + part, total)


@triton.jit
def finish(
    partial_output,
    partial_highest,
    partial_total,
    query_start,
    read_lens,
    row_tiles,
    result,
    num_kv_heads,
    num_heads,
    group: tl.constexpr,
    slots: tl.constexpr,
    split: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dim: tl.constexpr,
):
    """Merge the parts of one tile of query rows in order of position, and divide.

    Args:
        partial_output, partial_highest, partial_total: as `attend` left them.
        row_tiles: int32 [R, 4]: sequence, row tile as in `attend`, first part, one past the last.
            Parts are as many as splits, or one.
        result: [T', H, head_dim].
    """
    row_tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(row_tiles + row_tile * 4)
    tile_index = tl.load(row_tiles + row_tile * 4 + 1)
    first_part = tl.load(row_tiles + row_tile * 4 + 2)
    last_part = tl.load(row_tiles + row_tile * 4 + 3)
    read_len = tl.load(read_lens + sequence)
    last_part = tl.minimum(last_part, first_part + tl.cdiv(read_len, split))
    dims = tl.arange(0, dim)
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    output = tl.zeros([rows, dim], tl.float32)
    for item in range(first_part, last_part):
        part = (item * num_kv_heads + kv_head).to(tl.int64) * rows + tl.arange(0, rows)
        highest, total, output = merge(
            highest,
            total,
            output,
            tl.load(partial_highest + part),
            tl.load(partial_total + part),
            tl.load(partial_output + part[:, None] * dim + dims[None, :]),
        )
    token = tl.load(query_start + sequence)
    start = read_len - (tl.load(query_start + sequence + 1) - token)
    row = (start * slots // rows + tile_index) * rows + tl.arange(0, rows)
    position, head = row // slots, row % slots
    real = (position >= start) & (position < read_len) & (head < group)
    heads = kv_head * group + head
    offsets = ((token + position - start).to(tl.int64) * num_heads + heads) * head_dim
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        result + offsets[:, None] + dims[None, :],
        output.to(result.dtype.element_ty),
        mask=real[:, None] & (dims < head_dim)[None, :],
    )
