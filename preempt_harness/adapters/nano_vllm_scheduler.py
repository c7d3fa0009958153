"""Adapter "nano-vllm-scheduler": nano-vllm's own decisions and messages, exact workers behind them.

The engine's scheduler, block manager and sequences run as they are (`nano_vllm_exact`); its own
serialisation carries sequences to the ranks above 0, and its own preparation makes a step's inputs
from them (`nano_vllm_ranks`). The model is the exact KV model.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from preempt_harness.adapters import protocol
from preempt_harness.adapters.nano_vllm_exact import ExactNanoVllmSession
from preempt_harness.adapters.nano_vllm_issues import ISSUES, VERSION
from preempt_harness.adapters.nano_vllm_source import PACKAGE, PATH_VARIABLE, find_source
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.adapters.scheduler_loop import ExactModelAdapter
from preempt_harness.admission import AdmissionModel


class NanoVllmSchedulerAdapter(ExactModelAdapter):
    """Adapter "nano-vllm-scheduler"."""

    name = "nano-vllm-scheduler"
    block_sizes: tuple[int, ...] = (4, 8, 16, 32, 256)

    @property
    def known_issues(self) -> tuple[KnownIssue, ...]:
        """Of the released package; of a checkout nothing is known."""
        source = find_source()
        return ISSUES if source is not None and source[1] == VERSION else ()

    @property
    def capabilities(self) -> frozenset[str]:
        """Chunked prefill came with a commit of April 2026, and a cache that keeps what it can."""
        able = {
            protocol.STEPPED,
            protocol.PREEMPT,
            protocol.HOLD_BLOCKS,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.QUEUE_ORDER,
            protocol.TENSOR_PARALLEL,
            protocol.INLINE_RANKS,  # always
            protocol.EOS,
        }
        if chunks_prompts():
            able |= {protocol.CHUNKED_PREFILL, protocol.KEEPS_FREED_BLOCKS}
        return frozenset(able)

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted when the pool holds all its known tokens.

        The engine's `max_num_seqs` bounds the requests of a step, not those that hold blocks.
        """
        return AdmissionModel(
            policy="full_prompt",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefix_caching=True,
        )

    def missing(self) -> str | None:
        """The package, a checkout, or what its block manager imports."""
        if find_source() is None:
            return f"pip install --no-deps {PACKAGE}, or let {PATH_VARIABLE} name a checkout"
        lacking = [name for name in ("numpy", "xxhash") if find_spec(name) is None]
        return f"pip install {' '.join(lacking)}" if lacking else None

    def open(self, settings: EngineSettings) -> ExactNanoVllmSession:
        """A fresh scheduler for every session.

        Raises:
            NanoVllmSourceError: what is installed cannot be loaded.
        """
        source = find_source()
        assert source is not None, "the adapter says that the engine is missing"
        return ExactNanoVllmSession(settings, *source)


def chunks_prompts() -> bool:
    """Whether the engine computes a long prompt in several steps."""
    source = find_source()
    return source is not None and _schedules_chunks(source[0])


@lru_cache(maxsize=8)
def _schedules_chunks(folder: Path) -> bool:
    scheduler = folder / "engine" / "scheduler.py"
    return scheduler.is_file() and "num_scheduled_tokens" in scheduler.read_text()
