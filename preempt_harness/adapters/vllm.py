"""Adapter "vllm": the whole engine, model and kernels included, one step of it a poll.

Preemption is provoked by a pool of as many blocks as the trial asks for
(`num_gpu_blocks_override`); how often it happens is known from the engine's counter, which is read
as differences. Not run on hardware: docs/adapters/vllm.md says what was tested.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.adapters.vllm_llm import VllmEngineSession
from preempt_harness.admission import AdmissionModel
from preempt_harness.workload import SamplingSpec

TESTED_SIGNATURES = ("0.33.0",)
_METHODS = ("ngram", "draft_model")


class VllmAdapter:
    """Adapter "vllm"."""

    name = "vllm"
    capabilities = frozenset(
        {
            protocol.STEPPED,
            protocol.ABORT,
            protocol.SCORE,
            protocol.RESET_PREFIX_CACHE,
            protocol.RESET_RUNNING_REQUESTS,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.CHUNKED_PREFILL,
            protocol.MIXED_STEPS,
            protocol.SAMPLING,
            protocol.LOGPROBS,
            protocol.PROMPT_LOGPROBS,
            protocol.PENALTIES,
            protocol.LOGIT_BIAS,
            protocol.STOP_TOKENS,
            protocol.EOS,
            protocol.MIN_TOKENS,
            protocol.PARALLEL_SAMPLING,
            protocol.WATERMARK,
            protocol.MAX_MODEL_LEN,
            protocol.TENSOR_PARALLEL,
            protocol.SPECULATION,
            protocol.ASYNC_SCHEDULING,
        }
    )
    models: tuple[str, ...] = ("smollm2", "tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral")
    block_sizes: tuple[int, ...] = (16, 32, 64)
    isolation = "process"
    known_issues: tuple[KnownIssue, ...] = ()

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """As vLLM's scheduler, which "vllm-scheduler" runs alone; the engine checks its longest
        length when it starts.
        """
        from preempt_harness.adapters.vllm_scheduler import VllmSchedulerAdapter

        return msgspec.structs.replace(
            VllmSchedulerAdapter().admission_model(settings), last_token_needs_room=True
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """From the model's configuration file."""
        from preempt_harness.checkpoints import resolve_model_name

        config = Path(resolve_model_name(settings.model)) / "config.json"
        return int(json.loads(config.read_text())["vocab_size"])

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """No tokenizer is loaded: prompts are random ids."""
        return None

    def branch_sampling(self, sampling: SamplingSpec, branch: int) -> SamplingSpec | None:
        """A branch is a request of its own, whose seed is the request's and its index added."""
        seed = None if sampling.seed is None else sampling.seed + branch
        return msgspec.structs.replace(sampling, n=1, seed=seed)

    def refusal(self, settings: EngineSettings) -> str | None:
        """Drafts that are no engine's, and more than one step ahead."""
        method = (settings.speculative_config or {}).get("method", _METHODS[0])
        if method not in _METHODS:
            return f"drafts by {method!r}: it has {' and '.join(_METHODS)}"
        if settings.async_scheduling > 1:
            return f"{settings.async_scheduling} steps ahead: vLLM decides one ahead"
        return None

    def missing(self) -> str | None:
        """vLLM is looked for, not imported: that takes seconds."""
        try:
            version("vllm")
        except PackageNotFoundError:
            return "pip install vllm (on a machine with a GPU)"
        return None

    def open(self, settings: EngineSettings) -> VllmEngineSession:
        """A new engine for every session; the weights are loaded anew.

        Raises:
            Exception: whatever vLLM raises for settings or a machine that it cannot use.
        """
        return VllmEngineSession(settings)
