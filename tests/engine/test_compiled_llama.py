"""The compiled forward pass of the Llama family, against the model's own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import Driver, family_configs, make_runner, random_tokens, save_checkpoint

from preempt_engine.compiled import attention, layers
from preempt_engine.compiled.llama import CompiledLlama
from preempt_engine.worker.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_PLAIN = {"llama-relu"}  # its feed-forward layers are not gated by SiLU
_FAMILIES = [name for name in family_configs() if not name.startswith("opt")]


def _logits(runner: ModelRunner) -> np.ndarray:
    """Two prompts, one in chunks beside the other's decode steps; the rows of all tokens."""
    driver = Driver(runner)
    prompts = {"short": random_tokens(9, seed=1), "long": random_tokens(40, seed=2)}
    short, long = (driver.add(name, tokens) for name, tokens in prompts.items())
    rows = []
    for ends in ({short: 4}, {short: 5, long: 30}, {long: 31, short: 9}, {long: 40}):
        rows += driver.run(ends)
    return np.stack(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_logits_are_those_of_the_plain_forward_pass(
    family: str, dtype: str, tmp_path: Path
) -> None:
    save_checkpoint(family_configs()[family], tmp_path)
    plain = make_runner(tmp_path, attention_backend="torch", dtype=dtype)
    compiled = make_runner(tmp_path, attention_backend="numba", dtype=dtype)
    owner = getattr(compiled._forward, "__self__", None)
    assert isinstance(owner, CompiledLlama) == (family not in _PLAIN)
    expected = _logits(plain)
    # A few roundings, of 6e-8 and 4e-3 each, of every element in two layers.
    tolerance = {"float32": 1e-5, "bfloat16": 0.03}[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(_logits(compiled), expected, rtol=0, atol=tolerance)


def print_compiled(checkpoint: str) -> None:
    """Print for how many kinds of arguments loops are compiled when a runner is built, and when it
    has computed steps; in a process of its own."""
    runner = make_runner(Path(checkpoint), attention_backend="numba")
    built = _num_compiled(runner)
    _logits(runner)
    print(built, _num_compiled(runner))


def _num_compiled(runner: ModelRunner) -> int:
    local = runner.shard.local
    num_groups = local.num_attention_heads // local.num_key_value_heads
    loops = [attention.find_slots, attention.store, attention.softmax]
    loops += [layers.add_and_normalise, layers.normalise_heads, layers.rotate]
    loops += [layers.silu_and_multiply, attention.attention_loop(local.head_dim, num_groups)]
    return sum(len(loop.signatures) for loop in loops)


@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_nothing_is_left_to_compile_when_the_first_step_comes(family: str, tmp_path: Path) -> None:
    save_checkpoint(family_configs()[family], tmp_path)
    script = "import sys, test_compiled_llama as t; t.print_compiled(sys.argv[1])"
    path = os.pathsep.join(sys.path)
    printed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    ).stdout
    built, computed = map(int, printed.split())
    assert 0 < built == computed


def test_a_closed_runner_keeps_no_kv_memory(tmp_path: Path) -> None:
    save_checkpoint(family_configs()["llama"], tmp_path)
    runner = make_runner(tmp_path, attention_backend="numba")
    _logits(runner)
    assert runner._kv_cache is not None
    layers_ = [weakref.ref(layer) for layer in runner._kv_cache.layers]
    assert len(runner._attention._slots) == len(layers_)
    runner.close()
    gc.collect()
    assert [layer() for layer in layers_] == [None] * len(layers_)
    assert not runner._attention._slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_pass_changes_no_weight(dtype: str, tmp_path: Path) -> None:
    save_checkpoint(family_configs()["llama"], tmp_path)
    runner = make_runner(tmp_path, attention_backend="numba", dtype=dtype)
    assert runner._model is not None
    before = {
        name: tensor.clone()
        for name, tensor in runner._model.checkpoint_tensors().items()
        if isinstance(tensor, torch.Tensor)
    }
    assert before
    first, second = _logits(runner), _logits(runner)
    for name, tensor in runner._model.checkpoint_tensors().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, before[name]), name
    assert np.array_equal(first, second)
