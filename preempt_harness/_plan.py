"""The plan itself: its actions, its string form, what it needs and whether a workload suits it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from preempt_harness._plan_actions import (
    Abort,
    Action,
    Anchor,
    BlockBoundary,
    Chunk,
    ComputedTokens,
    Every,
    OutputTokens,
    PlanError,
    Preempt,
    PreemptAll,
    RandomPreempt,
    Squeeze,
    anchor_of,
)
from preempt_harness._plan_syntax import encode, encode_action, parse
from preempt_harness.workload import RequestSpec, Workload

_LISTED = 8  # requests that a message lists


@dataclass(frozen=True)
class PreemptionPlan:
    """A short list of actions. The empty plan leaves preemption to the engine.

    Args:
        actions: in order; of two that hit the same request before the same step the first wins.
    """

    actions: tuple[Action, ...] = ()

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        object.__setattr__(self, "actions", tuple(actions))

    def __bool__(self) -> bool:
        return bool(self.actions)

    def __str__(self) -> str:
        return self.encode()

    @classmethod
    def parse(cls, text: str) -> PreemptionPlan:
        """Read the string form.

        Raises:
            PlanError: points at the action that cannot be read.
        """
        return cls(parse(text))

    def encode(self) -> str:
        """The string form; `parse` gives an equal plan back."""
        return encode(self.actions)

    def resolve(self, block_size: int) -> PreemptionPlan:
        """The same plan with block boundaries as token counts.

        Raises:
            PlanError: a boundary lies before the first token.
        """
        return PreemptionPlan(_resolved(action, block_size) for action in self.actions)

    @property
    def capabilities(self) -> frozenset[str]:
        """What a session must be able to do, in the names of `adapters.protocol`."""
        needed: set[str] = set()
        for action in self.actions:
            match action:
                case Abort():
                    needed.add("abort")
                case Squeeze():
                    needed |= {"hold_blocks", "stepped"}
                case Every() | RandomPreempt():
                    needed |= {"preempt", "stepped", action.mode}
                case Preempt() | PreemptAll():
                    needed |= {"preempt", action.mode}
            anchor = anchor_of(action)
            if anchor is not None and not isinstance(anchor, OutputTokens):
                needed.add("stepped")
        return frozenset(needed)

    def validate(self, workload: Workload, *, block_size: int | None = None) -> None:
        """Check that every action can be due in this workload.

        Args:
            workload: what will run.
            block_size: for block boundaries, which are left unchecked without it.

        Raises:
            PlanError: names all actions that cannot, and why.
        """
        problems: list[str] = []
        for number, action in enumerate(self.actions, start=1):
            if block_size is not None:
                action = _resolved(action, block_size)
            for problem in _problems(action, workload):
                problems.append(f'action {number}, "{encode_action(action)}": {problem}')
        if problems:
            raise PlanError(
                f"The plan does not suit the workload: {'; '.join(problems)}.",
                "Change the anchor or the request, or take the action out.",
            )


def _resolved(action: Action, block_size: int) -> Action:
    if isinstance(action, Preempt | PreemptAll | Abort) and isinstance(action.at, BlockBoundary):
        return msgspec.structs.replace(action, at=action.at.resolve(block_size))
    return action


def _problems(action: Action, workload: Workload) -> Iterator[str]:
    requests = {request.id: request for request in workload.requests}
    name = "" if isinstance(action, PreemptAll | Squeeze | RandomPreempt) else action.request
    if name and name not in requests:
        more = ", ..." if len(requests) > _LISTED else ""
        yield f"no request is called {name}; known are {', '.join([*requests][:_LISTED])}{more}"
        return
    anchor = anchor_of(action)
    if anchor is None:
        return
    concerned = [requests[name]] if name else workload.requests
    reasons = [_why_never(anchor, request) for request in concerned]
    if reasons and all(reasons):
        yield reasons[0]


def _why_never(anchor: Anchor, request: RequestSpec) -> str:
    """Why the request is never at the anchor while it runs; "" if it may be."""
    outputs = request.sampling.max_tokens
    # The last output token is sampled when all before it are computed, and ends the request.
    computed = request.num_prompt_tokens + outputs - 2
    if isinstance(anchor, OutputTokens) and anchor.count >= outputs:
        return (
            f"{request.id} ends at its {outputs} output tokens (max_tokens), so it runs with "
            f"{outputs - 1} at most"
        )
    if isinstance(anchor, ComputedTokens) and anchor.count > computed:
        return (
            f"{request.id} ends with {request.num_prompt_tokens} prompt tokens and {outputs} "
            f"output tokens (max_tokens), so it runs with {computed} computed tokens at most"
        )
    if isinstance(anchor, Chunk) and anchor.count > computed:
        return f"{request.id} has at most {computed} tokens to compute in chunks"
    return ""
