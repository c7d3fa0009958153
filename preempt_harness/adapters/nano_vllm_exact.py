"""A session on nano-vllm's scheduler, with the exact KV model behind its own preparation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from preempt_harness.adapters.exact_workers import END_TOKEN_ID, VOCAB_SIZE, ExactWorkers
from preempt_harness.adapters.nano_vllm_ranks import Ranks, last_tokens
from preempt_harness.adapters.nano_vllm_session import NanoVllmSession, describe
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.adapters.scheduler_log import OBSERVED
from preempt_harness.workload import RequestSpec


class ExactNanoVllmSession(NanoVllmSession):
    """nano-vllm without its kernels.

    Args:
        settings: options are "worker_block_size": the block size that the ranks above 0 know; by
            default that of the scheduler. "default" leaves the engine's own default, as its spawned
            processes do.
        folder: of the `nanovllm` package.
        version: of it.
    """

    def __init__(self, settings: EngineSettings, folder: Path, version: str) -> None:
        self.ranks = Ranks(
            folder,
            settings.tensor_parallel_size,
            settings.block_size,
            tells_block_size=settings.options.get("worker_block_size") != "default",
            name_of=self._name,
        )
        driver = self.ranks.driver
        self._workers = ExactWorkers(
            settings.num_blocks, settings.block_size, settings.tensor_parallel_size
        )
        super().__init__(
            settings,
            driver.scheduler_class(
                SimpleNamespace(
                    max_num_seqs=settings.max_num_seqs,
                    max_num_batched_tokens=settings.max_num_batched_tokens,
                    eos=END_TOKEN_ID,
                    num_kvcache_blocks=settings.num_blocks,
                    kvcache_block_size=settings.block_size,
                )
            ),
            make_sequence=self._sequence_of,
            is_running=lambda sequence: sequence.status is driver.status.RUNNING,
        )
        self.info = describe(
            settings,
            version,
            [*OBSERVED, *(["StepSent"] if self.ranks.shows_messages else [])],
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[END_TOKEN_ID],
            batch_invariant=True,
        )

    def _sequence_of(self, request: RequestSpec) -> Any:
        params = self.ranks.driver.sampling_params_class(
            max_tokens=request.sampling.max_tokens, ignore_eos=request.sampling.ignore_eos
        )
        return self.ranks.driver.sequence_class(list(request.prompt_token_ids), params)

    def _compute(self, sequences: Sequence[Any], is_prefill: bool) -> list[int]:
        rows = self.ranks.rows(sequences, is_prefill, self._log)
        given = [[row for row in of_rank if row.token_ids] for of_rank in rows]
        chosen = self._workers.compute(self._log.step, given, self._log.add)
        return last_tokens(rows[0], [row_tokens[0] for row_tokens in chosen])
