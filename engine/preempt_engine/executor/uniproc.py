"""One rank, in this process: a step is done when `execute` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from preempt_engine.executor.protocol import Runner
from preempt_engine.observer import EngineObserver
from preempt_engine.step import LogitsBatch, SchedulerOutput, SequenceKey


@dataclass(slots=True, frozen=True)
class FinishedStep:
    """The handle of a step that is done."""

    logits: LogitsBatch

    def result(self) -> LogitsBatch:
        return self.logits


class UniprocExecutor:
    """Hands steps to a runner.

    Args:
        runner: of the only rank.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_kv_blocks = runner.num_kv_blocks
        self.num_host_blocks = runner.num_host_blocks
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.eos_token_ids = runner.eos_token_ids
        self._observer: EngineObserver | None = None

    @property
    def process_ids(self) -> list[int]:
        """None: the rank is this process."""
        return []

    def check_usable(self) -> None:
        """Always: there is no process to lose."""

    def execute(self, step: SchedulerOutput) -> FinishedStep:
        """Run the step."""
        if self._observer is not None:
            self._observer.step_launched(step.step_id)
        logits = self.runner.execute(step)
        if self._observer is not None:
            self._observer.step_done(step.step_id)
        return FinishedStep(logits)

    def set_observer(self, observer: EngineObserver | None) -> None:
        """Who is told of launched and finished steps, and of what the runner computes."""
        self._observer = observer
        self.runner.observer = observer

    def known_keys(self) -> Iterable[SequenceKey]:
        """Sequences that the runner keeps."""
        return self.runner.state.sequences

    def reset(self) -> None:
        """Have the runner forget its sequences."""
        self.runner.reset()

    def close(self) -> None:
        """Release the runner's memory."""
        self.runner.close()
