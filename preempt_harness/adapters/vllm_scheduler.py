"""Adapters "vllm-scheduler" and "vllm-scheduler-async": vLLM's own scheduler, exact workers.

`vllm.v1.core.sched` decides over a pool of as many blocks as the trial asks for, and gets back what
a model runner sends (`vllm_session`).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.adapters.scheduler_loop import ExactModelAdapter
from preempt_harness.adapters.vllm_drafts import METHODS, num_drafts_of
from preempt_harness.adapters.vllm_engine import TESTED
from preempt_harness.adapters.vllm_session import VllmSession
from preempt_harness.admission import AdmissionModel

_MOST_STEPS_AHEAD = 1  # without pipeline parallelism


class VllmSchedulerAdapter(ExactModelAdapter):
    """Adapter "vllm-scheduler"."""

    name = "vllm-scheduler"
    least_steps_ahead = 0
    capabilities = frozenset(
        {
            protocol.STEPPED,
            protocol.PREEMPT,
            protocol.HOLD_BLOCKS,
            protocol.ABORT,
            protocol.RESET_PREFIX_CACHE,
            protocol.RESET_RUNNING_REQUESTS,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.CHUNKED_PREFILL,
            protocol.MIXED_STEPS,
            protocol.QUEUE_ORDER,
            protocol.KEEPS_FREED_BLOCKS,
            protocol.BLOCK_SIZE,
            protocol.WATERMARK,
            protocol.MAX_MODEL_LEN,
            protocol.POOL_LIMIT,
            protocol.PRIORITY,
            protocol.STOP_TOKENS,
            protocol.EOS,
            protocol.ASYNC_SCHEDULING,
            protocol.SPECULATION,
        }
    )
    block_sizes: tuple[int, ...] = ()
    known_issues: tuple[KnownIssue, ...] = ()

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted when the pool could hold all its known tokens; block 0 is nobody's.

        A step needs slots for its drafts; with asynchronous scheduling, for those that the step in
        flight may yet accept as well. A request that stops by itself then has one more step under
        way, which takes a slot for its last token.
        """
        num_drafts = num_drafts_of(settings.speculative_config)
        ahead = self._steps_ahead(settings)
        return AdmissionModel(
            policy="full_fit",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            watermark=settings.watermark,
            reserved_blocks=1,
            lookahead_tokens=num_drafts * (1 + ahead),
            draft_tokens=num_drafts,
            drafts_first=True,
            last_token_needs_room=ahead > 0,
            max_model_len=settings.max_model_len,
            outputs_apart=True,
            prefix_caching=settings.enable_prefix_caching,
        )

    def refusal(self, settings: EngineSettings) -> str | None:
        """Drafts of a model need that model; only pipelines decide more than one step ahead."""
        method = (settings.speculative_config or {}).get("method", METHODS[0])
        if method not in METHODS:
            return f"drafts by {method!r}: without a model, {' and '.join(METHODS)} can draft"
        if settings.async_scheduling > _MOST_STEPS_AHEAD:
            return f"{settings.async_scheduling} steps ahead: vLLM decides one ahead"
        return None

    def missing(self) -> str | None:
        """vLLM is looked for, not imported: that takes seconds."""
        try:
            version("vllm")
        except PackageNotFoundError:
            return f"pip install vllm=={TESTED[-1]} (its scheduler alone: docs/adapters)"
        return None

    def open(self, settings: EngineSettings) -> VllmSession:
        """A fresh scheduler for every session.

        Raises:
            VllmVersionError: the installed vLLM is not supported.
            ValueError: vLLM refuses the settings.
        """
        ahead = self._steps_ahead(settings)
        return VllmSession(msgspec.structs.replace(settings, async_scheduling=ahead))

    def _steps_ahead(self, settings: EngineSettings) -> int:
        return max(settings.async_scheduling, self.least_steps_ahead)


class AsyncVllmSchedulerAdapter(VllmSchedulerAdapter):
    """Adapter "vllm-scheduler-async": a step is always decided ahead, in baselines too."""

    name = "vllm-scheduler-async"
    least_steps_ahead = 1
