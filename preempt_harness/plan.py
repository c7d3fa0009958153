"""Preemption plans: which request loses its KV cache, and when.

The facade of its parts: anchors and actions, the plan, its string form, and the runner that turns
it into commands. Knows no engine; a trial gives the runner progress and carries its commands out.
"""

from __future__ import annotations

from preempt_harness._plan import PreemptionPlan
from preempt_harness._plan_actions import (
    MODES,
    Abort,
    Action,
    Anchor,
    BlockBoundary,
    Chunk,
    ComputedTokens,
    Every,
    Mode,
    OutputTokens,
    PlanError,
    Preempt,
    PreemptAll,
    RandomPreempt,
    Resume,
    Squeeze,
    Step,
    anchor_of,
)
from preempt_harness._plan_runner import (
    AbortCommand,
    Command,
    HoldCommand,
    PlanRunner,
    PreemptCommand,
)
from preempt_harness._plan_views import RequestView, RequestViews

__all__ = [
    "MODES",
    "Abort",
    "AbortCommand",
    "Action",
    "Anchor",
    "BlockBoundary",
    "Chunk",
    "Command",
    "ComputedTokens",
    "Every",
    "HoldCommand",
    "Mode",
    "OutputTokens",
    "PlanError",
    "PlanRunner",
    "Preempt",
    "PreemptAll",
    "PreemptCommand",
    "PreemptionPlan",
    "RandomPreempt",
    "RequestView",
    "RequestViews",
    "Resume",
    "Squeeze",
    "Step",
    "anchor_of",
]
