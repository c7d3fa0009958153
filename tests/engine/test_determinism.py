"""`deterministic=True`: the bits of a logit depend on the tokens before it and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import Driver, family_configs, make_runner, random_tokens, save_checkpoint
from torch import Tensor

from preempt_engine.attention.protocol import AttentionBackend
from preempt_engine.attention.torch_paged import TorchPagedAttention
from preempt_engine.attention.torch_tiled import TorchTiledAttention
from preempt_engine.errors import DeterminismError
from preempt_engine.layers.activation import GatedActivation, invariant_silu
from preempt_engine.layers.linear import FixedRowsMatmul, Linear
from preempt_engine.layers.norm import RMSNorm
from preempt_engine.layers.row_plan import RowPlan
from preempt_engine.models.config import ModelConfig
from preempt_engine.worker.determinism import (
    ProbeSetting,
    attention_is_independent,
    choose_row_plan,
    distinct_operations,
    rows_are_independent,
)
from preempt_engine.worker.model_runner import ModelRunner

_CPU = torch.device("cpu")
Row = NDArray[np.float32]
_PROMPTS = {f"p{n}": random_tokens(n, seed=n) for n in (3, 40, 70)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for family in ("qwen3", "mistral-window", "opt"):
        directories[family] = tmp_path_factory.mktemp(family)
        save_checkpoint(family_configs()[family], directories[family])
    return directories


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _runner(directory: Path, block_size: int, deterministic: bool) -> ModelRunner:
    return make_runner(
        directory, block_size=block_size, deterministic=deterministic, num_kv_blocks=160
    )


@cache
def _expected(directory: Path, deterministic: bool) -> dict[str, list[Row]]:
    """Logits of every position of each prompt, alone and in one piece."""
    rows = {}
    for name, tokens in _PROMPTS.items():
        runner = _runner(directory, 16, deterministic)
        runner.reset()
        driver = Driver(runner)
        rows[name] = driver.run({driver.add(name, tokens): len(tokens)})
    return rows


def _run_mixed(runner: ModelRunner, draw: st.DataObject) -> dict[str, list[Row]]:
    """Compute all prompts in drawn chunks and batches, with drawn preemptions."""
    runner.reset()
    seed = draw.draw(st.integers(0, 2**16), label="order of blocks")
    driver = Driver(runner, np.random.default_rng(seed).permutation(runner.num_kv_blocks).tolist())
    keys = {name: driver.add(name, tokens) for name, tokens in _PROMPTS.items()}
    rows: dict[str, list[Row]] = {name: [] for name in keys}
    longest_chunk = draw.draw(st.sampled_from([3, 17, 64]))
    preemptions = draw.draw(st.integers(0, 2))
    while unfinished := [name for name in keys if len(rows[name]) < len(_PROMPTS[name])]:
        if preemptions and draw.draw(st.booleans()):
            preemptions -= 1
            victim = draw.draw(st.sampled_from(unfinished))
            driver.preempt(keys[victim], poison=True)
            rows[victim] = []
        chosen = draw.draw(
            st.lists(st.sampled_from(unfinished), min_size=1, max_size=3, unique=True)
        )
        ends = {}
        for name in chosen:
            left = len(_PROMPTS[name]) - len(rows[name])
            chunk = draw.draw(st.integers(1, longest_chunk))
            ends[keys[name]] = len(rows[name]) + min(left, chunk)
        step_rows = iter(driver.run(ends))
        for name in chosen:
            rows[name] += [next(step_rows) for _ in range(ends[keys[name]] - len(rows[name]))]
    return rows


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    family=st.sampled_from(["qwen3", "mistral-window", "opt"]),
    block_size=st.sampled_from([1, 3, 16, 100]),
    num_threads=st.sampled_from([1, 2]),
)
def test_logits_have_the_same_bits_whatever_the_schedule(
    checkpoints: dict[str, Path],
    data: st.DataObject,
    family: str,
    block_size: int,
    num_threads: int,
) -> None:
    torch.set_num_threads(1)
    expected = _expected(checkpoints[family], True)
    torch.set_num_threads(num_threads)
    actual = _run_mixed(_runner(checkpoints[family], block_size, True), data)
    for name in _PROMPTS:
        assert np.array_equal(np.stack(actual[name]), np.stack(expected[name])), name


def test_without_deterministic_the_same_comparison_fails(checkpoints: dict[str, Path]) -> None:
    """Negative control: on this comparison the fast path differs, though only in the last bits."""
    torch.set_num_threads(1)
    directory = checkpoints["qwen3"]
    expected = _expected(directory, False)
    runner = _runner(directory, 16, False)
    runner.reset()
    driver = Driver(runner)
    key = driver.add("p40", _PROMPTS["p40"])
    rows = np.stack([row for end in range(1, 41) for row in driver.run({key: end})])
    assert not np.array_equal(rows, np.stack(expected["p40"]))
    np.testing.assert_allclose(rows, np.stack(expected["p40"]), rtol=0, atol=1e-4)


# The probe ------------------------------------------------------------------------------------


def _setting() -> ProbeSetting:
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=None,
        layer_windows=(None,),
        dtype="float32",
        eos_token_ids=frozenset(),
    )
    return ProbeSetting(
        model=model, dtype=torch.float32, device=_CPU, block_size=5, max_num_batched_tokens=300
    )


def _tiled(row_plan: RowPlan) -> AttentionBackend:
    return TorchTiledAttention(0.3, row_plan)


def _linear() -> Linear:
    layer = Linear(32, (40, 8), bias=True, dtype=torch.float32, device=_CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


class _BatchDependentNorm(RMSNorm):
    """Gives a row other bits unless the number of rows is a multiple of 16."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] % 16 == 0 else x * (1 + 2**-20)


class _HopelessNorm(RMSNorm):
    """Gives a row other bits for every number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.shape[0] * 2**-20)


def _norm(kind: type[RMSNorm]) -> RMSNorm:
    return kind(32, 1e-5, dtype=torch.float32, device=_CPU)


def test_padding_is_enough_on_a_machine_that_treats_padded_rows_alike() -> None:
    activation = GatedActivation(invariant_silu, 20)
    assert choose_row_plan([_linear(), activation], _tiled, _setting()) == RowPlan(8)


def test_a_larger_padding_is_tried_when_the_smallest_fails() -> None:
    chosen = choose_row_plan([_norm(_BatchDependentNorm)], _tiled, _setting())
    assert chosen == RowPlan(16)


def test_pieces_of_fixed_size_are_tried_when_no_padding_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = F.linear

    def shape_dependent(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(x, weight, bias) + 2**-10 * x.shape[0]

    monkeypatch.setattr(F, "linear", shape_dependent)
    layer = _linear()
    chosen = choose_row_plan([layer], _tiled, _setting())
    assert chosen.fixed
    assert isinstance(layer.matmul, FixedRowsMatmul)
    assert layer.matmul.num_rows == chosen.multiple


def test_an_operation_beyond_help_is_refused_by_name() -> None:
    with pytest.raises(DeterminismError, match=r"_HopelessNorm of width 32 in torch\.float32"):
        choose_row_plan([_linear(), _norm(_HopelessNorm)], _tiled, _setting())


def test_batch_dependent_attention_is_refused_by_name() -> None:
    with pytest.raises(DeterminismError, match="attention in"):
        choose_row_plan([], lambda row_plan: TorchPagedAttention(0.3), _setting())


def test_each_kind_and_shape_is_probed_once() -> None:
    other = Linear(40, (32,), bias=False, dtype=torch.float32, device=_CPU)
    operations = distinct_operations([_linear(), _linear(), other, _norm(RMSNorm)])
    assert [operation.width for operation in operations] == [32, 40, 32]


def test_the_probe_sees_what_single_rows_do_to_a_product() -> None:
    """Negative control: without padding, products of this library depend on the batch."""
    (operation,) = distinct_operations([_linear()])
    assert rows_are_independent(operation, _setting(), RowPlan(8))
    assert not rows_are_independent(operation, _setting(), RowPlan(1))


def test_the_probe_tells_tiled_from_plain_attention() -> None:
    assert attention_is_independent(_tiled(RowPlan(8)), _setting())
    assert attention_is_independent(_tiled(RowPlan(16, fixed=True)), _setting())
    assert not attention_is_independent(TorchPagedAttention(0.3), _setting())


def test_fixed_pieces_compute_the_product() -> None:
    layer = _linear()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    plain = layer(x)
    layer.matmul = FixedRowsMatmul(16)
    # float32 sums of 32 terms of magnitude 1 in another order
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=1e-5)
