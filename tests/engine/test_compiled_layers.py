"""Loops compiled for a CPU, against torch's operations."""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from preempt_engine.attention.compiled_paged import CompiledAttention, CompiledPlan
from preempt_engine.attention.protocol import AttentionMetadata, LayerKVCache
from preempt_engine.compiled.layers import (
    add_and_normalise,
    normalise_heads,
    rotate,
    silu_and_multiply,
)
from preempt_engine.compiled.numbers import as_array, compiled_exactly, exponential, narrow, widen
from preempt_engine.layers import norm, rotary
from preempt_engine.layers.activation import GatedActivation, invariant_silu

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_DTYPES = [torch.float32, torch.bfloat16]


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def _assert_equal_but_for_last_bits(output: Tensor, expected: Tensor) -> None:
    assert output.dtype == expected.dtype
    # A float32 result near a tie rounds to one or the other bfloat16.
    relative = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[expected.dtype]
    torch.testing.assert_close(output, expected, rtol=relative, atol=1e-6)
    if expected.dtype == torch.bfloat16:
        assert (output != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (2, 576)])
def test_add_and_normalise(shape: tuple[int, int], dtype: torch.dtype) -> None:
    hidden, weight = _random(*shape, dtype=dtype), _random(shape[1], dtype=dtype)
    update = _random(shape[0] + 1, shape[1], dtype=dtype)[1:]
    total = hidden + update
    normed = torch.empty_like(hidden)
    arrays = as_array(hidden), as_array(update), as_array(weight)
    add_and_normalise(*arrays, np.float32(1e-5), as_array(normed))
    assert torch.equal(hidden, total)
    _assert_equal_but_for_last_bits(normed, norm.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_normalise_heads_leaves_the_others(dtype: torch.dtype) -> None:
    heads, weight = _random(3, 6, 16, dtype=dtype), _random(16, dtype=dtype)
    expected = heads.clone()
    expected[:, 2:5] = norm.rms_norm(heads[:, 2:5], weight, 1e-5)
    normalise_heads(as_array(heads), 2, 5, as_array(weight), np.float32(1e-5))
    _assert_equal_but_for_last_bits(heads, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_rotation_has_the_bits_of_the_plain_one(dtype: torch.dtype) -> None:
    heads = _random(5, 7, 16, dtype=dtype)
    cos, sin = _random(5, 16, dtype=dtype), _random(6, 16, dtype=dtype)[1:]
    expected = heads.clone()
    expected[:, :4] = rotary.rotate(heads[:, :4], cos[:, None], sin[:, None])
    rotate(as_array(heads), 4, as_array(cos), as_array(sin))
    assert torch.equal(heads, expected)


def _silu_and_multiply(gate_up: Tensor) -> Tensor:
    output = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    silu_and_multiply(as_array(gate_up), as_array(output))
    return output


@pytest.mark.parametrize("dtype", _DTYPES)
def test_silu_and_multiply(dtype: torch.dtype) -> None:
    gate_up = _random(5, 2 * 33, dtype=dtype) * 10
    expected = GatedActivation(invariant_silu, 33)(gate_up)
    _assert_equal_but_for_last_bits(_silu_and_multiply(gate_up), expected)


def test_silu_of_extremes_is_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, -88.5, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    output = _silu_and_multiply(gate_up)
    torch.testing.assert_close(output, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e30]]))


def test_the_exponential_is_exact_to_the_last_bits() -> None:
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    found = np.array([exponential(value) for value in x])
    assert np.max(np.abs(found - exact) / exact) < 2e-7


@compiled_exactly
def _round_trip(bits: np.ndarray, output: np.ndarray) -> None:
    for i in range(bits.shape[0]):
        output[i] = narrow(widen(bits[i]), output)


def test_where_nothing_can_be_kept_loops_are_compiled_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = numba.njit

    def njit(**options: Any) -> Any:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled_exactly(lambda x: x + 1)(2) == 3


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = _random(5000, dtype=torch.float32)
    ties = (values.view(torch.int32) & -65536 | 0x8000).view(torch.float32)
    values = torch.cat((values, ties, torch.tensor([0.0, -0.0, float("inf"), -float("inf")])))
    output = torch.empty(values.shape, dtype=torch.bfloat16)
    _round_trip(as_array(values), as_array(output))
    assert torch.equal(output.view(torch.int16), values.bfloat16().view(torch.int16))
    again = torch.empty_like(output)
    _round_trip(as_array(output), as_array(again))
    assert torch.equal(again.view(torch.int16), output.view(torch.int16))


@pytest.mark.parametrize(("block", "slot"), [(-1, 5), (3, 5), (2**30, 5), (1, 12), (1, -1)])
def test_a_slot_outside_of_the_memory_is_an_error_and_no_wild_access(block: int, slot: int) -> None:
    cache = LayerKVCache(torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8))
    metadata = AttentionMetadata(
        query_start=[0, 1],
        read_lens=[6],
        slot_mapping=torch.tensor([slot]),
        block_tables=torch.tensor([[0, block]], dtype=torch.int32),
        block_size=4,
    )
    plan = CompiledAttention(1.0).plan(metadata)
    with pytest.raises(IndexError, match="block table"):
        plan.attend(torch.zeros(1, 2, 8), cache, None)
    assert isinstance(plan, CompiledPlan)
    with pytest.raises(IndexError, match="block table"):
        plan.slots_of(cache)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_threads_give_the_bits_of_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = AttentionMetadata(
        query_start=[0, 100, 103],
        read_lens=[100, 3],
        slot_mapping=torch.cat((torch.arange(100), 112 + torch.arange(3))),
        block_tables=torch.tensor([[0, 1, 2, 3, 4, 5, 6], [7] * 7], dtype=torch.int32),
        block_size=16,
    )
    key, value = _random(103, 2, 16, dtype=dtype), _random(104, 2, 16, dtype=dtype)[1:]
    query = _random(105, 4, 16, dtype=dtype)[2:]
    cache = LayerKVCache(*torch.zeros(2, 8, 16, 2, 16, dtype=dtype))
    plan = CompiledAttention(0.25).plan(metadata)
    plan.write_kv(cache, key, value)
    alone = plan.attend(query, cache, None)
    monkeypatch.setattr("preempt_engine.attention.compiled_paged._THREAD_WORK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(plan.attend(query, cache, None), alone)


def test_threads_end_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    backend = CompiledAttention(1.0)
    threads = list(backend.threads.map(lambda _: threading.current_thread(), range(4)))
    del backend
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
