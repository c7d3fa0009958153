"""Runs steps with others decided ahead of them. Owns the order: decide, launch, apply.

step()   decide ahead while the launched step runs; wait for it and apply it; launch the next
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from preempt_engine.async_scheduler import AsyncScheduler
from preempt_engine.outputs import RequestOutput
from preempt_engine.step import LogitsBatch, SchedulerOutput, StepHandle


class StepPipeline:
    """The steps of one engine.

    Args:
        scheduler: decides them.
        depth: steps decided ahead of the one that runs.
        decide: first phase, when nothing is under way: raises if that is a stall.
        execute: launches a step.
        update: applies a step.
    """

    def __init__(
        self,
        scheduler: AsyncScheduler,
        depth: int,
        *,
        decide: Callable[[], SchedulerOutput | None],
        execute: Callable[[SchedulerOutput], StepHandle],
        update: Callable[[SchedulerOutput, LogitsBatch], list[RequestOutput]],
    ) -> None:
        self._scheduler = scheduler
        self._depth = depth
        self._decide = decide
        self._execute = execute
        self._update = update
        self._decided: deque[SchedulerOutput] = deque()
        self._running: tuple[SchedulerOutput, StepHandle] | None = None

    def step(self) -> list[RequestOutput]:
        """Apply one step; returns the outputs that changed."""
        if self._running is None:
            step = self._decide()
            if step is None:
                return []
            self._decided.append(step)
            self._launch_next()
        while len(self._decided) < self._depth:
            step = self._scheduler.schedule()
            if not step.has_work:
                break
            self._decided.append(step)
        outputs = self._apply()
        self._launch_next()
        if not self._scheduler.requests:
            self.drain()
        return outputs

    def drain(self) -> None:
        """Wait for what is under way, such as copies of blocks that nobody wants any more."""
        while self._running is not None:
            self._apply()
            self._launch_next()

    def _launch_next(self) -> None:
        while self._decided and self._running is None:
            step = self._decided.popleft()
            if self._scheduler.launch(step):
                self._running = step, self._execute(step)

    def _apply(self) -> list[RequestOutput]:
        if self._running is None:
            return []
        (step, handle), self._running = self._running, None
        try:
            logits = handle.result()
        except BaseException:
            self._scheduler.leave_step(step)
            raise
        return self._update(step, logits)
