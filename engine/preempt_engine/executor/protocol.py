"""How the engine has a step run, wherever the workers are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from preempt_engine.observer import EngineObserver
from preempt_engine.step import LogitsBatch, SchedulerOutput, SequenceKey, StepHandle
from preempt_engine.worker.state import WorkerState


class Runner(Protocol):
    """One rank's model: takes steps, gives logits.

    Attributes:
        rank: tensor parallel rank.
        state: what this rank knows of the sequences.
    """

    rank: int
    state: WorkerState
    num_kv_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    observer: EngineObserver | None

    def execute(self, step: SchedulerOutput) -> LogitsBatch: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class Executor(Protocol):
    """Runs steps on all ranks. The attributes are those of every rank's runner.

    Nothing here says where the ranks are: `uniproc` has one in this process, `multiproc` has
    processes on this machine, and an executor on several machines would fit as well.
    """

    num_kv_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that the executor has started, by rank."""
        ...

    def check_usable(self) -> None:
        """Raises EngineClosedError if ranks are gone, which ended the step that noticed it."""
        ...

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch a step; its handle waits for the logits."""
        ...

    def set_observer(self, observer: EngineObserver | None) -> None: ...

    def known_keys(self) -> Iterable[SequenceKey]:
        """Sequences that the ranks keep, as far as they have been told."""
        ...

    def reset(self) -> None:
        """Have every rank forget sequences and KV; no step may be under way."""
        ...

    def close(self) -> None:
        """Stop the workers and release what they hold; may be called twice."""
        ...
