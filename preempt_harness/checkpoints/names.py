"""Model names that the harness understands, beside paths and hub ids."""

from __future__ import annotations

from pathlib import Path

from preempt_harness.checkpoints.recipes import RECIPES
from preempt_harness.checkpoints.smollm2 import smollm2_checkpoint
from preempt_harness.checkpoints.tiny import tiny_checkpoint

_TINY_PREFIX = "tiny-"
_SMOLLM2 = "smollm2"
MODEL_NAMES = (*(_TINY_PREFIX + family for family in RECIPES), _SMOLLM2)


def resolve_model_name(name: str) -> str | Path:
    """Turn a short model name into a checkpoint, making it if need be.

    Args:
        name: "tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral", "tiny-opt" or "smollm2";
            anything else ("exact", a path, a hub id) is returned as it is.

    Raises:
        UnknownCheckpointError: the name starts with "tiny-" and is none of these.
        CheckpointError: as `tiny_checkpoint` and `smollm2_checkpoint`.
    """
    if name == _SMOLLM2:
        return smollm2_checkpoint()
    if name.startswith(_TINY_PREFIX):
        return tiny_checkpoint(name.removeprefix(_TINY_PREFIX))
    return name
