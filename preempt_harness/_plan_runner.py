"""Carries a plan through a trial: before every step, progress in, commands out. No engine.

Owns the moment at which each action fires, and the account of it: every action is reported once, as
applied when it first fires, or as missed with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec

from preempt_harness._plan import PreemptionPlan
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
    Resume,
    Squeeze,
    Step,
    anchor_of,
)
from preempt_harness._plan_syntax import encode_action, encode_anchor
from preempt_harness._plan_views import RequestView
from preempt_harness.record import PlanApplied, PlanMissed

Views = Mapping[str, RequestView]


class PreemptCommand(msgspec.Struct, frozen=True):
    """Preempt this running request before the step."""

    request: str
    mode: str


class HoldCommand(msgspec.Struct, frozen=True):
    """From now on hold so many blocks in all; "all" are those free now, 0 gives all back."""

    blocks: int | Literal["all"]


class AbortCommand(msgspec.Struct, frozen=True):
    """Abort this request before the step."""

    request: str


Command = PreemptCommand | HoldCommand | AbortCommand


@dataclass(slots=True, eq=False)
class _Entry:
    """One action on its way. Reported at most once; active until it has nothing more to do."""

    action: Action
    active: bool = True
    reported: bool = False
    num_fired: int = 0
    holding: bool = False


@dataclass(slots=True, eq=False)
class _Firing:
    """What an action did before the present step; `refuse` can take it back."""

    entry: _Entry
    commands: list[Command]
    report: PlanApplied | None = None


class PlanRunner:
    """Evaluates a plan before each step.

        commands = runner.before_step(step, views)   # carry them out in this order
        runner.refuse(command, why)                  # for each that the engine did not accept
        events += runner.take_reports()

    Args:
        plan: the plan.
        block_size: tokens per block; needed for block boundaries.

    Raises:
        PlanError: the plan has block boundaries and no block size is given.
    """

    def __init__(self, plan: PreemptionPlan, *, block_size: int | None = None) -> None:
        if block_size is not None:
            plan = plan.resolve(block_size)
        for action in plan.actions:
            if isinstance(anchor_of(action), BlockBoundary):
                raise PlanError(
                    f'"{encode_action(action)}" needs the block size.',
                    "Pass block_size, or use ComputedTokens.",
                )
        self._entries = [_Entry(action) for action in plan.actions]
        self._firings: list[_Firing] = []
        self._reports: list[PlanApplied | PlanMissed] = []
        self._touched: set[str] = set()  # requests that a command hits before this step

    def before_step(self, step: int, views: Views) -> list[Command]:
        """What to do before step `step`.

        Args:
            step: its number; greater than in the call before.
            views: request -> progress, arrived requests only, in order of arrival.
        """
        self._firings = []
        self._touched = set()
        for entry in self._entries:
            if entry.active:
                self._evaluate(entry, step, views)
        return [command for firing in self._firings for command in firing.commands]

    @property
    def is_over(self) -> bool:
        """No action has anything more to do; the requests need not be followed any further."""
        return not any(entry.active for entry in self._entries)

    def refuse(self, command: Command, why: str) -> None:
        """The engine did not carry out this command of the last `before_step`.

        An action none of whose commands was carried out is missed. Call it before `take_reports`.
        """
        for firing in self._firings:
            if any(own is command for own in firing.commands):
                firing.commands = [own for own in firing.commands if own is not command]
                if not firing.commands:
                    self._take_back(firing, why)
                return

    def finish(self, step: int, views: Views) -> list[Command]:
        """The trial is over: actions still pending are missed. Returns what gives blocks back."""
        holds = any(entry.holding for entry in self._entries)
        for entry in self._entries:
            if entry.active and not entry.reported:
                self._miss(entry, step, _why_pending(entry.action, views))
            entry.active = entry.holding = False
        return [HoldCommand(0)] if holds else []

    def take_reports(self) -> list[PlanApplied | PlanMissed]:
        """Reports since the last call, as events of the record."""
        reports, self._reports = self._reports, []
        return reports

    # One action ---------------------------------------------------------------------------------

    def _evaluate(self, entry: _Entry, step: int, views: Views) -> None:
        match entry.action:
            case Preempt():
                self._preempt(entry, entry.action, step, views)
            case PreemptAll():
                self._preempt_all(entry, entry.action, step, views)
            case Abort():
                self._abort(entry, entry.action, step, views)
            case Squeeze():
                self._squeeze(entry, entry.action, step)
            case RandomPreempt():
                self._preempt_randomly(entry, entry.action, step, views)
            case Every():
                self._preempt_regularly(entry, entry.action, step, views)

    def _preempt(self, entry: _Entry, action: Preempt, step: int, views: Views) -> None:
        view = views.get(action.request)
        runs = action.request in self._running(views)
        if view is not None and runs and _reached(action.at, step, view):
            self._fire(entry, step, [PreemptCommand(action.request, action.mode)])
            entry.active = False
        elif _is_over(action.at, step, view):
            self._miss(entry, step, self._why_not(action.request, action.at, view))

    def _preempt_all(self, entry: _Entry, action: PreemptAll, step: int, views: Views) -> None:
        running = self._running(views)
        if any(_reached(action.at, step, views[request]) for request in running):
            self._fire(entry, step, [PreemptCommand(request, action.mode) for request in running])
            entry.active = False
        elif isinstance(action.at, Step) and step >= action.at.number:
            self._miss(entry, step, "nothing runs that is not preempted already")

    def _abort(self, entry: _Entry, action: Abort, step: int, views: Views) -> None:
        view = views.get(action.request)
        if (
            view is not None
            and view.status != "finished"
            and action.request not in self._touched
            and _reached(action.at, step, view)
        ):
            self._fire(entry, step, [AbortCommand(action.request)])
            entry.active = False
        elif _is_over(action.at, step, view):
            self._miss(entry, step, self._why_not(action.request, action.at, view))

    def _squeeze(self, entry: _Entry, action: Squeeze, step: int) -> None:
        if step >= action.stop:
            entry.active = False
            if entry.holding:
                entry.holding = False
                self._firings.append(_Firing(entry, [HoldCommand(self._num_held())]))
            else:
                self._miss(entry, step, f"no step came between {action.start} and {action.stop}")
        elif step >= action.start and not entry.holding:
            entry.holding = True
            self._fire(entry, step, [HoldCommand(self._num_held())])

    def _preempt_randomly(
        self, entry: _Entry, action: RandomPreempt, step: int, views: Views
    ) -> None:
        for request in self._running(views):
            draw = random.Random(f"{action.seed}/{step}/{request}").random()
            if draw < action.probability and entry.num_fired < action.max_count:
                self._fire(entry, step, [PreemptCommand(request, action.mode)])
        entry.active = entry.num_fired < action.max_count

    def _preempt_regularly(self, entry: _Entry, action: Every, step: int, views: Views) -> None:
        if step == 0 or step % action.steps:
            return
        running = self._running(views)
        if action.request:
            running = [request for request in running if request == action.request]
        if running:
            self._fire(entry, step, [PreemptCommand(running[-1], action.mode)])
            entry.active = entry.num_fired < action.max_count

    # Bookkeeping --------------------------------------------------------------------------------

    def _running(self, views: Views) -> list[str]:
        """Running requests that no command of this step hits yet, in order of arrival."""
        return [
            request
            for request, view in views.items()
            if view.status == "running" and request not in self._touched
        ]

    def _num_held(self) -> int | Literal["all"]:
        """Blocks that all squeezes of the moment hold together."""
        total = 0
        for entry in self._entries:
            if entry.holding and isinstance(entry.action, Squeeze):
                if entry.action.blocks == "all":
                    return "all"
                total += entry.action.blocks
        return total

    def _fire(self, entry: _Entry, step: int, commands: Sequence[Command]) -> None:
        names = [command.request for command in commands if not isinstance(command, HoldCommand)]
        self._touched.update(names)
        entry.num_fired += 1
        report = None
        if not entry.reported:
            entry.reported = True
            request = names[0] if len(names) == 1 else ""
            report = PlanApplied(step, encode_action(entry.action), request)
            self._reports.append(report)
        self._firings.append(_Firing(entry, list(commands), report))

    def _miss(self, entry: _Entry, step: int, why: str) -> None:
        entry.active = False
        entry.reported = True
        self._reports.append(PlanMissed(step, encode_action(entry.action), why))

    def _take_back(self, firing: _Firing, why: str) -> None:
        if isinstance(firing.entry.action, Squeeze):
            firing.entry.active = firing.entry.holding = False
        if firing.report is not None and firing.report in self._reports:
            position = self._reports.index(firing.report)
            self._reports[position] = PlanMissed(firing.report.step, firing.report.action, why)

    def _why_not(self, request: str, anchor: Anchor, view: RequestView | None) -> str:
        """Why an action that is due now, or can be due no more, does not fire."""
        if view is None:
            return f"{request} has not arrived"
        if view.status == "finished":
            return _why_finished(request, anchor, view)
        if request in self._touched:
            return f"an earlier action hits {request} before the same step"
        return f"{request} is waiting"


def _reached(anchor: Anchor, step: int, view: RequestView) -> bool:
    """Whether a request that can be hit has come to the anchor."""
    match anchor:
        case Step():
            return step >= anchor.number
        case OutputTokens():
            return view.num_output_tokens >= anchor.count
        case ComputedTokens():
            return view.num_computed_tokens >= anchor.count
        case Chunk():
            return view.num_chunks >= anchor.count
        case Resume():
            return view.num_resumes >= anchor.count
        case BlockBoundary():
            raise AssertionError("block boundaries are resolved when the runner is built")
    assert_never(anchor)


def _is_over(anchor: Anchor, step: int, view: RequestView | None) -> bool:
    """Whether an action that has not fired will never do so."""
    if isinstance(anchor, Step):
        return step >= anchor.number
    return view is not None and view.status == "finished"


def _why_finished(request: str, anchor: Anchor, view: RequestView) -> str:
    return (
        f"{request} ended with {view.num_output_tokens} output tokens before "
        f"{encode_anchor(anchor)}"
    )


def _why_pending(action: Action, views: Views) -> str:
    """Why an action was still pending when the trial ended."""
    match action:
        case Squeeze():
            return f"the trial ended before step {action.start}"
        case RandomPreempt():
            return f"no draw for a running request fell below {action.probability!r}"
        case Every():
            return f"the trial ended before a step that {action.steps} divides met a request"
        case PreemptAll():
            return f"the trial ended before a request that ran was at {encode_anchor(action.at)}"
        case Preempt() | Abort():
            view = views.get(action.request)
            if view is None:
                return f"{action.request} never arrived"
            if view.status == "finished":
                return _why_finished(action.request, action.at, view)
            return f"the trial ended before {action.request} ran at {encode_anchor(action.at)}"
    assert_never(action)
