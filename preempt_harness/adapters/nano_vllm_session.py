"""Sessions on nano-vllm's own scheduler, block manager and sequences, whoever computes behind them.

`NanoVllmSession` has what the exact workers and the engine's own model runner share.
"""

from __future__ import annotations

import inspect
import platform
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.nano_vllm_watch import SchedulerWatch
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.adapters.scheduler_log import Log
from preempt_harness.adapters.scheduler_loop import SchedulerSession
from preempt_harness.record import RequestResult
from preempt_harness.workload import RequestSpec


class NanoVllmSession(SchedulerSession):
    """One scheduler of nano-vllm, one step a poll.

    Args:
        settings: what the trial asks for.
        scheduler: the engine's.
        make_sequence: the engine's sequence of a request.
        is_running: whether the engine says that a sequence decodes.
    """

    def __init__(
        self,
        settings: EngineSettings,
        scheduler: Any,
        *,
        make_sequence: Callable[[RequestSpec], Any],
        is_running: Callable[[Any], bool],
    ) -> None:
        super().__init__(Log(settings.max_num_batched_tokens, settings.block_size))
        self._scheduler = scheduler
        self._takes_phase = len(inspect.signature(scheduler.postprocess).parameters) > 2
        self._make_sequence = make_sequence
        self._sequences: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # the engine's sequence id -> request
        self._forced: list[Any] = []
        self._watch = SchedulerWatch(
            scheduler,
            self._log,
            settings.block_size,
            name_of=self._name,
            is_running=is_running,
            deliver=self._deliver,
        )

    @abstractmethod
    def _compute(self, sequences: Sequence[Any], is_prefill: bool) -> list[int]:
        """Launch a step; returns the token that the engine samples for each sequence."""

    def submit(self, request: RequestSpec) -> None:
        """Queue a request."""
        sequence = self._make_sequence(request)
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
        tokens = self._compute(sequences, is_prefill)
        self._log.add(record.StepDone(self._log.step))
        phase = [is_prefill] if self._takes_phase else []
        self._scheduler.postprocess(sequences, tokens, *phase)
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
        name = self._names[sequence.seq_id]
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


def describe(
    settings: EngineSettings, version: str, observed: Sequence[str], **more: Any
) -> SessionInfo:
    """What a session says of itself.

    Args:
        settings: what the trial asks for.
        version: of nano-vllm.
        observed: names of events.
        **more: further fields of `SessionInfo`; `config` is added to.
    """
    return SessionInfo(
        config={
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_seqs": settings.max_num_seqs,
            "enable_prefix_caching": True,  # there is no switch
            **settings.options,
            **more.pop("config", {}),
        },
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_ranks=settings.tensor_parallel_size,
        versions={"python": platform.python_version(), "nano-vllm": version},
        observed=list(observed),
        **more,
    )


def _range(sequence: Any, is_prefill: bool) -> tuple[int, int]:
    """Positions [start, end) that a scheduled sequence computes."""
    total = sequence.num_tokens
    if not is_prefill:
        return total - 1, total
    start = sequence.num_cached_tokens
    return start, start + getattr(sequence, "num_scheduled_tokens", total - start)
