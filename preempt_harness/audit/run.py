"""Runs the audit: every fault by every method, and every method without a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.audit.by_search import look_by_search
from preempt_harness.audit.by_tests import EXACT, SUITE, look_by_tests
from preempt_harness.audit.kill import Audit, AuditRow, Kill, Outcome
from preempt_harness.audit.yardsticks import YARDSTICKS, run_yardstick
from preempt_harness.explore.strategy import SearchTask, find_strategy
from preempt_harness.faults import Fault, FaultTargetError
from preempt_harness.faults.catalogue import kind_of
from preempt_harness.faults.planting import planted_everywhere

METHODS = ("suite", "search", *YARDSTICKS)
JUDGED = ("suite", "search")

Report = Callable[[str, str, Kill], None]


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """What to run.

    Attributes:
        faults: to plant, one after another.
        methods: of `METHODS`.
        seed: of the search and the yardsticks.
        strategy: of the search.
        search_trials, search_cpu_s: limits of the search for one fault.
        max_shrinks: most trials that shrinking may run for one fault.
        tests: what "suite" runs: arguments for pytest.
        tests_timeout_s: longest run of those.
    """

    faults: tuple[Fault, ...]
    methods: tuple[str, ...] = METHODS
    seed: int = 0
    strategy: str = "random"
    search_trials: int = 600
    search_cpu_s: float = 60.0
    max_shrinks: int = 300
    tests: tuple[str, ...] = SUITE
    tests_timeout_s: float = 900.0


def run_audit(plan: AuditPlan, report: Report | None = None) -> Audit:
    """Plant every fault and let every method look for it.

    Args:
        plan: what to run.
        report: called with fault (or "" for the control), method and what came of it, each time
            that is known.
    """
    tell = report or (lambda fault, method, kill: None)
    controls = {}
    for method in plan.methods:
        controls[method] = _control(plan, method)
        tell("", method, controls[method])
    rows = []
    for fault in plan.faults:
        kills = {}
        for method in plan.methods:
            kills[method] = _look(plan, fault, method)
            tell(fault.name, method, kills[method])
        rows.append(
            AuditRow(
                fault=fault.name,
                kind=kind_of(fault),
                mechanism=fault.mechanism,
                source=fault.source,
                expected=fault.expected,
                kills=kills,
            )
        )
    return Audit(
        seed=plan.seed,
        methods=plan.methods,
        judged=tuple(method for method in plan.methods if method in JUDGED),
        rows=rows,
        controls=controls,
    )


def _control(plan: AuditPlan, method: str) -> Kill:
    """The method without a fault, on every model that is used."""
    num_trials, cpu_s = 0, 0.0
    for model in sorted({EXACT, *(fault.model for fault in plan.faults)}):
        if method == "suite":
            kill = look_by_tests(plan.tests, "", plan.tests_timeout_s, model=model)
        else:
            kill = _look_here(plan, method, model)
        num_trials, cpu_s = num_trials + kill.num_trials, cpu_s + kill.cpu_s
        if kill.outcome is not Outcome.SURVIVED:
            return msgspec.structs.replace(kill, outcome=Outcome.FALSE_ALARM)
    return Kill(outcome=Outcome.CLEAN, num_trials=num_trials, cpu_s=cpu_s)


def _look(plan: AuditPlan, fault: Fault, method: str) -> Kill:
    try:
        with planted_everywhere(fault) as num_reached:
            if method != "suite":
                kill = _look_here(plan, method, model=fault.model)
                kill = msgspec.structs.replace(kill, reached=num_reached())
        if method == "suite":  # in a process of its own, which plants it there
            kill = look_by_tests(plan.tests, fault.name, plan.tests_timeout_s, model=fault.model)
    except FaultTargetError as error:
        return Kill(outcome=Outcome.NOT_APPLIED, message=str(error))
    if not kill.reached:
        kill = msgspec.structs.replace(kill, outcome=Outcome.NOT_EXERCISED)
    return kill


def _look_here(plan: AuditPlan, method: str, model: str) -> Kill:
    adapter = EmbeddedAdapter()
    try:
        return _look_with(adapter, plan, method, model)
    finally:
        adapter.close_kept()


def _look_with(adapter: EmbeddedAdapter, plan: AuditPlan, method: str, model: str) -> Kill:
    if method in YARDSTICKS:
        return run_yardstick(method, adapter, model, plan.seed)
    task = SearchTask(
        model=model,
        seed=plan.seed,
        max_trials=plan.search_trials,
        max_cpu_s=plan.search_cpu_s,
    )
    return look_by_search(find_strategy(plan.strategy), adapter, task, max_shrinks=plan.max_shrinks)
