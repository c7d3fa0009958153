"""What a test holds in its hands: the `preempt` fixture's object.

Owns the way from a test's wishes to a judged trial. Knows pytest only through what it is given, so
it can be used from scripts as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.baseline import BaselineKind, BaselineStore, output_lengths, roomy_settings
from preempt_harness.budget import KVBudget
from preempt_harness.errors import HarnessError, UnsupportedTrialError
from preempt_harness.evidence import gather_scores
from preempt_harness.explore.from_tests import Exploration
from preempt_harness.explore.search import SearchOutcome, TrialRunner
from preempt_harness.plan import Action, PreemptionPlan
from preempt_harness.prompts import PromptSource
from preempt_harness.record import TrialRecord
from preempt_harness.result import TrialResult
from preempt_harness.tolerances import ToleranceTable, shipped
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

_SETTING_NAMES = frozenset(EngineSettings.__struct_fields__)


class ArgumentError(HarnessError, TypeError):
    """A test asks the harness for something it does not know."""


class PreemptHarness:
    """Builds workloads and plans, runs trials on one engine, and judges them.

    Args:
        adapter: the engine.
        defaults: settings for every trial unless `run` is told otherwise; `num_blocks` is ignored.
        seed: of prompts.
        open_session: opens sessions in place of `adapter.open`.
        baselines: where unpreempted runs are kept between tests; None makes a new store.
        replayed: run this trial, whatever a test asks for.
        poll_timeout_s: longest wait for an engine that cannot be stepped.
        test: node id, for reports.
        tolerances: for near ties; None takes those that ship.
        exploration: what `explore` does unless it is told otherwise.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        defaults: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        open_session: Callable[[EngineSettings], Session] | None = None,
        baselines: BaselineStore | None = None,
        replayed: Trial | None = None,
        poll_timeout_s: float = 60.0,
        test: str = "",
        tolerances: ToleranceTable | None = None,
        exploration: Exploration | None = None,
    ) -> None:
        self.adapter = adapter
        self.defaults = {"model": adapter.models[0], "seed": seed, **(defaults or {})}
        self.results: list[TrialResult] = []
        self.test = test
        self._open_session = open_session
        self.baselines = baselines or BaselineStore(self.run_unjudged)
        self._replayed = replayed
        self._poll_timeout_s = poll_timeout_s
        self._tolerances = tolerances or shipped()
        self._exploration = exploration or Exploration()
        settings = self.settings()
        self.vocab_size = adapter.vocab_size(settings)
        has_text = adapter.encode(settings, "text") is not None
        self.prompts = PromptSource(
            self.vocab_size,
            seed,
            (lambda text: adapter.encode(settings, text)) if has_text else None,
        )

    # Wishes -------------------------------------------------------------------------------------

    def settings(self, **changes: Any) -> EngineSettings:
        """The engine's settings with some changed; options add to those of the test.

        Raises:
            ArgumentError: a name is no setting.
        """
        unknown = sorted(set(changes) - _SETTING_NAMES)
        if unknown:
            raise ArgumentError(
                f"{', '.join(unknown)}: no such setting.",
                f"Settings are {', '.join(sorted(_SETTING_NAMES))}; an option of one engine "
                f"goes into options={{...}}.",
            )
        options = {**self.defaults.get("options", {}), **changes.get("options", {})}
        return EngineSettings(**{"num_blocks": 1, **self.defaults, **changes, "options": options})

    def workload(
        self,
        *,
        requests: int = 4,
        prompt_tokens: int | tuple[int, int] = (20, 60),
        max_tokens: int = 64,
        **sampling: Any,
    ) -> Workload:
        """Requests r0, r1, ... that arrive together.

        Args:
            requests: how many.
            prompt_tokens: length of every prompt, or the shortest and the longest; lengths are
                spread evenly between them.
            max_tokens: output tokens of each.
            **sampling: further fields of `SamplingSpec`.
        """
        if requests < 1:
            raise ArgumentError(f"requests={requests} is no workload.", "Give 1 or more.")
        low, high = (
            (prompt_tokens, prompt_tokens) if isinstance(prompt_tokens, int) else prompt_tokens
        )
        if not 1 <= low <= high:
            raise ArgumentError(
                f"prompt_tokens={prompt_tokens} is no range of lengths.",
                "Give a number, or (shortest, longest), of 1 or more.",
            )
        spec = SamplingSpec(max_tokens=max_tokens, **sampling)
        lengths = [low + (high - low) * index // max(requests - 1, 1) for index in range(requests)]
        prompts = [self.prompts.take(length) for length in lengths]
        return Workload(
            requests=[
                RequestSpec(
                    id=f"r{index}",
                    prompt_token_ids=prompt,
                    sampling=spec,
                    text=self.prompts.text_of(prompt),
                )
                for index, prompt in enumerate(prompts)
            ]
        )

    def plan(self, *actions: Action | str) -> PreemptionPlan:
        """A plan of actions, each an object or its string form."""
        listed: list[Action] = []
        for action in actions:
            if isinstance(action, str):
                listed += PreemptionPlan.parse(action).actions
            else:
                listed.append(action)
        return PreemptionPlan(listed)

    # Trials -------------------------------------------------------------------------------------

    def run(
        self,
        workload: Workload,
        budget: str | int | KVBudget | None = None,
        plan: PreemptionPlan | str | None = None,
        *,
        expect_preemption: bool = True,
        baseline: BaselineKind = "same-config",
        **settings: Any,
    ) -> TrialResult:
        """Run the workload under pressure, and judge it against a run with room.

        Args:
            workload: what to run.
            budget: "tight", "roomy", "minimal", a number of blocks, or a solved `KVBudget`. By
                default "tight" without a plan and "roomy" with one, so that either the pool or the
                plan preempts.
            plan: forced preemptions, as an object or its string form.
            expect_preemption: a trial without a preemption is VACUOUS.
            baseline: "same-config" is the same workload with room; "solo" is each request alone
                and without prefix caching, which finds what goes wrong with room as well.
            **settings: fields of `EngineSettings` to change for this trial.

        Returns:
            The judged trial; a test must assert something of it.

        Raises:
            NoPreemptingBudgetError: "tight" is wanted and no number of blocks preempts.
            UnsupportedTrialError: the engine cannot do what the trial needs.
            BaselineError: a request cannot give the same output alone.
        """
        if expect_preemption:
            self._require_preempting_engine()
        plan = self.plan(plan) if isinstance(plan, str) else plan or PreemptionPlan()
        if budget is None:
            budget = "roomy" if plan else "tight"
        if self._replayed is not None:
            trial = self._replayed
            expected = self.baselines.get(trial.settings, trial.workload, self.adapter, baseline)
        else:
            wanted = self.settings(**settings)
            expected = self.baselines.get(wanted, workload, self.adapter, baseline)
            lengths = output_lengths(expected)
            trial = self._trial(workload, budget, plan, wanted, lengths)
        started = time.perf_counter()
        record = self.run_unjudged(trial)
        record.baseline = expected
        gather_scores(record, trial, self.adapter, self._open_session)
        result = TrialResult.judge(
            trial=trial,
            record=record,
            admission=self.adapter.admission_model(trial.settings),
            tolerance=self._tolerances.of(record.header),
            expect_preemption=expect_preemption,
            test=self.test,
            started=started,
        )
        self.results.append(result)
        return result

    def _require_preempting_engine(self) -> None:
        if not {protocol.RECOMPUTE, protocol.SWAP} & self.adapter.capabilities:
            raise UnsupportedTrialError(
                f"Engine {self.adapter.name!r} never preempts.",
                "Say expect_preemption=False if the trial says something without one.",
            )

    def explore(
        self,
        strategy: str | None = None,
        *,
        examples: int | None = None,
        time_s: float | None = None,
    ) -> SearchOutcome:
        """Search for a failing trial, and fail with the smallest one that was found.

        Arguments that are left out come from the `preempt_explore` marker, then from the command
        line, then from the ini file.

        Args:
            strategy: name of a search strategy, "random" by default.
            examples: trials to run, 100 by default.
            time_s: most processor seconds.

        Returns:
            What was run, when nothing failed.

        Raises:
            PreemptionAssertionError: a trial failed; the text says where it was written.
            UnknownStrategyError: there is no such strategy.
        """
        wanted = self._exploration.with_values(
            {"strategy": strategy, "examples": examples, "time_s": time_s}
        )
        runner = TrialRunner(self.adapter, open_session=self._open_session)
        return wanted.run(runner, self.settings(), self.test)

    def run_unjudged(self, trial: Trial) -> TrialRecord:
        """Run a trial and return its record, without a baseline and without checks."""
        return run_trial(
            trial,
            self.adapter,
            open_session=self._open_session,
            poll_timeout_s=self._poll_timeout_s,
        )

    def _trial(
        self,
        workload: Workload,
        budget: str | int | KVBudget,
        plan: PreemptionPlan,
        settings: EngineSettings,
        lengths: Mapping[str, int],
    ) -> Trial:
        solved = budget
        if solved == "roomy":
            return Trial(
                engine=self.adapter.name,
                settings=roomy_settings(settings, workload, self.adapter),
                workload=workload,
                plan=plan.encode(),
                budget={"proof": {"kind": "roomy"}},
            )
        if not isinstance(solved, KVBudget):
            admission = self.adapter.admission_model(settings)
            solved = KVBudget.solve(workload, admission, solved, output_lengths=lengths)
        return Trial(
            engine=self.adapter.name,
            settings=msgspec.structs.replace(settings, num_blocks=solved.num_blocks),
            workload=workload,
            plan=plan.encode(),
            budget={**solved.to_builtins(), "given": isinstance(budget, int)},
        )
