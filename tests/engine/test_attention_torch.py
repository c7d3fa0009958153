"""The attention backends of a CPU against a dense reference, through scattered block tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from preempt_engine.attention.compiled_paged import CompiledAttention
from preempt_engine.attention.paged import split_into_groups
from preempt_engine.attention.protocol import AttentionBackend, AttentionMetadata, LayerKVCache
from preempt_engine.attention.select import select_backend
from preempt_engine.attention.torch_paged import TorchPagedAttention
from preempt_engine.attention.torch_tiled import TorchTiledAttention
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.worker.kv_cache import POISON

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_HEADS, _KV_HEADS, _DIM = 6, 2, 16
_SCALE = _DIM**-0.5
_CPU = torch.device("cpu")
_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "paged": lambda: TorchPagedAttention(_SCALE),
    "tiled": lambda: TorchTiledAttention(_SCALE, RowPlan(8)),
    "numba": lambda: CompiledAttention(_SCALE),
    "tiled-fixed": lambda: TorchTiledAttention(_SCALE, RowPlan(16, fixed=True)),
}
# Float32 against float64: one rounding is 6e-8 of values of magnitude 1, sums have 200 terms.
_TOLERANCE = 1e-5


@dataclasses.dataclass
class _Batch:
    """Sequences in a pool, each with chunk [start, end) to compute; the rest is stored."""

    cache: LayerKVCache
    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    expected: Tensor


def _batch(chunks: Sequence[tuple[int, int]], block_size: int, window: int | None = None) -> _Batch:
    generator = torch.Generator().manual_seed(len(chunks) + block_size)
    counts = [-(-end // block_size) for _, end in chunks]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    pool = torch.full((2, num_blocks, block_size, _KV_HEADS, _DIM), POISON)
    cache = LayerKVCache(pool[0], pool[1])
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int32)
    query_start, slots, parts = [0], [], []
    taken = 0
    for i, (start, end) in enumerate(chunks):
        tables[i, : counts[i]] = order[taken : taken + counts[i]]
        taken += counts[i]
        positions = torch.arange(end)
        where = tables[i, positions // block_size].long() * block_size + positions % block_size
        query = torch.randn(end, _HEADS, _DIM, generator=generator)
        key, value = (torch.randn(end, _KV_HEADS, _DIM, generator=generator) for _ in range(2))
        cache.key_slots[where[:start]] = key[:start]
        cache.value_slots[where[:start]] = value[:start]
        slots.append(where[start:])
        query_start.append(query_start[-1] + end - start)
        output = _reference(query, key, value, window)
        parts.append([tensor[start:] for tensor in (query, key, value, output)])
    query, key, value, expected = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    metadata = AttentionMetadata(
        query_start, [end for _, end in chunks], torch.cat(slots), tables, block_size
    )
    return _Batch(cache, metadata, query, key, value, expected)


def _reference(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention of one sequence from position 0, written out in float64."""
    length = query.shape[0]
    output = torch.empty(length, _HEADS, _DIM)
    for p in range(length):
        first = 0 if window is None else max(0, p - window + 1)
        for head in range(_HEADS):
            kv_head = head // (_HEADS // _KV_HEADS)
            keys = key[first : p + 1, kv_head].double()
            scores = keys @ query[p, head].double() * _SCALE
            weights = torch.softmax(scores, 0)
            output[p, head] = weights @ value[first : p + 1, kv_head].double()
    return output


def _run(backend: AttentionBackend, batch: _Batch, window: int | None = None) -> Tensor:
    plan = backend.plan(batch.metadata)
    plan.write_kv(batch.cache, batch.key, batch.value)
    return plan.attend(batch.query, batch.cache, window)


@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 20)],
        [(9, 70)],
        [(4, 5), (80, 81), (0, 1), (63, 64)],
        [(0, 5), (30, 31), (10, 17), (64, 65)],
    ],
    ids=["prefill", "chunk", "decode", "mixed"],
)
@pytest.mark.parametrize("name", list(_BACKENDS))
def test_every_shape_of_work_equals_dense_attention(
    name: str, chunks: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    batch = _batch(chunks, block_size, window)
    output = _run(_BACKENDS[name](), batch, window)
    torch.testing.assert_close(output, batch.expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("name", list(_BACKENDS))
def test_a_wrong_block_in_the_table_changes_the_output(name: str) -> None:
    batch = _batch([(40, 41), (30, 31)], 16)
    batch.metadata.block_tables[0, 1] = batch.metadata.block_tables[1, 0]
    output = _run(_BACKENDS[name](), batch)
    difference = (output - batch.expected).abs().amax((1, 2))
    assert difference[0] > 100 * _TOLERANCE
    assert difference[1] <= _TOLERANCE


@pytest.mark.parametrize("name", list(_BACKENDS))
def test_padding_rows_are_neither_stored_nor_infinite(name: str) -> None:
    batch = _batch([(0, 5), (7, 8)], 4)
    rows = batch.query.shape[0]
    stored = batch.cache.key_slots.clone()
    for field in ("query", "key", "value"):
        padding = torch.full((3, *getattr(batch, field).shape[1:]), 2.0)
        setattr(batch, field, torch.cat((getattr(batch, field), padding)))
    output = _run(_BACKENDS[name](), batch)
    assert output.isfinite().all()
    torch.testing.assert_close(output[:rows], batch.expected, rtol=0, atol=_TOLERANCE)
    changed = (batch.cache.key_slots != stored).any((1, 2)).nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(batch.metadata.slot_mapping.tolist())


@pytest.mark.parametrize("name", ["tiled", "numba"])
def test_rows_have_the_same_bits_in_every_batch_and_block_size(name: str) -> None:
    backend = _BACKENDS[name]()
    alone = _batch([(150, 151)], 16)
    expected = _run(backend, alone)
    for block_size in (1, 7, 64):
        # The same sequence in other blocks, beside a longer and a shorter one.
        other = _batch([(199, 200), (150, 151), (3, 9)], block_size)
        old = alone.metadata.block_tables[0].long()
        new = other.metadata.block_tables[1].long()
        positions = torch.arange(151)
        source = old[positions // 16] * 16 + positions % 16
        target = new[positions // block_size] * block_size + positions % block_size
        other.cache.key_slots[target] = alone.cache.key_slots[source]
        other.cache.value_slots[target] = alone.cache.value_slots[source]
        other.query[1], other.key[1], other.value[1] = alone.query, alone.key, alone.value
        assert torch.equal(_run(backend, other)[1:2], expected)


def test_passes_over_few_rows_give_the_bits_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchTiledAttention(_SCALE, RowPlan(8))
    expected = _run(backend, _batch([(20, 150)], 16))
    monkeypatch.setattr("preempt_engine.attention.torch_tiled._MAX_SCORES", 1)
    assert torch.equal(_run(backend, _batch([(20, 150)], 16)), expected)


def test_the_backend_follows_the_configuration() -> None:
    def select(name: str, row_plan: RowPlan | None) -> AttentionBackend:
        config = EngineConfig(model="m", attention_backend=name)
        return select_backend(config, _CPU, scale=1.0, row_plan=row_plan)

    assert isinstance(select("torch", None), TorchPagedAttention)
    assert isinstance(select("torch", RowPlan(8)), TorchTiledAttention)
    for name in ("auto", "numba"):
        assert isinstance(select(name, None), CompiledAttention)
        assert isinstance(select(name, RowPlan(8)), CompiledAttention)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    config = EngineConfig(model="m", attention_backend="flashy")
    with pytest.raises(ConfigError, match=r"flashy.*auto, numba, torch"):
        select_backend(config, _CPU, scale=1.0, row_plan=None)


def test_equal_chunks_are_one_group_and_much_longer_reads_another() -> None:
    chunks = [(0, 5), (3, 8), (9, 10), (40, 41), (700, 701), (0, 5)]
    groups = split_into_groups(_batch(chunks, 4).metadata)
    found = [
        (group.query_len, group.num_sequences, group.read_len_max, group.causal_from_zero)
        for group in groups
    ]
    assert found == [(5, 2, 5, True), (5, 1, 8, False), (1, 2, 41, False), (1, 1, 701, False)]
    tokens = torch.arange(18)  # of the step
    assert [group.take(tokens).tolist() for group in groups] == [
        [0, 1, 2, 3, 4, 13, 14, 15, 16, 17],
        [5, 6, 7, 8, 9],
        [10, 11],
        [12],
    ]
