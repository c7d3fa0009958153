"""Plans from a seed that suit a workload and an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.plan import (
    MODES,
    Abort,
    Action,
    Anchor,
    ComputedTokens,
    Mode,
    OutputTokens,
    Preempt,
    PreemptAll,
    PreemptionPlan,
    RandomPreempt,
    Resume,
    Squeeze,
    Step,
)
from preempt_harness.workload import Workload

ACTION_KINDS = ("output", "computed", "resume", "all", "squeeze", "abort", "random")
"""What a random plan is made of."""


def random_plan(
    source: random.Random,
    workload: Workload,
    adapter: EngineAdapter,
    kinds: Sequence[str] = ACTION_KINDS,
) -> PreemptionPlan:
    """No action, or a few, each of which can be due in the workload."""
    able = adapter.capabilities
    modes: list[Mode] = [mode for mode in MODES if mode in able]
    if protocol.PREEMPT not in able or not kinds or not modes or source.random() < 0.3:
        return PreemptionPlan()
    actions = [
        _random_action(source, workload, source.choice(kinds), modes)
        for _ in range(source.randint(1, 3))
    ]
    return PreemptionPlan(
        action for action in actions if PreemptionPlan([action]).capabilities <= able
    )


def _random_action(
    source: random.Random, workload: Workload, kind: str, modes: Sequence[Mode]
) -> Action:
    request = source.choice(workload.requests)
    prompt, outputs = request.num_prompt_tokens, request.sampling.max_tokens
    horizon = prompt + outputs
    mode = source.choice(modes)
    # Which of several branches a count would be of is not said; their steps are.
    plain = request.sampling.num_sequences == 1
    if kind == "output" and outputs > 1 and plain:
        return Preempt(request.id, OutputTokens(source.randint(1, outputs - 1)), mode)
    if kind == "computed" and horizon > 2 and plain:
        return Preempt(request.id, ComputedTokens(source.randint(1, horizon - 2)), mode)
    if kind in ("output", "computed"):
        return Preempt(request.id, Step(source.randint(1, horizon)), mode)
    if kind == "resume":
        return Preempt(request.id, Resume(1), mode)
    if kind == "all":
        return PreemptAll(Step(source.randint(1, horizon)), mode)
    if kind == "squeeze":
        start = source.randint(0, horizon)
        return Squeeze("all", start, start + source.randint(1, 8))
    if kind == "abort":
        anchors: list[Anchor] = [Resume(1), Step(source.randint(1, horizon))]
        if horizon > 2 and plain:
            anchors.append(ComputedTokens(source.randint(1, horizon - 2)))
        return Abort(request.id, source.choice(anchors))
    return RandomPreempt(0.1, source.randint(1, 6), source.randrange(1000), mode)
