"""The floor of the embedded engine's time: its linear layers alone, over a schedule that it ran.

Every step of the schedule is repeated as the matrix products of the same layers with the same
numbers of rows, in the same order, on the same (packed) weights, and nothing else: no norms, no
attention, no sampling, no Python between layers. What the engine needs beyond that is overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from preempt_engine import LLM
from preempt_engine.layers.linear import Linear
from preempt_engine.layers.parallel import VocabParallelHead
from preempt_engine.layers.row_plan import RowPlan

Schedule = list[tuple[int, int]]


class ScheduleTap:
    """Records what an engine's runner is given: tokens and rows of logits of each step.

    Args:
        llm: a running engine with one rank.
    """

    def __init__(self, llm: LLM) -> None:
        self.schedule: Schedule = []
        self.runner: Any = llm._executor.runner  # type: ignore[attr-defined]
        self._execute = self.runner.execute
        self.runner.execute = self._record

    def _record(self, step: Any) -> Any:
        if step.scheduled:
            self.schedule.append((step.num_scheduled_tokens, step.num_logits))
        return self._execute(step)


class LinearLimit:
    """The linear layers of an engine's model.

    Args:
        runner: a `ModelRunner` whose model is loaded.
    """

    def __init__(self, runner: Any) -> None:
        linears = [layer for layer in runner._model.modules() if isinstance(layer, Linear)]
        self.head = next(layer for layer in linears if isinstance(layer, VocabParallelHead))
        self.body = [layer for layer in linears if layer is not self.head]
        self.dtype: torch.dtype = runner.dtype
        self.row_plan: RowPlan = runner.row_plan
        self.inputs: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def seconds(self, schedule: Schedule, clock: Callable[[], float] = time.perf_counter) -> float:
        """Time of all products of all steps, in seconds of `clock`; the inputs are made before."""
        padded = self.row_plan.padded
        steps = [(padded(tokens), padded(logits)) for tokens, logits in schedule]
        for layer in (*self.body, self.head):
            for rows in {rows for step in steps for rows in step}:
                self._input(rows, layer)
        started = clock()
        for tokens, logits in steps:
            for layer in self.body:
                layer.local(self._input(tokens, layer))
            if logits:
                self.head.local(self._input(logits, self.head))
        return clock() - started

    def _input(self, rows: int, layer: Linear) -> Tensor:
        key = (rows, layer.weight.shape[1])
        if key not in self.inputs:
            self.inputs[key] = torch.randn(key).to(self.dtype)
        return self.inputs[key]
