"""The flash-attn backend, with stand-ins for the package's two functions.

The stand-ins take exactly the arguments of flash_attn 2.5 and later by name, and compute densely;
what is tested is what the backend hands over. The package itself needs a GPU: see tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from attention_batches import Batch, Heads, dense_attention, lay_out, random_sequence
from torch import Tensor

from preempt_engine.attention.flash import FlashAttention, FlashFunctions
from preempt_engine.attention.protocol import AttentionPlan, GraphAttention

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_HEADS = Heads(6, 2, 16)
_TOLERANCE = 1e-5  # see test_triton_attention.py


def _read(blocks: Tensor, table: Tensor, length: int) -> Tensor:
    return blocks[table.long()].flatten(0, 1)[:length]


def _attend(
    query: Tensor, k: Tensor, v: Tensor, table: Tensor, read_len: int, window: tuple[int, int]
) -> Tensor:
    left, right = window
    assert right == 0
    keys, values = _read(k, table, read_len), _read(v, table, read_len)
    return dense_attention(query, keys, values, None if left < 0 else left + 1)


def _varlen(  # the package's own signature, defaults left out where they must be given
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert causal
    assert block_table is not None
    assert softmax_scale == pytest.approx(_HEADS.scale)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    read_lens, query_lens = cu_seqlens_k.diff().tolist(), cu_seqlens_q.diff().tolist()
    assert max(query_lens) <= max_seqlen_q
    assert max(read_lens) <= max_seqlen_k
    parts = q.split(query_lens)
    return torch.cat(
        [
            _attend(part, k, v, table, length, window_size)
            for part, table, length in zip(parts, block_table, read_lens, strict=True)
        ]
    )


def _with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert causal
    assert k is v is None
    assert cache_seqlens is not None
    assert block_table is not None
    assert cache_seqlens.dtype == torch.int32
    assert softmax_scale == pytest.approx(_HEADS.scale)
    return torch.stack(
        [
            _attend(queries, k_cache, v_cache, table, length, window_size)
            for queries, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True)
        ]
    )


def _backend() -> FlashAttention:
    return FlashAttention(_HEADS.scale, FlashFunctions(_varlen, _with_kvcache))


def _batch(chunks: list[tuple[int, int]], window: int | None) -> Batch:
    sequences = [random_sequence(end, _HEADS, seed) for seed, (_, end) in enumerate(chunks)]
    return lay_out(sequences, chunks, 256, window=window)


def _run(plan: AttentionPlan, batch: Batch, window: int | None) -> Tensor:
    plan.write_kv(batch.cache, batch.key, batch.value)
    return plan.attend(batch.query, batch.cache, window)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "chunks",
    [[(0, 20)], [(200, 270)], [(4, 5), (299, 300), (0, 1)], [(0, 5), (300, 301), (10, 17)]],
    ids=["prefill", "chunk", "decode", "mixed"],
)
def test_every_shape_of_work_is_handed_over(
    chunks: list[tuple[int, int]], window: int | None
) -> None:
    batch = _batch(chunks, window)
    output = _run(_backend().plan(batch.metadata), batch, window)
    torch.testing.assert_close(output, batch.expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("chunks", [[(0, 20)], [(4, 5), (8, 9)]])
def test_padding_rows_are_finite(chunks: list[tuple[int, int]]) -> None:
    batch = _batch(chunks, None)
    rows = batch.query.shape[0]
    for field in ("query", "key", "value"):
        given = getattr(batch, field)
        setattr(batch, field, torch.cat((given, torch.full_like(given[:2], 3.0))))
    output = _run(_backend().plan(batch.metadata), batch, None)
    assert output.shape == batch.query.shape
    assert output.isfinite().all()
    torch.testing.assert_close(output[:rows], batch.expected, rtol=0, atol=_TOLERANCE)


def test_decode_steps_can_be_captured() -> None:
    assert isinstance(_backend(), GraphAttention)
