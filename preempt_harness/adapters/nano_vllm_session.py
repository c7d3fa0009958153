"""A session on nano-vllm's own scheduler, block manager and sequences, with exact workers."""

from __future__ import annotations

import inspect
import platform
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.exact_workers import END_TOKEN_ID, VOCAB_SIZE, ExactWorkers
from preempt_harness.adapters.nano_vllm_ranks import Ranks, last_tokens
from preempt_harness.adapters.nano_vllm_watch import SchedulerWatch
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.adapters.scheduler_log import OBSERVED, Log
from preempt_harness.adapters.scheduler_loop import SchedulerSession
from preempt_harness.record import RequestResult
from preempt_harness.workload import RequestSpec


class NanoVllmSession(SchedulerSession):
    """One scheduler of nano-vllm, one step a poll.

    Args:
        settings: options are "worker_block_size": the block size that the ranks above 0 know; by
            default that of the scheduler. "default" leaves the engine's own default, as its spawned
            processes do.
        folder: of the `nanovllm` package.
        version: of it.
    """

    def __init__(self, settings: EngineSettings, folder: Path, version: str) -> None:
        super().__init__(Log(settings.max_num_batched_tokens, settings.block_size))
        self._sequences: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # the engine's sequence id -> request
        self._forced: list[Any] = []
        self.ranks = Ranks(
            folder,
            settings.tensor_parallel_size,
            settings.block_size,
            tells_block_size=settings.options.get("worker_block_size") != "default",
            name_of=self._name,
        )
        driver = self.ranks.driver
        self._scheduler: Any = driver.scheduler_class(
            SimpleNamespace(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                eos=END_TOKEN_ID,
                num_kvcache_blocks=settings.num_blocks,
                kvcache_block_size=settings.block_size,
            )
        )
        self._watch = SchedulerWatch(
            self._scheduler,
            self._log,
            settings.block_size,
            name_of=self._name,
            is_running=lambda sequence: sequence.status is driver.status.RUNNING,
            deliver=self._deliver,
        )
        self._workers = ExactWorkers(
            settings.num_blocks, settings.block_size, settings.tensor_parallel_size
        )
        self.info = SessionInfo(
            config={
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "max_num_seqs": settings.max_num_seqs,
                "enable_prefix_caching": True,  # there is no switch
                **settings.options,
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=VOCAB_SIZE,
            num_ranks=settings.tensor_parallel_size,
            versions={"python": platform.python_version(), "nano-vllm": version},
            observed=[*OBSERVED, *(["StepSent"] if self.ranks.shows_messages else [])],
            batch_invariant=True,
        )

    def submit(self, request: RequestSpec) -> None:
        """Queue a request."""
        driver = self.ranks.driver
        params = driver.sampling_params_class(
            max_tokens=request.sampling.max_tokens, ignore_eos=request.sampling.ignore_eos
        )
        sequence = driver.sequence_class(list(request.prompt_token_ids), params)
        self._sequences[request.id] = sequence
        self._names[sequence.seq_id] = request.id
        self._log.arrived(request)
        self._scheduler.add(sequence)

    def results(self) -> dict[str, RequestResult]:
        """The engine's own outputs."""
        return self._log.results(lambda name: list(self._sequences[name].completion_token_ids))

    def preempt(self, request: str, mode: str) -> None:
        """Preempt a request that holds blocks before the next step, by the engine's own method."""
        self._forced.append(self._sequences[request])

    def hold_blocks(self, num_blocks: int) -> int:
        """Take free blocks as a sequence would, or give them back."""
        return self._watch.hold_blocks(num_blocks)

    # A step -------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._scheduler.is_finished():
            return
        self._force()
        try:
            sequences, is_prefill = self._scheduler.schedule()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            if self._watch.holds_blocks and place.line == "assert scheduled_seqs":
                return  # of the engine's blocks none ever vanish, so it expects something to run
            self._watch.explain(error, place)
            raise
        for sequence in sequences:
            start, end = _range(sequence, is_prefill)
            if start < end:  # a prompt that is cached whole computes nothing
                self._log.scheduled(self._name(sequence), start, end, sequence.num_tokens)
        rows = self.ranks.rows(sequences, is_prefill, self._log)
        given = [[row for row in of_rank if row.token_ids] for of_rank in rows]
        chosen = self._workers.compute(self._log.step, given, self._log.add)
        self._log.add(record.StepDone(self._log.step))
        tokens = last_tokens(rows[0], [row_tokens[0] for row_tokens in chosen])
        takes_phase = len(inspect.signature(self._scheduler.postprocess).parameters) > 2
        self._scheduler.postprocess(sequences, tokens, *([is_prefill] if takes_phase else []))
        for sequence in sequences:
            self._deliver(sequence)

    def _force(self) -> None:
        """Preempt those that were asked for; the last admitted first, as the engine does."""
        self._watch.reason = "forced"
        for queue in (self._scheduler.waiting, self._scheduler.running):
            for sequence in reversed([item for item in queue if item in self._forced]):
                if sequence.block_table:
                    queue.remove(sequence)
                    self._scheduler.preempt(sequence)
        self._forced.clear()
        self._watch.reason = "out_of_blocks"

    def _deliver(self, sequence: Any) -> None:
        """New tokens, and the end; called as soon as the engine has both."""
        name = self._name(sequence)
        track = self._log.tracks[name]
        if track.finish_reason:
            return
        self._log.delivered(name, sequence.completion_token_ids[track.num_delivered :])
        if sequence.is_finished:
            full = sequence.num_completion_tokens >= sequence.max_tokens
            self._log.finished(name, "length" if full else "stop")

    def _record_pool(self) -> None:
        self._watch.record_pool(self._sequences)

    def _name(self, sequence: Any) -> str:
        return self._names[sequence.seq_id]


def _range(sequence: Any, is_prefill: bool) -> tuple[int, int]:
    """Positions [start, end) that a scheduled sequence computes."""
    total = sequence.num_tokens
    if not is_prefill:
        return total - 1, total
    start = sequence.num_cached_tokens
    return start, start + getattr(sequence, "num_scheduled_tokens", total - start)
