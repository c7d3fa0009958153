"""The choice of an attention backend."""

from __future__ import annotations

import torch

from preempt_engine.attention.protocol import AttentionBackend
from preempt_engine.attention.torch_paged import TorchPagedAttention
from preempt_engine.attention.torch_tiled import TorchTiledAttention
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.layers.row_plan import RowPlan

BACKENDS = ("torch",)


def select_backend(
    config: EngineConfig, device: torch.device, *, scale: float, row_plan: RowPlan | None
) -> AttentionBackend:
    """The backend that `config.attention_backend` names.

    Args:
        config: "auto" takes the best backend of the device; "torch" runs everywhere.
        device: where it will run.
        scale: factor of the attention scores.
        row_plan: how the engine pads rows, when `config.deterministic`; None otherwise.

    Raises:
        ConfigError: no backend has that name.
    """
    if config.attention_backend not in ("auto", *BACKENDS):
        raise ConfigError(
            f"attention_backend={config.attention_backend!r} is unknown for device {device}.",
            f"Choose one of: auto, {', '.join(BACKENDS)}.",
        )
    if row_plan is not None:
        return TorchTiledAttention(scale, row_plan)
    return TorchPagedAttention(scale)
