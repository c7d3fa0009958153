"""Loops compiled for a CPU, against torch's operations."""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from preempt_engine.attention.compiled_paged import CompiledAttention
from preempt_engine.attention.protocol import AttentionMetadata, LayerKVCache
from preempt_engine.compiled.layers import CompiledRotation, rms_norm, silu_and_multiply
from preempt_engine.compiled.numbers import as_array, compiled_exactly, exponential, narrow, widen
from preempt_engine.layers import norm
from preempt_engine.layers.activation import GatedActivation, invariant_silu
from preempt_engine.layers.rotary import PlainRotation

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
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 4, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = _random(*shape, dtype=dtype), _random(shape[-1], dtype=dtype)
    _assert_equal_but_for_last_bits(rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_a_part_of_a_row() -> None:
    x, weight = _random(3, 6, 16, dtype=torch.float32), _random(16, dtype=torch.float32)
    expected = norm.rms_norm(x[:, 2:5], weight, 1e-5)
    _assert_equal_but_for_last_bits(rms_norm(x[:, 2:5], weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_rotation_has_the_bits_of_the_plain_one(dtype: torch.dtype) -> None:
    heads = _random(5, 7, 16, dtype=dtype)
    cos, sin = _random(5, 16, dtype=dtype), _random(6, 16, dtype=dtype)[1:]
    output = CompiledRotation(cos, sin).rotate(heads, 4)
    assert torch.equal(output, PlainRotation(cos, sin).rotate(heads, 4))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_silu_and_multiply(dtype: torch.dtype) -> None:
    gate_up = _random(5, 2 * 33, dtype=dtype) * 10
    expected = GatedActivation(invariant_silu, 33)(gate_up)
    _assert_equal_but_for_last_bits(silu_and_multiply(gate_up), expected)


def test_silu_of_extremes_is_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, -88.5, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    output = silu_and_multiply(gate_up)
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


@pytest.mark.parametrize("block", [-1, 3, 2**30])
def test_a_block_outside_of_the_memory_is_an_error_and_no_wild_read(block: int) -> None:
    cache = LayerKVCache(torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8))
    metadata = AttentionMetadata(
        query_start=[0, 1],
        read_lens=[6],
        slot_mapping=torch.tensor([5]),
        block_tables=torch.tensor([[0, block]], dtype=torch.int32),
        block_size=4,
    )
    plan = CompiledAttention(1.0).plan(metadata)
    with pytest.raises(IndexError, match="block table"):
        plan.attend(torch.zeros(1, 2, 8), cache, None)
    with pytest.raises(IndexError, match="block table"):
        plan.write_kv(cache, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))


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
