"""Strategies draw what suits together, and shrink to the plainest case that still fails."""

from __future__ import annotations

import pytest
from exact_runs import VOCAB_SIZE
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.admission import AdmissionModel
from preempt_harness.generators import GeneratorError
from preempt_harness.plan import OutputTokens, Preempt, PreemptionPlan, anchor_of
from preempt_harness.record import EngineError, PlanApplied, PlanMissed
from preempt_harness.strategies import budgets, features, plans, trials, workloads
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import Workload

MODEL = AdmissionModel(block_size=4)
WORKLOADS = workloads(vocab_size=VOCAB_SIZE, block_size=4)
SHRINK = settings(max_examples=400, phases=(Phase.generate, Phase.shrink), database=None)


@settings(max_examples=20)
@given(trials(EmbeddedAdapter(), vocab_size=VOCAB_SIZE))
def test_a_drawn_trial_runs_to_its_end_and_accounts_for_every_action(trial: Trial) -> None:
    record = run_trial(trial, EmbeddedAdapter())
    assert not [event for event in record.events if isinstance(event, EngineError)]
    reports = [event for event in record.events if isinstance(event, PlanApplied | PlanMissed)]
    plan = PreemptionPlan.parse(trial.plan).resolve(trial.settings.block_size)
    assert sorted(report.action for report in reports) == sorted(
        PreemptionPlan([action]).encode() for action in plan.actions
    )


@settings(max_examples=20)
@given(st.data())
def test_a_drawn_plan_suits_its_workload_and_the_engine(data: st.DataObject) -> None:
    workload = data.draw(WORKLOADS)
    plan = data.draw(plans(workload, block_size=4))
    plan.validate(workload, block_size=4)
    few = frozenset({"preempt", "recompute"})
    limited = data.draw(plans(workload, block_size=4, capabilities=few))
    assert limited.capabilities <= few
    assert all(isinstance(anchor_of(action), OutputTokens) for action in limited.actions)
    assert not data.draw(plans(workload, block_size=4, capabilities=frozenset()))


@settings(max_examples=20)
@given(st.data())
def test_a_drawn_budget_is_feasible_and_preempts_when_asked(data: st.DataObject) -> None:
    workload = data.draw(WORKLOADS)
    assert data.draw(budgets(workload, MODEL)).verdict != "infeasible"
    assert data.draw(budgets(workload, MODEL, preempting=True)).verdict == "preempts"


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(GeneratorError, match="'stop' is unknown"):
        find(workloads(vocab_size=VOCAB_SIZE, block_size=4, use_features=["stop"]), bool)


def test_a_workload_shrinks_to_one_short_request_without_features() -> None:
    workload = find(WORKLOADS, lambda _: True, settings=SHRINK)
    [request] = workload.requests
    assert request.num_prompt_tokens == 1
    assert request.sampling.max_tokens == 1
    assert not workload.operations
    assert find(features(), lambda _: True, settings=SHRINK) == frozenset()


def test_a_workload_shrinks_no_further_than_the_failure_allows() -> None:
    def fails(workload: Workload) -> bool:
        return sum(request.num_prompt_tokens >= 8 for request in workload.requests) >= 2

    workload = find(WORKLOADS, fails, settings=SHRINK)
    assert [request.num_prompt_tokens for request in workload.requests] == [8, 8]


def test_a_plan_shrinks_to_nothing_and_else_to_one_early_preemption() -> None:
    workload = find(
        WORKLOADS, lambda item: item.requests[0].sampling.max_tokens >= 4, settings=SHRINK
    )
    drawn = plans(workload, block_size=4)
    assert not find(drawn, lambda _: True, settings=SHRINK)
    assert find(drawn, bool, settings=SHRINK) == PreemptionPlan([Preempt("r0", OutputTokens(1))])


def test_a_budget_shrinks_to_one_with_room() -> None:
    workload = find(WORKLOADS, lambda item: len(item.requests) == 3, settings=SHRINK)
    drawn = budgets(workload, MODEL)
    assert find(drawn, lambda _: True, settings=SHRINK).verdict == "never_preempts"


def test_a_workload_without_a_preempting_budget_is_rejected() -> None:
    alone = workloads(vocab_size=VOCAB_SIZE, block_size=4, max_requests=1)
    workload = find(alone, lambda _: True, settings=SHRINK)
    with pytest.raises(Unsatisfiable):
        find(budgets(workload, MODEL, preempting=True), lambda _: True, settings=SHRINK)
