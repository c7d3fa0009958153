"""Checkpoints to test engines with: tiny ones of five model families, and SmolLM2-135M-Instruct.

They are made on first use and kept in a cache folder; nothing is downloaded. Importing this
package loads neither torch nor transformers.
"""

from __future__ import annotations

from preempt_harness.checkpoints.errors import (
    CheckpointError,
    MissingExtraError,
    UnknownCheckpointError,
)
from preempt_harness.checkpoints.names import resolve_model_name
from preempt_harness.checkpoints.quality import Quality, measure_quality
from preempt_harness.checkpoints.smollm2 import smollm2_checkpoint
from preempt_harness.checkpoints.tiny import tiny_checkpoint

__all__ = [
    "CheckpointError",
    "MissingExtraError",
    "Quality",
    "UnknownCheckpointError",
    "measure_quality",
    "resolve_model_name",
    "smollm2_checkpoint",
    "tiny_checkpoint",
]
