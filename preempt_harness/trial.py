"""Runs one trial: submits a workload, carries out a plan, and records what the engine does.

Owns the loop and its end. Knows engines through the session protocol only, judges nothing: a crash,
a hang and a refusal all end in the record, for the checks to see.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from preempt_harness import record
from preempt_harness._knob_watch import POISON_EVENTS, KnobWatch
from preempt_harness.adapters import protocol
from preempt_harness.adapters.child import EngineProcessError
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.decoded import decode_outputs
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.plan import (
    AbortCommand,
    Command,
    Every,
    HoldCommand,
    PlanRunner,
    PreemptAll,
    PreemptCommand,
    PreemptionPlan,
    RandomPreempt,
    RequestViews,
    Squeeze,
    Step,
    anchor_of,
)
from preempt_harness.record import AnyEvent, Header, TrialRecord
from preempt_harness.workload import Operation, RequestSpec, Workload

SessionOpener = Callable[[EngineSettings], Session]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, as plain data; the same trial run twice gives the same record digest.

    Attributes:
        engine: name of the adapter.
        settings: the engine's settings, block count included.
        workload: requests and operations.
        plan: string form of the preemption plan, "" for none.
        budget: where the block count comes from, for the record's header.
    """

    engine: str
    settings: EngineSettings
    workload: Workload
    plan: str = ""
    budget: dict[str, Any] = {}


def run_trial(
    trial: Trial,
    adapter: EngineAdapter,
    *,
    open_session: SessionOpener | None = None,
    poll_timeout_s: float = 60.0,
) -> TrialRecord:
    """Run a trial to its end, good or bad.

    Args:
        trial: what to run.
        adapter: of the engine that the trial names.
        open_session: opens the session in place of `adapter.open`, for instance in a child process.
        poll_timeout_s: longest wait for an engine that cannot be stepped.

    Raises:
        UnsupportedTrialError: the engine cannot do what the trial needs; nothing was run.
        Exception: whatever opening the session raised.
    """
    plan = PreemptionPlan.parse(trial.plan)
    plan.validate(trial.workload)
    _check_capabilities(trial, plan, adapter)
    session = (open_session or adapter.open)(trial.settings)
    run = _Run(trial, plan, adapter, session, poll_timeout_s)
    errors: list[Exception] = []
    try:
        run.loop()
    except Exception as error:
        errors.append(error)
    try:
        run.events += session.close()  # what the engine did before it failed comes first
    except Exception as error:
        errors.append(error)
    run.events += [_engine_error(run.step, error) for error in errors]
    made = TrialRecord(header=run.header(), events=run.events, results=session.results())
    made.decoded = decode_outputs(made, trial.settings, trial.workload, adapter)
    return made


class _Run:
    """The state of one trial under way."""

    def __init__(
        self,
        trial: Trial,
        plan: PreemptionPlan,
        adapter: EngineAdapter,
        session: Session,
        poll_timeout_s: float,
    ) -> None:
        self.step = 0
        self.events: list[AnyEvent] = []
        self._trial = trial
        self._adapter = adapter
        self._session = session
        self._poll_timeout_s = poll_timeout_s
        self._views = RequestViews()
        self._plan_runner = PlanRunner(plan, block_size=session.info.block_size)
        self._has_plan = not self._plan_runner.is_over
        self._num_submitted = 0
        self._is_stepped = protocol.STEPPED in adapter.capabilities
        needed = {"PoolCounts", "Preempted", "TokensDelivered"}
        self._sees_knobs = self._is_stepped and needed <= set(session.info.observed)
        self._heard_at = time.monotonic()
        self._max_polls = poll_bound(trial.workload, plan)
        self._knobs = KnobWatch(
            adapter.name,
            num_reserved_blocks=session.info.config.get("reserved_blocks", 0),
            num_ahead=trial.settings.async_scheduling,
            poisons=_poisons(trial.settings) and set(session.info.observed) >= POISON_EVENTS,
        )

    def loop(self) -> None:
        """Poll until every request has ended, or until no clean engine would still be busy."""
        requests = sorted(self._trial.workload.requests, key=lambda item: item.arrival_step)
        operations: defaultdict[int, list[Operation]] = defaultdict(list)
        for operation in self._trial.workload.operations:
            operations[operation.step].append(operation)
        while self._num_submitted < len(requests) or self._session.unfinished():
            why = self._why_hung()
            if why:
                self.events.append(record.EngineError(step=self.step, kind="hang", message=why))
                return
            if self._num_submitted < len(requests):
                self._submit(requests)
            for operation in operations.get(self.step, ()):
                self._operate(operation)
            if self._has_plan:
                self._carry_out(self._plan_runner.before_step(self.step, self._views.views))
                self.events += self._plan_runner.take_reports()
                self._has_plan = not self._plan_runner.is_over  # and never is again
            if self._num_submitted == len(requests) and not self._session.unfinished():
                break  # the last was aborted: nobody asks for a step any more
            events = self._session.poll(self._poll_timeout_s)
            self._take(events)
            if self._sees_knobs:
                self._knobs.take(events)
            self.step += 1
        self._carry_out(self._plan_runner.finish(self.step, self._views.views))
        self.events += self._plan_runner.take_reports()

    def _submit(self, requests: Sequence[RequestSpec]) -> None:
        """Hand over those whose step has come, of all in order of arrival."""
        until = self.step
        if not self._is_stepped and not self._session.unfinished():
            # Only steps pass by themselves; from this engine nothing would ever come.
            until = max(until, requests[self._num_submitted].arrival_step)
        while (
            self._num_submitted < len(requests)
            and requests[self._num_submitted].arrival_step <= until
        ):
            self._session.submit(requests[self._num_submitted])
            self._num_submitted += 1
            self._heard_at = time.monotonic()

    def _why_hung(self) -> str:
        """Why the engine counts as hung, "" while it does not."""
        if self.step >= self._max_polls:
            return (
                f"requests are unfinished after {self.step} polls, more than this workload and "
                f"plan can need"
            )
        if self._is_stepped:
            return ""
        if time.monotonic() - self._heard_at >= self._poll_timeout_s:
            return f"requests are unfinished, and nothing has come for {self._poll_timeout_s:g} s"
        return ""

    def header(self) -> Header:
        """What was run, as the session describes itself."""
        info = self._session.info
        return Header(
            workload=self._trial.workload.to_builtins(),
            plan=self._trial.plan,
            budget=self._trial.budget,
            engine=self._adapter.name,
            model=self._trial.settings.model,
            config=info.config,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            versions=info.versions,
            capabilities=sorted(self._adapter.capabilities),
            observed=info.observed,
            batch_invariant=info.batch_invariant,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            num_ranks=info.num_ranks,
            max_total_tokens=info.max_total_tokens,
        )

    def _take(self, events: Sequence[AnyEvent]) -> None:
        if events and not self._is_stepped:
            self._heard_at = time.monotonic()
        self.events += events
        if self._has_plan:
            self._views.apply(events)

    def _operate(self, operation: Operation) -> None:
        if operation.kind == "abort":
            self._session.abort(operation.request)
        elif operation.kind == "reset_prefix_cache":
            self._session.reset_prefix_cache()
        elif operation.kind == "reset_running_requests":
            self._session.reset_running_requests()
        elif operation.kind == "set_priority":
            self._session.set_priority(operation.request, operation.priority)
        else:
            raise UnsupportedTrialError(
                f"Operation kind {operation.kind!r} is unknown.",
                "Use abort, reset_prefix_cache, reset_running_requests or set_priority.",
            )

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, PreemptCommand):
                self._session.preempt(command.request, command.mode)
                self._knobs.preempted(command.request)
            elif isinstance(command, AbortCommand):
                self._session.abort(command.request)
            else:
                self._hold(command)

    def _hold(self, command: HoldCommand) -> None:
        every = self._session.info.num_blocks
        wanted = every if command.blocks == "all" else command.blocks
        num_held = self._session.hold_blocks(wanted)
        if self._sees_knobs:
            self._knobs.held(num_held, wanted)
        if num_held == 0 and wanted > 0:
            self._plan_runner.refuse(command, "no block is free that could be held")


def _poisons(settings: EngineSettings) -> bool:
    """Whether every block that is freed is to be poisoned: none is kept for a prefix cache."""
    return bool(settings.options.get("poison")) and not settings.enable_prefix_caching


def poll_bound(workload: Workload, plan: PreemptionPlan) -> int:
    """More polls than any clean engine needs, so that a trial that never ends does end.

    Each step of a clean engine computes at least one token that lasts, unless a preemption threw
    tokens away: at worst all tokens of a request for each token that another one gains.
    """
    lengths = [
        request.num_prompt_tokens + request.sampling.max_tokens for request in workload.requests
    ]
    steps = [request.arrival_step for request in workload.requests]
    steps += [operation.step for operation in workload.operations]
    steps += _steps_named(plan)
    rounds = len(lengths) + 1 + _max_preemptions(plan, len(lengths))
    return 100 + max(steps, default=0) + sum(lengths) * rounds


def _steps_named(plan: PreemptionPlan) -> Iterator[int]:
    for action in plan.actions:
        if isinstance(action, Squeeze):
            yield action.stop
        anchor = anchor_of(action)
        if isinstance(anchor, Step):
            yield anchor.number


def _max_preemptions(plan: PreemptionPlan, num_requests: int) -> int:
    """Most preemptions that the plan itself can cause."""
    total = 0
    for action in plan.actions:
        if isinstance(action, PreemptAll):
            total += num_requests
        elif isinstance(action, RandomPreempt | Every):
            total += action.max_count
        else:
            total += 1
    return total


def _check_capabilities(trial: Trial, plan: PreemptionPlan, adapter: EngineAdapter) -> None:
    needed = set(plan.capabilities)
    kinds = {operation.kind for operation in trial.workload.operations}
    if "abort" in kinds:
        needed.add(protocol.ABORT)
    if "reset_prefix_cache" in kinds:
        needed.add(protocol.RESET_PREFIX_CACHE)
    if "reset_running_requests" in kinds:
        needed.add(protocol.RESET_RUNNING_REQUESTS)
    if "set_priority" in kinds:
        needed.add(protocol.SET_PRIORITY)
    needed |= _engine_features(trial)
    lacking = sorted(needed - adapter.capabilities)
    if lacking:
        raise UnsupportedTrialError(
            f"Engine {adapter.name!r} cannot do what this trial needs: {', '.join(lacking)}.",
            "Mark the test with preempt_requires(...) so that it is skipped there.",
        )
    refusal = protocol.refusal_of(adapter, trial.settings)
    if refusal is not None:
        raise UnsupportedTrialError(
            f"Engine {adapter.name!r} refuses {refusal}.", "Leave it out, or give another value."
        )


def _engine_features(trial: Trial) -> set[str]:
    """What settings and sampling parameters ask of an engine beyond the common."""
    settings = trial.settings
    specs = [request.sampling for request in trial.workload.requests]
    asked = {
        protocol.PRIORITY: settings.scheduling_policy != "fcfs",
        protocol.QUEUE_LIMIT: settings.max_waiting_requests is not None,
        protocol.SAMPLING: any(spec.temperature > 0 for spec in specs),
        protocol.LOGPROBS: any(spec.logprobs is not None for spec in specs),
        protocol.STOP_STRINGS: any(spec.stop for spec in specs),
        protocol.STOP_TOKENS: any(spec.stop_token_ids for spec in specs),
        protocol.MIN_TOKENS: any(spec.min_tokens for spec in specs),
        protocol.EOS: any(not spec.ignore_eos for spec in specs),
        protocol.PARALLEL_SAMPLING: any(spec.n > 1 for spec in specs),
        protocol.BEAM_SEARCH: any(spec.beam is not None for spec in specs),
        protocol.PROMPT_LOGPROBS: any(spec.prompt_logprobs is not None for spec in specs),
        protocol.PENALTIES: any(
            (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty) != (1, 0, 0)
            for spec in specs
        ),
        protocol.LOGIT_BIAS: any(spec.logit_bias for spec in specs),
        protocol.BAD_WORDS: any(spec.bad_words for spec in specs),
        protocol.LOGITS_PROCESSORS: any(spec.logits_processors for spec in specs),
        protocol.STRUCTURED_OUTPUTS: any(
            spec.json_schema is not None or spec.regex is not None for spec in specs
        ),
        protocol.ASYNC_SCHEDULING: settings.async_scheduling > 0,
        protocol.SPECULATION: settings.speculative_config is not None,
        protocol.PROMPT_ONLY: any(spec.max_tokens == 0 for spec in specs),
    }
    return {capability for capability, is_asked in asked.items() if is_asked}


def _engine_error(step: int, error: Exception) -> record.EngineError:
    """An exception as an event; one that came from a child process carries its own kind."""
    if isinstance(error, EngineProcessError):
        return record.EngineError(
            step=step, kind=error.kind, message=error.message, traceback=error.traceback
        )
    return record.EngineError(
        step=step,
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
