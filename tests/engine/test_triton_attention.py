"""The Triton attention backend: on a GPU if there is one, else in Triton's interpreter.

The interpreter takes about a second for a small step, so shapes stay small and examples few.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attention_batches import Batch, Heads, lay_out, random_sequence
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from preempt_engine.attention.protocol import AttentionBackend, DecodeBuffers, GraphAttention
from preempt_engine.attention.torch_paged import TorchPagedAttention
from preempt_engine.attention.triton_paged import TritonAttention
from preempt_engine.kernels import attention as launcher

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Float32 against float64: one rounding is 6e-8 of values of magnitude 1, sums have 300 terms.
_TOLERANCE = 1e-5
# bfloat16 keeps 8 bits, and Triton's interpreter cuts the others off instead of rounding.
_BFLOAT16_ULP = 2.0**-7
# Shrinking would take minutes here; the first counterexample is small enough to read.
_QUICK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    max_examples=20,
)
Chunk = tuple[int, int]

_heads = st.sampled_from(
    [
        Heads(1, 1, 16),
        Heads(4, 2, 8),
        Heads(6, 2, 12),
        Heads(5, 1, 24),
        Heads(3, 3, 32),
        Heads(18, 1, 16),
    ]
)
_block_sizes = st.one_of(st.integers(1, 20), st.sampled_from([32, 100, 255, 256]))
_windows = st.sampled_from([None, None, 1, 7, 64, 200])


def _chunk(draw: st.DrawFn) -> Chunk:
    """Decode, a chunk, or a whole prompt; now and then beyond a split."""
    end = draw(st.one_of(st.integers(1, 70), st.integers(250, 300)))
    kind = draw(st.sampled_from(["decode", "chunk", "prefill"]))
    if kind == "decode":
        return end - 1, end
    length = min(end, draw(st.integers(1, 20)))
    return (0, length) if kind == "prefill" else (end - length, end)


@st.composite
def _chunks(draw: st.DrawFn) -> list[Chunk]:
    return [_chunk(draw) for _ in range(draw(st.integers(1, 3)))]


def _backend(heads: Heads) -> TritonAttention:
    return TritonAttention(heads.scale, heads.query // heads.kv)


def _run(backend: AttentionBackend, batch: Batch, window: int | None = None) -> Tensor:
    plan = backend.plan(batch.metadata)
    plan.write_kv(batch.cache, batch.key, batch.value)
    return plan.attend(batch.query, batch.cache, window).cpu()


def _make(
    chunks: Sequence[Chunk], heads: Heads, block_size: int, device: torch.device, **kwargs: object
) -> Batch:
    sequences = [random_sequence(end, heads, seed) for seed, (_, end) in enumerate(chunks)]
    return lay_out(sequences, chunks, block_size, device=device, **kwargs)  # type: ignore[arg-type]


@_QUICK
@given(chunks=_chunks(), heads=_heads, block_size=_block_sizes, window=_windows)
def test_drawn_shapes_of_work_equal_dense_attention(
    kernel_device: torch.device,
    chunks: list[Chunk],
    heads: Heads,
    block_size: int,
    window: int | None,
) -> None:
    batch = _make(chunks, heads, block_size, kernel_device, window=window)
    output = _run(_backend(heads), batch, window)
    torch.testing.assert_close(output, batch.expected.cpu(), rtol=0, atol=_TOLERANCE)


@settings(_QUICK, max_examples=6)
@given(chunks=_chunks(), heads=_heads, dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_is_loaded_and_stored_and_computed_in_float32(
    kernel_device: torch.device, chunks: list[Chunk], heads: Heads, dtype: torch.dtype
) -> None:
    batch = _make(chunks, heads, 5, kernel_device, dtype=dtype)
    output = _run(_backend(heads), batch)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.float(), batch.expected.cpu(), rtol=_BFLOAT16_ULP, atol=_TOLERANCE
    )


def test_a_wrong_block_in_the_table_changes_the_output(kernel_device: torch.device) -> None:
    heads = Heads(6, 2, 16)
    batch = _make([(40, 41), (30, 31)], heads, 16, kernel_device)
    batch.metadata.block_tables[0, 1] = batch.metadata.block_tables[1, 0]
    difference = (_run(_backend(heads), batch) - batch.expected.cpu()).abs().amax((1, 2))
    assert difference[0] > 100 * _TOLERANCE
    assert difference[1] <= _TOLERANCE


def test_padding_rows_are_neither_stored_nor_infinite(kernel_device: torch.device) -> None:
    heads = Heads(6, 2, 16)
    batch = _make([(0, 5), (7, 8)], heads, 4, kernel_device)
    rows = batch.query.shape[0]
    stored = batch.cache.key_slots.clone(), batch.cache.value_slots.clone()
    for field in ("query", "key", "value"):
        given_rows = getattr(batch, field)
        setattr(batch, field, torch.cat((given_rows, torch.full_like(given_rows[:3], 2.0))))
    output = _run(_backend(heads), batch)
    assert output.isfinite().all()
    torch.testing.assert_close(output[:rows], batch.expected.cpu(), rtol=0, atol=_TOLERANCE)
    for slots, before in zip((batch.cache.key_slots, batch.cache.value_slots), stored, strict=True):
        changed = (slots != before).any(2).any(1).nonzero().flatten()
        assert sorted(changed.tolist()) == sorted(batch.metadata.slot_mapping.tolist())


def test_keys_and_values_are_taken_from_the_middle_of_a_packed_projection(
    kernel_device: torch.device,
) -> None:
    heads = Heads(4, 2, 16)
    batch = _make([(0, 9)], heads, 4, kernel_device)
    packed = torch.cat((batch.query, batch.key, batch.value), dim=1)
    batch.query, batch.key, batch.value = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    output = _run(_backend(heads), batch)
    torch.testing.assert_close(output, batch.expected.cpu(), rtol=0, atol=_TOLERANCE)


# Bits ------------------------------------------------------------------------------------------


def _rows_in(
    backend: AttentionBackend,
    cuts: Sequence[int],
    length: int,
    heads: Heads,
    block_size: int,
    device: torch.device,
    window: int | None = None,
) -> Tensor:
    """All rows of one sequence, computed in steps that end at the cuts, each beside others."""
    sequence, other = random_sequence(length, heads, 0), random_sequence(90, heads, 1)
    rows = []
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        beside = (number % 80, number % 80 + 1 + number % 5)
        batch = lay_out(
            [other, sequence, other],
            [beside, (start, end), (69, 70)],
            block_size,
            device=device,
            seed=number,
        )
        first = batch.metadata.query_start[1]
        rows.append(_run(backend, batch, window)[first : first + end - start])
    return torch.cat(rows)


@settings(_QUICK, max_examples=8)
@given(data=st.data(), window=st.sampled_from([None, 9]), block_size=_block_sizes)
def test_a_row_has_the_same_bits_in_decode_chunk_and_prefill(
    kernel_device: torch.device, data: st.DataObject, window: int | None, block_size: int
) -> None:
    heads = Heads(2, 1, 16)
    length = data.draw(st.integers(2, 70), label="length")
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4), label="cuts"))
    with pytest.MonkeyPatch.context() as patch:
        # Several tiles and splits within few tokens.
        patch.setattr(launcher, "TILE", 16)
        patch.setattr(launcher, "SPLIT", 32)
        backend = _backend(heads)
        whole = _rows_in(backend, [], length, heads, 16, kernel_device, window)
        parts = _rows_in(backend, cuts, length, heads, block_size, kernel_device, window)
        last = _rows_in(backend, [length - 1], length, heads, 3, kernel_device, window)[-1:]
    assert torch.equal(parts, whole)
    assert torch.equal(last, whole[-1:])


def test_bits_hold_across_splits_of_the_real_size(kernel_device: torch.device) -> None:
    heads, length = Heads(1, 1, 16), launcher.SPLIT + 20
    backend = _backend(heads)
    whole = _rows_in(backend, [], length, heads, 16, kernel_device)
    cuts = [length - 30, length - 1]
    parts = _rows_in(backend, cuts, length, heads, 7, kernel_device)
    assert torch.equal(parts, whole)


def test_the_comparison_of_bits_fails_for_a_backend_that_depends_on_the_batch() -> None:
    """Negative control."""
    heads, device = Heads(2, 1, 16), torch.device("cpu")
    backend = TorchPagedAttention(heads.scale)
    whole = _rows_in(backend, [], 70, heads, 16, device)
    parts = _rows_in(backend, [20, 69], 70, heads, 16, device)
    assert not torch.equal(parts, whole)


# Plans for captured steps ----------------------------------------------------------------------


def test_a_plan_of_fixed_buffers_has_the_bits_of_the_step_that_fills_them(
    kernel_device: torch.device,
) -> None:
    heads = Heads(4, 2, 16)
    backend = _backend(heads)
    assert isinstance(backend, GraphAttention)
    buffers = DecodeBuffers(
        slot_mapping=torch.zeros(3, dtype=torch.int64, device=kernel_device),
        block_tables=torch.zeros(3, 80, dtype=torch.int32, device=kernel_device),
        read_lens=torch.ones(3, dtype=torch.int32, device=kernel_device),
        block_size=7,
    )
    plan = backend.plan_decode(buffers)
    for ends in ([1, 70, 300], [280, 2, 9]):
        batch = _make([(end - 1, end) for end in ends], heads, 7, kernel_device)
        width = batch.metadata.block_tables.shape[1]
        buffers.slot_mapping.copy_(batch.metadata.slot_mapping)
        buffers.block_tables[:, :width] = batch.metadata.block_tables
        buffers.read_lens.copy_(torch.tensor(ends))
        expected = _run(backend, batch)
        plan.write_kv(batch.cache, batch.key, batch.value)
        assert torch.equal(plan.attend(batch.query, batch.cache, None).cpu(), expected)


# The cut of the work ---------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2000)), min_size=1, max_size=5),
    group=st.integers(1, 20),
)
def test_the_work_covers_every_row_and_position_once(
    lengths: list[tuple[int, int]], group: int
) -> None:
    query_lens = [query for query, _ in lengths]
    read_lens = [query + before for query, before in lengths]
    items, row_tiles = launcher.cut_work(query_lens, read_lens, group)
    assert items.dtype == row_tiles.dtype == np.int32
    slots = launcher.row_slots(group)
    assert slots >= group
    seen = []
    for sequence, tile, first_item, last_item in row_tiles.tolist():
        parts = items[first_item:last_item].tolist()
        assert all(part[:2] == [sequence, tile] for part in parts)
        ends = [part[2] for part in parts] + [parts[-1][3]]
        assert [part[3] for part in parts] == ends[1:]
        assert ends[0] == 0
        assert ends[-1] == -(-read_lens[sequence] // launcher.SPLIT)
        first = (read_lens[sequence] - query_lens[sequence]) * slots // launcher.ROWS + tile
        rows = range(first * launcher.ROWS, (first + 1) * launcher.ROWS)
        seen += [(sequence, row) for row in rows]
    assert len(seen) == len(set(seen))
    needed = {
        (i, position * slots + head)
        for i, (query_len, read_len) in enumerate(zip(query_lens, read_lens, strict=True))
        for position in range(read_len - query_len, read_len)
        for head in range(group)
    }
    assert needed <= set(seen)
    assert sum(len(items[first:last]) for _, _, first, last in row_tiles) == len(items)
