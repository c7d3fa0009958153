"""Whole engines on the Triton backend: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from static_decode import EagerCapture
from tiny_models import Driver, family_configs, make_runner, random_tokens, save_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from preempt_engine.attention.triton_paged import TritonAttention
from preempt_engine.worker import decode_graphs
from preempt_engine.worker.model_runner import ModelRunner
from preempt_engine.worker.step_inputs import build_step_inputs

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_TOLERANCE = 1e-4  # between ways of computing float32 logits; see test_models_parity.py


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistral-window")
    save_checkpoint(family_configs()["mistral-window"], directory)
    return directory


def _runner(checkpoint: Path, device: torch.device, **kwargs: Any) -> ModelRunner:
    return make_runner(checkpoint, device=device.type, dtype="float32", **kwargs)


def _serve(runner: ModelRunner) -> list[np.ndarray[Any, Any]]:
    """A chunked prompt and a short one, decode, a preemption, and the way back."""
    driver = Driver(runner)
    a, b = driver.add("a", random_tokens(20, 0)), driver.add("b", random_tokens(8, 1))
    rows = driver.run({a: 9}, every=False)
    rows += driver.run({a: 17, b: 6}, every=False)
    rows += driver.run({a: 18, b: 7}, every=False)
    driver.preempt(a, poison=True)
    rows += driver.run({b: 8}, every=False)
    return rows + driver.run({a: 20}, every=False)


def test_an_engine_on_triton_computes_what_one_on_torch_does(
    checkpoint: Path, kernel_device: torch.device
) -> None:
    runner = _runner(checkpoint, kernel_device, attention_backend="triton", enforce_eager=True)
    expected = _serve(_runner(checkpoint, torch.device("cpu"), attention_backend="torch"))
    np.testing.assert_allclose(
        np.stack(_serve(runner)), np.stack(expected), rtol=0, atol=_TOLERANCE
    )


def test_captured_steps_on_triton_compute_what_one_on_torch_does(
    checkpoint: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _serve(_runner(checkpoint, torch.device("cpu"), attention_backend="torch"))
    capture = EagerCapture()
    if kernel_device.type == "cpu":
        monkeypatch.setattr(decode_graphs, "unusable", lambda *_: "")
        monkeypatch.setattr(decode_graphs, "CudaCapture", lambda device: capture)
    runner = _runner(checkpoint, kernel_device, attention_backend="triton", max_num_seqs=3)
    assert isinstance(runner.graphs, decode_graphs.DecodeGraphs)
    np.testing.assert_allclose(
        np.stack(_serve(runner)), np.stack(expected), rtol=0, atol=_TOLERANCE
    )
    assert kernel_device.type == "cuda" or capture.replayed == [2, 1]


class _NoReading(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item"), name
        assert name != "aten::is_nonzero", name
        return func(*args, **(kwargs or {}))


def test_inputs_and_plan_of_a_step_are_built_without_reading_a_tensor(
    checkpoint: Path, kernel_device: torch.device
) -> None:
    runner = _runner(checkpoint, kernel_device, attention_backend="torch", enforce_eager=True)
    driver = Driver(runner)
    keys = [driver.add(f"s{i}", random_tokens(9, i)) for i in range(3)]
    steps = _record_steps(runner)
    driver.run({keys[0]: 5, keys[1]: 9, keys[2]: 1}, every=False)
    driver.run({keys[0]: 6, keys[2]: 2})
    for step in steps:
        with _NoReading():
            inputs = build_step_inputs(step, runner.state, runner.device, runner.row_plan)
            TritonAttention(1.0, 2).plan(inputs.metadata)
            runner._attention.plan(inputs.metadata)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _NoReading():
        torch.ones(1).item()  # negative control


def _record_steps(runner: ModelRunner) -> list[Any]:
    """Steps that the runner was given; sequences stay as the last one left them."""
    steps: list[Any] = []
    execute = runner.execute

    def record(step: Any) -> Any:
        steps.append(step)
        return execute(step)

    runner.execute = record  # type: ignore[method-assign]
    return steps
