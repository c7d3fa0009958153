"""preempt_engine: a small, complete LLM inference engine with paged KV cache and preemption.

    from preempt_engine import LLM, SamplingParams

Importing the package loads nothing heavy; torch is imported when a model that needs it is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preempt_engine.config import EngineConfig
    from preempt_engine.llm import LLM
    from preempt_engine.outputs import CompletionOutput, RequestOutput, StreamDelta, TokenScore
    from preempt_engine.sampling.logits_processor import LogitsProcessor
    from preempt_engine.sampling.params import (
        BeamSearchParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "TokenScore",
]

_HOMES = {
    "LLM": "preempt_engine.llm",
    "EngineConfig": "preempt_engine.config",
    "CompletionOutput": "preempt_engine.outputs",
    "RequestOutput": "preempt_engine.outputs",
    "TokenScore": "preempt_engine.outputs",
    "BeamSearchParams": "preempt_engine.sampling.params",
    "SamplingParams": "preempt_engine.sampling.params",
    "StreamDelta": "preempt_engine.outputs",
    "StructuredOutputsParams": "preempt_engine.sampling.params",
    "LogitsProcessor": "preempt_engine.sampling.logits_processor",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
