"""Which attention backend an engine takes, why, and which it refuses."""

from __future__ import annotations

import pytest
import torch

from preempt_engine.attention import flash
from preempt_engine.attention.select import choose_backend
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.kernels import availability

_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)


def _config(**kwargs: object) -> EngineConfig:
    return EngineConfig(model="m", **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that seem to be installed; a test may change the set."""
    names = {"triton", "flash_attn"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name in names else None
    )
    monkeypatch.setattr(availability, "kernels_are_interpreted", lambda: False)
    return names


def test_a_cpu_takes_compiled_loops_where_numba_is_installed(installed: set[str]) -> None:
    choice = choose_backend(_config(block_size=256), _CPU)
    assert choice.name == "torch"
    assert "Numba is not installed" in choice.reason
    installed.add("numba")
    assert choose_backend(_config(block_size=256), _CPU).name == "numba"


@pytest.mark.parametrize(
    ("kwargs", "dtype", "missing", "expected", "reason"),
    [
        ({"block_size": 512}, torch.bfloat16, "", "flash-attn", "fastest"),
        ({"block_size": 16}, torch.bfloat16, "", "triton", "multiple of 256"),
        ({"block_size": 256}, torch.float32, "", "triton", "float16 and bfloat16 only"),
        ({"block_size": 256}, torch.float16, "flash_attn", "triton", "not installed"),
        ({"block_size": 256, "deterministic": True}, torch.float16, "", "triton", "the batch"),
        ({"block_size": 16}, torch.float16, "triton", "torch", "triton is not installed"),
    ],
)
def test_a_gpu_takes_the_best_that_can_run_and_says_why(
    installed: set[str],
    kwargs: dict[str, object],
    dtype: torch.dtype,
    missing: str,
    expected: str,
    reason: str,
) -> None:
    installed.discard(missing)
    choice = choose_backend(_config(**kwargs), _GPU, dtype=dtype)
    assert choice.name == expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("backend", "device", "block_size", "missing", "reason"),
    [
        ("flash-attn", _GPU, 16, "", "multiple of 256"),
        ("flash-attn", _GPU, 256, "flash_attn", "flash-attn is not installed"),
        ("flash-attn", _CPU, 256, "", "needs a CUDA device"),
        ("triton", _GPU, 16, "triton", "triton is not installed"),
        ("triton", _CPU, 16, "", "interpreter"),
        ("numba", _GPU, 16, "", "for a CPU"),
        ("numba", _CPU, 16, "", "do not know torch.float16"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_reason(
    installed: set[str],
    backend: str,
    device: torch.device,
    block_size: int,
    missing: str,
    reason: str,
) -> None:
    installed.discard(missing)
    config = _config(attention_backend=backend, block_size=block_size)
    with pytest.raises(ConfigError, match=f"{backend}.*{reason}"):
        choose_backend(config, device, dtype=torch.float16)


@pytest.mark.parametrize("head_dim", [20, 512])
def test_flash_attention_is_not_given_heads_that_it_cannot_take(
    installed: set[str], head_dim: int
) -> None:
    assert "head width" in flash.unusable(_GPU, torch.float16, head_dim, 256)
