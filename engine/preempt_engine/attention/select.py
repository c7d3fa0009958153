"""The choice of an attention backend, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from preempt_engine.attention import flash
from preempt_engine.attention.protocol import AttentionBackend
from preempt_engine.attention.torch_paged import TorchPagedAttention
from preempt_engine.attention.torch_tiled import TorchTiledAttention
from preempt_engine.compiled import availability as compiled_availability
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.kernels import availability
from preempt_engine.layers.row_plan import RowPlan

BACKENDS = ("numba", "torch", "triton", "flash-attn")


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name, and the reason in half a sentence."""

    name: str
    reason: str


def choose_backend(
    config: EngineConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
) -> Choice:
    """The backend that `config.attention_backend` names, or the best one here for "auto".

    "auto" on a CPU is numba where that is installed, else torch. On a GPU it is flash-attn where
    that is installed and block size, dtype and head width suit it, else Triton, else torch, which
    gathers every key on each step. With `deterministic`, flash-attn is passed over: its results
    depend on the batch.

    Args:
        config: `attention_backend`, `block_size` and `deterministic` matter.
        device: where it will run.
        dtype: of queries and KV cache.
        head_dim: width of a head.

    Raises:
        ConfigError: no backend has that name, or it cannot run here.
    """
    reasons = {
        "torch": "",
        "numba": compiled_availability.unusable(device, dtype),
        "triton": availability.unusable(device),
        "flash-attn": flash.unusable(device, dtype, head_dim, config.block_size),
    }
    name = config.attention_backend
    if name not in ("auto", *BACKENDS):
        raise ConfigError(
            f"attention_backend={name!r} is unknown for device {device}.",
            f"Choose one of: auto, {', '.join(BACKENDS)}.",
        )
    if name != "auto":
        if reasons[name]:
            raise ConfigError(
                f"attention_backend={name!r} cannot be used for device {device}: {reasons[name]}.",
                "Mend that, or use attention_backend='auto'.",
            )
        return Choice(name, "it is asked for")
    if device.type == "cpu":
        if reasons["numba"]:
            return Choice("torch", reasons["numba"])
        return Choice("numba", "it is the fastest on a CPU")
    if config.deterministic:
        reasons["flash-attn"] = "flash-attn depends on the batch, and deterministic=True"
    for name in ("flash-attn", "triton", "torch"):
        if not reasons[name]:
            break
    passed_over = [reason for reason in (reasons["flash-attn"], reasons["triton"]) if reason]
    return Choice(name, "; ".join(passed_over) or "it is the fastest here")


def select_backend(
    config: EngineConfig,
    device: torch.device,
    *,
    scale: float,
    row_plan: RowPlan | None,
    group: int = 1,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
) -> AttentionBackend:
    """The backend that `choose_backend` names.

    Args:
        config: of the engine.
        device: where it will run.
        scale: factor of the attention scores.
        row_plan: how the engine pads rows, when `config.deterministic`; None otherwise.
        group: query heads per KV head.
        dtype: of queries and KV cache.
        head_dim: width of a head.

    Raises:
        ConfigError: no backend has that name, or it cannot run here.
    """
    name = choose_backend(config, device, dtype=dtype, head_dim=head_dim).name
    if name == "triton":
        from preempt_engine.attention.triton_paged import TritonAttention

        return TritonAttention(scale, group)
    if name == "flash-attn":
        return flash.FlashAttention(scale, flash.FlashFunctions.installed())
    if name == "numba":
        from preempt_engine.attention.compiled_paged import CompiledAttention

        return CompiledAttention(scale)
    if row_plan is not None:
        return TorchTiledAttention(scale, row_plan)
    return TorchPagedAttention(scale)
