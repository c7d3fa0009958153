"""Strategy "stateful": Hypothesis writes a history of calls, rule by rule, and shrinks it.

Rules add requests, step, preempt, squeeze and release the pool, abort, change priorities, and reset
the prefix cache, in any order. A history is written down as a trial, which is run and judged when
the history ends: its checks look at every step, and a failure can be replayed like any other.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.reporting import with_reporter
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.explore.search import Failure, SearchOutcome, TrialRunner
from preempt_harness.explore.strategy import SearchTask
from preempt_harness.generators import PromptShape, shape_prompt
from preempt_harness.plan import MODES, Action, Mode, Preempt, PreemptionPlan, Squeeze, Step
from preempt_harness.strategies import engine_settings
from preempt_harness.trial import Trial
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

DEFAULT_EXAMPLES = 100
_MAX_REQUESTS = 5
_MAX_BLOCKS = 3
_MAX_TOKENS = 12
_MAX_SLACK = 4
_MAX_PRIORITY = 2
_STEPS_PER_HISTORY = 25  # rules of one history
_NEEDED = frozenset({protocol.STEPPED, protocol.PREEMPT, protocol.RECOMPUTE})


@dataclass
class _Draft:
    """A trial that grows with the rules."""

    settings: EngineSettings
    slack: int
    step: int = 0
    requests: list[RequestSpec] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    squeezed_since: int | None = None

    @property
    def has_priorities(self) -> bool:
        """Whether the engine goes by them."""
        return self.settings.scheduling_policy == "priority"

    def release(self) -> None:
        """End the squeeze, if there is one."""
        if self.squeezed_since is not None and self.squeezed_since < self.step:
            self.actions.append(Squeeze("all", self.squeezed_since, self.step))
        self.squeezed_since = None

    def trial(self, adapter: EngineAdapter) -> Trial:
        """What was drawn so far, in a pool near the smallest that will do."""
        workload = Workload(requests=self.requests, operations=self.operations)
        admission = adapter.admission_model(self.settings)
        least = KVBudget.solve(workload, admission, "minimal").num_blocks
        return Trial(
            engine=adapter.name,
            settings=msgspec.structs.replace(self.settings, num_blocks=least + self.slack),
            workload=workload,
            plan=PreemptionPlan(self.actions).encode(),
        )


class Stateful:
    """See the module's docstring."""

    name = "stateful"

    def explore(self, runner: TrialRunner, task: SearchTask) -> SearchOutcome:
        """Run histories; a failure is shrunk already."""
        notes = _Notes(runner, task)
        machine = _machine(notes)
        given = settings(
            max_examples=task.max_trials or DEFAULT_EXAMPLES,
            stateful_step_count=_STEPS_PER_HISTORY,
            deadline=None,
            database=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        # Flaky: the time limit came while Hypothesis was shrinking; what it had counts.
        with (
            with_reporter(lambda text: None),
            contextlib.suppress(_FailingHistoryError, Flaky),
        ):
            run_state_machine_as_test(seed(task.seed)(machine), settings=given)
        return notes.outcome()


class _FailingHistoryError(AssertionError):
    """Tells Hypothesis that a history fails; all of them are one kind, so that it shrinks."""


class _Notes:
    """What is kept across the histories of one search."""

    def __init__(self, runner: TrialRunner, task: SearchTask) -> None:
        self.runner = runner
        self.task = task
        self._started = time.process_time()
        self._num_trials = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._code = ""
        self._failure: Failure | None = None

    def judge(self, draft: _Draft) -> None:
        """Run the history's trial.

        Raises:
            _FailingHistoryError: it has findings, among them the first one's of the search.
        """
        limit = self.task.max_cpu_s
        if limit is not None and time.process_time() - self._started > limit:
            return
        result = self.runner.judge(draft.trial(self.runner.adapter))
        self._num_trials += self._failure is None
        self._num_preemptions += len(result.preemptions)
        self._num_steps += max((event.step for event in result.record.events), default=-1) + 1
        failure = self.runner.failure_of(result)
        if failure is None:
            return
        self._code = self._code or failure.codes[0]
        if self._code in failure.codes:
            self._failure = failure  # Hypothesis runs the smallest one last
            raise _FailingHistoryError

    def outcome(self) -> SearchOutcome:
        """Of the whole search."""
        return SearchOutcome(
            num_trials=self._num_trials,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            cpu_s=time.process_time() - self._started,
            failure=self._failure,
        )


def _machine(notes: _Notes) -> type[RuleBasedStateMachine]:
    adapter = notes.runner.adapter
    able = adapter.capabilities
    modes: list[Mode] = [mode for mode in MODES if mode in able] or ["recompute"]
    resets = [
        kind
        for kind in (protocol.RESET_PREFIX_CACHE, protocol.RESET_RUNNING_REQUESTS)
        if kind in able
    ]

    class History(RuleBasedStateMachine):
        draft: _Draft

        @initialize(
            drawn=engine_settings(
                model=notes.task.model, block_sizes=adapter.block_sizes, use_watermark=False
            ),
            slack=st.integers(0, _MAX_SLACK),
            urgency=st.booleans(),
        )
        def begin(self, drawn: EngineSettings, slack: int, urgency: bool) -> None:
            if protocol.PREFIX_CACHING not in able:
                drawn = msgspec.structs.replace(drawn, enable_prefix_caching=False)
            if urgency and protocol.PRIORITY in able:
                drawn = msgspec.structs.replace(drawn, scheduling_policy="priority")
            self.draft = _Draft(drawn, slack)

        @precondition(lambda self: len(self.draft.requests) < _MAX_REQUESTS)
        @rule(
            blocks=st.integers(0, _MAX_BLOCKS),
            offset=st.sampled_from((0, 1, -1, 2)),
            outputs=st.integers(1, _MAX_TOKENS),
            shares=st.booleans(),
            priority=st.integers(0, _MAX_PRIORITY),
        )
        def add(self, blocks: int, offset: int, outputs: int, shares: bool, priority: int) -> None:
            draft = self.draft
            size, index = draft.settings.block_size, len(draft.requests)
            length = max(1, blocks * size + offset)
            shape = PromptShape(num_tokens=length, num_shared_tokens=length if shares else 0)
            draft.requests.append(
                RequestSpec(
                    id=f"r{index}",
                    prompt_token_ids=shape_prompt(
                        shape,
                        vocab_size=adapter.vocab_size(draft.settings),
                        block_size=size,
                        seed=notes.task.seed,
                        index=index,
                    ),
                    sampling=SamplingSpec(max_tokens=outputs),
                    arrival_step=draft.step,
                    priority=priority if draft.has_priorities else 0,
                )
            )

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            self.draft.step += count

        @precondition(lambda self: self.draft.requests and able >= _NEEDED)
        @rule(choice=st.integers(0, _MAX_REQUESTS - 1), mode=st.sampled_from(modes))
        def preempt(self, choice: int, mode: Mode) -> None:
            request = self.draft.requests[choice % len(self.draft.requests)]
            self.draft.actions.append(Preempt(request.id, Step(self.draft.step), mode))

        @precondition(
            lambda self: protocol.HOLD_BLOCKS in able and self.draft.squeezed_since is None
        )
        @rule()
        def squeeze(self) -> None:
            self.draft.squeezed_since = self.draft.step

        @precondition(lambda self: self.draft.squeezed_since is not None)
        @rule()
        def release(self) -> None:
            self.draft.release()

        @precondition(lambda self: self.draft.requests and protocol.ABORT in able)
        @rule(choice=st.integers(0, _MAX_REQUESTS - 1))
        def abort(self, choice: int) -> None:
            request = self.draft.requests[choice % len(self.draft.requests)]
            self.draft.operations.append(
                Operation(kind="abort", step=self.draft.step, request=request.id)
            )

        @precondition(lambda self: self.draft.requests and self.draft.has_priorities)
        @rule(choice=st.integers(0, _MAX_REQUESTS - 1), priority=st.integers(0, _MAX_PRIORITY))
        def change_priority(self, choice: int, priority: int) -> None:
            request = self.draft.requests[choice % len(self.draft.requests)]
            self.draft.operations.append(
                Operation(
                    kind="set_priority",
                    step=self.draft.step,
                    request=request.id,
                    priority=priority,
                )
            )

        @precondition(lambda self: bool(resets))
        @rule(kind=st.sampled_from(resets or [""]))
        def reset(self, kind: str) -> None:
            self.draft.operations.append(Operation(kind=kind, step=self.draft.step))

        def teardown(self) -> None:
            if not hasattr(self, "draft") or not self.draft.requests:
                return
            self.draft.release()
            notes.judge(self.draft)

    return History
