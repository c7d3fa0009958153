"""Adapter "sglang": the whole engine by `sglang.Engine`, whose scheduler is a process of its own.

Preemption, which SGLang calls retraction, is provoked by a pool of as many tokens as the trial asks
for (`max_total_tokens`), or by the engine's own test switches. How often it happened is read from
what each answer says of its request, as differences. Not run on hardware: docs/adapters/sglang.md
says what was tested.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.adapters.sglang_session import SglangSession
from preempt_harness.admission import AdmissionModel

TESTED_SIGNATURES = ("0.5.23",)


class SglangAdapter:
    """Adapter "sglang"."""

    name = "sglang"
    capabilities = frozenset(
        {
            protocol.ABORT,
            protocol.SCORE,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.CHUNKED_PREFILL,
            protocol.LOGPROBS,
            protocol.PENALTIES,
            protocol.STOP_TOKENS,
            protocol.EOS,
            protocol.MAX_MODEL_LEN,
            protocol.TENSOR_PARALLEL,
        }
    )
    models: tuple[str, ...] = ("smollm2", "tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral")
    block_sizes: tuple[int, ...] = (16, 32, 64)
    isolation = "process"
    known_issues: tuple[KnownIssue, ...] = ()

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted with room for its first chunk, and a guess of what others need.

        The guess is the engine's own; it makes it admit fewer, and so preempt less than this model.
        """
        return AdmissionModel(
            policy="chunk",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            outputs_apart=True,
            prefix_caching=settings.enable_prefix_caching,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """From the model's configuration file."""
        from preempt_harness.checkpoints import resolve_model_name

        config = Path(resolve_model_name(settings.model)) / "config.json"
        return int(json.loads(config.read_text())["vocab_size"])

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """No tokenizer is loaded: prompts are random ids."""
        return None

    def missing(self) -> str | None:
        """SGLang is looked for, not imported: that takes seconds."""
        if find_spec("sglang") is None:
            return "pip install sglang (on a machine with a GPU)"
        return None

    def open(self, settings: EngineSettings) -> SglangSession:
        """A new engine for every session; the weights are loaded anew.

        Raises:
            Exception: whatever SGLang raises for settings or a machine that it cannot use.
        """
        return SglangSession(settings)
