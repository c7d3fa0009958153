"""Adapter "vllm" on a CPU: the released engine whole, but for its executor.

    pytest -p preempt_harness -p tests.harness.vllm_on_cpu --pyargs preempt_harness.suite \\
        --preempt-engine vllm-on-cpu

Everything between the adapter and the model is vLLM's own: arguments, input processing, engine
core, scheduler, output processing, metrics. Where vLLM is installed, this shows that the adapter's
calls are right; what it cannot show is kernels.
"""

from __future__ import annotations

import os

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.exact_workers import VOCAB_SIZE
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.adapters.vllm import VllmAdapter
from preempt_harness.adapters.vllm_llm import VllmEngineSession

EXECUTOR = "tests.harness.vllm_executor.ExactExecutor"


class VllmOnCpuAdapter(VllmAdapter):
    """Adapter "vllm-on-cpu": what needs a sampler, drafts or ranks is left out."""

    name = "vllm-on-cpu"
    capabilities = VllmAdapter.capabilities - {
        protocol.SCORE,
        protocol.SAMPLING,
        protocol.LOGPROBS,
        protocol.PROMPT_LOGPROBS,
        protocol.PENALTIES,
        protocol.LOGIT_BIAS,
        protocol.MIN_TOKENS,
        protocol.PARALLEL_SAMPLING,
        protocol.TENSOR_PARALLEL,
        protocol.SPECULATION,
        protocol.ASYNC_SCHEDULING,
    }
    models: tuple[str, ...] = ("exact",)

    def vocab_size(self, settings: EngineSettings) -> int:
        """Of the exact model."""
        return VOCAB_SIZE

    def open(self, settings: EngineSettings) -> VllmEngineSession:
        """An engine on the exact model. To be called in a process of its own."""
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        from preempt_harness.adapters.vllm_engine import model_folder

        vllm.platforms._current_platform = CpuPlatform()
        options = {"distributed_executor_backend": EXECUTOR, "batch_invariant": False}
        session = VllmEngineSession(
            msgspec.structs.replace(
                settings, model=model_folder(), dtype="float32", options=options
            )
        )
        session.info = msgspec.structs.replace(session.info, batch_invariant=True)
        return session


def pytest_preempt_adapters() -> list[EngineAdapter]:
    """For `-p tests.harness.vllm_on_cpu`."""
    return [VllmOnCpuAdapter()]
