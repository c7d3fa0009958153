"""An executor for vLLM's engine that needs no GPU: the exact KV model in place of a real one.

Imported by vLLM alone, by its name.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from preempt_harness.adapters.exact_workers import ExactWorkers
from preempt_harness.adapters.vllm_runner import ModelRunner


class ExactExecutor(Executor):
    """Computes what the scheduler sends, as `ModelRunner` understands it."""

    uses_ray = False

    def _init_executor(self) -> None:
        self._step = 0

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """There are no workers to ask."""
        return None if kwargs.get("single_value") else [None]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        size = self.vllm_config.cache_config.block_size
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        return [{"layer": spec}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD"]]

    def set_kv_cache_layout(self, *args: Any, **kwargs: Any) -> None:
        """There are no tensors to lay out."""

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        size = self.vllm_config.cache_config.block_size
        self._runner = ModelRunner(size, 0, lambda name, token_ids: [])
        self._workers = ExactWorkers(kv_cache_configs[0].num_blocks, size)

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        launched = self._runner.launch(scheduler_output)
        if launched.rows:
            greedy = self._workers.compute(self._step, [launched.rows], lambda event: None)
            self._runner.take_tokens(launched, greedy)
        self._step += 1
        names = list(launched.sampled)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[launched.sampled[name] for name in names],
        )
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def take_draft_token_ids(self) -> None:
        return None

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_health(self) -> None:
        """Nothing can be ill."""

    def shutdown(self) -> None:
        """Nothing is held."""
