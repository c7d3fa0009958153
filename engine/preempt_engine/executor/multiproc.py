"""Tensor parallel ranks, as a rule in processes; scheduler and blocks stay with the driver.

Owns the conversation: a step goes to all ranks as one message, every rank acknowledges it, their
shares of the result become one `LogitsBatch`. Knows nothing of models.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError, WireProtocolError
from preempt_engine.executor.group import WorkerGroup
from preempt_engine.executor.inline import InlineGroup
from preempt_engine.executor.shares import select_share_codec
from preempt_engine.executor.step_codec import StepEncoder
from preempt_engine.executor.wire import (
    Init,
    MessageKind,
    Ready,
    decode_body,
    decode_step_done,
    encode_body,
)
from preempt_engine.observer import EngineObserver
from preempt_engine.step import LogitsBatch, SchedulerOutput, SequenceKey


@dataclass(slots=True, frozen=True)
class SentStep:
    """The handle of a step that the workers are computing."""

    executor: MultiprocExecutor
    step: SchedulerOutput

    def result(self) -> LogitsBatch:
        """Wait for all ranks; steps must be waited for in the order they were sent."""
        return self.executor.finish(self.step)


class MultiprocExecutor:
    """Runs steps on `tensor_parallel_size` ranks.

    Args:
        config: of the engine; `model` is a local directory, or "exact".

    Attributes:
        num_kv_blocks: size of the pool, the same on every rank.
        num_host_blocks: size of the swap space, the same on every rank.
        vocab_size: columns of the logits.
        max_model_len: most tokens of a sequence.
        eos_token_ids: ids that end a generation.

    Raises:
        WorkerError: a rank died, failed or was silent before it was ready.
        EngineError: a rank cannot honour the configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._observer: EngineObserver | None = None
        self._encoder = StepEncoder()
        self._sent: deque[SchedulerOutput] = deque()
        ready = self._start(config)
        self.num_kv_blocks = ready.num_kv_blocks
        self.num_host_blocks = ready.num_host_blocks
        self.vocab_size = ready.vocab_size
        self.max_model_len = ready.max_model_len
        self.eos_token_ids = frozenset(ready.eos_token_ids)
        self._codec = select_share_codec(config, self.vocab_size)

    def check_usable(self) -> None:
        """Raises EngineClosedError if the workers are gone."""
        self._group.check_usable()

    def execute(self, step: SchedulerOutput) -> SentStep:
        """Send the step to every rank; does not wait."""
        body = self._encoder.encode(step, report=self._observer is not None)
        num_bytes = self._group.broadcast(MessageKind.STEP, body)
        self._sent.append(step)
        if self._observer is not None:
            for rank in range(self._group.size):
                self._observer.step_sent(step.step_id, rank, num_bytes)
            self._observer.step_launched(step.step_id)
        return SentStep(self, step)

    def finish(self, step: SchedulerOutput) -> LogitsBatch:
        """Wait until every rank has acknowledged the step; steps end in the order they began.

        Raises:
            WorkerError: a rank died, failed or was silent for `worker_timeout_s`.
        """
        assert self._sent[0] is step, f"step {self._sent[0].step_id} was not waited for"
        self._sent.popleft()
        bodies = self._group.gather(
            MessageKind.STEP_DONE,
            self._config.worker_timeout_s,
            f"computing step {step.step_id} ({self._config.worker_timeout_s:g} s)",
        )
        answers = [decode_step_done(body) for body in bodies]
        for rank, answer in enumerate(answers):
            if answer.step_id != step.step_id:
                raise WireProtocolError(
                    f"Rank {rank} acknowledged step {answer.step_id} instead of {step.step_id}.",
                    "This is a bug of the engine; please report it.",
                )
            if self._observer is not None:
                for report in answer.reports:
                    report.replay(self._observer, step.step_id, rank)
        logits = self._codec.combine(step, [answer.share for answer in answers])
        if self._observer is not None:
            self._observer.step_done(step.step_id)
        return logits

    def set_observer(self, observer: EngineObserver | None) -> None:
        """Who is told of steps; without one, the workers report nothing."""
        self._observer = observer

    def known_keys(self) -> Iterable[SequenceKey]:
        """Sequences that every rank keeps."""
        return self._encoder.known_keys

    def reset(self) -> None:
        """Have every rank forget sequences and KV; no step may be under way."""
        assert not self._sent, f"step {self._sent[0].step_id} is under way"
        self._encoder.reset()
        self._group.broadcast(MessageKind.RESET, b"")
        self._group.gather(MessageKind.RESET_DONE, self._config.worker_timeout_s, "resetting")

    def close(self) -> None:
        """End the workers; may be called twice, and after a failure."""
        self._group.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the workers, by rank."""
        return self._group.process_ids

    def _start(self, config: EngineConfig) -> Ready:
        """Start the workers and wait until each has loaded its shard."""
        store_fd = -1 if config.is_exact else os.memfd_create("preempt-engine-store")
        inherited = () if config.is_exact else (store_fd,)
        try:
            size = config.tensor_parallel_size
            self._group: WorkerGroup | InlineGroup = (
                WorkerGroup(size, _environment(size), inherited)
                if config.worker_processes
                else InlineGroup(size)
            )
            self._group.broadcast(MessageKind.INIT, encode_body(Init(config, store_fd)))
            limit_s = config.worker_start_timeout_s
            bodies = self._group.gather(MessageKind.READY, limit_s, f"starting ({limit_s:g} s)")
        finally:
            if store_fd >= 0:
                os.close(store_fd)
        answers = [decode_body(body, Ready) for body in bodies]
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                self.close()
                raise ConfigError(
                    f"Rank {rank} is ready with {answer}, rank 0 with {answers[0]}.",
                    "All ranks must see the same checkpoint; set num_kv_blocks if memory differs.",
                )
        return answers[0]


def _environment(num_ranks: int) -> dict[str, str]:
    """What the libraries of a rank should know, unless the user has said otherwise."""
    num_cores = len(os.sched_getaffinity(0))
    return {
        # Ranks live on one machine: gloo need not ask which interface leads to the others.
        "GLOO_SOCKET_IFNAME": "lo",
        # Every rank would take all cores.
        "OMP_NUM_THREADS": str(max(1, num_cores // num_ranks)),
    }
