"""Adapter "nano-vllm": the whole engine, model and kernels included, one step of it a poll.

The engine sizes its pool by the memory of the device; the scheduler's block manager is replaced by
one of as many blocks as the trial asks for. Needs a GPU, and was not run on one: docs/adapters says
what was tested.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from preempt_harness.adapters.nano_vllm_scheduler import NanoVllmSchedulerAdapter
from preempt_harness.adapters.nano_vllm_session import NanoVllmSession, describe
from preempt_harness.adapters.nano_vllm_source import PACKAGE, PATH_VARIABLE, find_source
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.adapters.scheduler_log import OBSERVED
from preempt_harness.admission import AdmissionModel
from preempt_harness.errors import HarnessError
from preempt_harness.workload import RequestSpec

_BLOCK_SIZE = 256  # flash-attn's; multiples of it would do as well
_COLDEST = 1e-9  # the engine refuses greedy sampling; this temperature leaves the likeliest token
_NEEDED = ("torch", "transformers", "triton", "flash_attn", "xxhash")


class PoolTooLargeError(HarnessError):
    """The trial asks for more blocks than fit on the device."""


class NanoVllmAdapter:
    """Adapter "nano-vllm"."""

    name = "nano-vllm"
    models: tuple[str, ...] = ("tiny-qwen3",)
    block_sizes: tuple[int, ...] = (_BLOCK_SIZE,)
    isolation = "process"
    known_issues: tuple[KnownIssue, ...] = ()

    @property
    def capabilities(self) -> frozenset[str]:
        """As those of its scheduler: what the engine can beyond them, it cannot repeat."""
        return NanoVllmSchedulerAdapter().capabilities

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """As its scheduler's."""
        return NanoVllmSchedulerAdapter().admission_model(settings)

    def vocab_size(self, settings: EngineSettings) -> int:
        """From the model's configuration file."""
        return int(_model_config(settings)["vocab_size"])

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """Prompts are random ids."""
        return None

    def missing(self) -> str | None:
        """The package or a checkout, and what its kernels need."""
        if find_source() is None:
            return f"pip install {PACKAGE}, or let {PATH_VARIABLE} name a checkout"
        lacking = [name for name in _NEEDED if find_spec(name) is None]
        return f"pip install {' '.join(lacking)} (on a machine with a GPU)" if lacking else None

    def open(self, settings: EngineSettings) -> NanoVllmEngineSession:
        """A new engine for every session.

        Raises:
            PoolTooLargeError: the device has no room for so many blocks.
            Exception: whatever the engine raises where it cannot run.
        """
        source = find_source()
        assert source is not None, "the adapter says that the engine is missing"
        return NanoVllmEngineSession(settings, *source)


class NanoVllmEngineSession(NanoVllmSession):
    """nano-vllm's `LLM`; its scheduler decides, its model runner computes.

    Args:
        settings: options are more arguments of `LLM`.
        folder: of the `nanovllm` package.
        version: of it.
    """

    def __init__(self, settings: EngineSettings, folder: Path, version: str) -> None:
        if str(folder.parent) not in sys.path:
            sys.path.insert(0, str(folder.parent))
        package: Any = importlib.import_module("nanovllm")
        sequence: Any = importlib.import_module("nanovllm.engine.sequence")
        arguments = engine_arguments(settings)
        self._llm: Any = package.LLM(**arguments)
        replace_pool(self._llm.scheduler, settings.num_blocks, settings.block_size)

        def make_sequence(request: RequestSpec) -> Any:
            params = package.SamplingParams(
                temperature=_COLDEST,
                max_tokens=request.sampling.max_tokens,
                ignore_eos=request.sampling.ignore_eos,
            )
            return sequence.Sequence(list(request.prompt_token_ids), params)

        super().__init__(
            settings,
            self._llm.scheduler,
            make_sequence=make_sequence,
            is_running=lambda item: item.status is sequence.SequenceStatus.RUNNING,
        )
        self.info = describe(
            settings,
            version,
            [name for name in OBSERVED if name != "Computed"],
            config={**arguments, "device": "cuda"},
            vocab_size=int(_model_config(settings)["vocab_size"]),
            max_total_tokens=arguments["max_model_len"],
        )

    def _compute(self, sequences: Sequence[Any], is_prefill: bool) -> list[int]:
        self._log.launched()
        tokens: list[int] = self._llm.model_runner.call("run", sequences, is_prefill)
        return tokens

    def close(self) -> Sequence[Any]:
        """End the engine, and with it its ranks."""
        events = super().close()
        self._llm.exit()
        return events


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of nano-vllm's `LLM`; a step must have room for the longest prompt."""
    from preempt_harness.checkpoints import resolve_model_name

    longest = int(_model_config(settings)["max_position_embeddings"])
    longest = min(settings.max_model_len or longest, longest)
    return {
        "model": str(resolve_model_name(settings.model)),
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": min(longest, settings.max_num_batched_tokens),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "kvcache_block_size": settings.block_size,
        "enforce_eager": True,
        **settings.options,
    }


def replace_pool(scheduler: Any, num_blocks: int, block_size: int) -> None:
    """Give a scheduler that has not begun a pool of as many blocks.

    Raises:
        PoolTooLargeError: its own pool, which the device has memory for, is smaller.
    """
    there = len(scheduler.block_manager.blocks)
    if there < num_blocks:
        raise PoolTooLargeError(
            f"The trial asks for {num_blocks} blocks of {block_size}, the device has room for "
            f"{there}.",
            "Ask for fewer, or raise gpu_memory_utilization by the options.",
        )
    scheduler.block_manager = type(scheduler.block_manager)(num_blocks, block_size)


def _model_config(settings: EngineSettings) -> dict[str, Any]:
    from preempt_harness.checkpoints import resolve_model_name

    path = Path(resolve_model_name(settings.model)) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    return config
