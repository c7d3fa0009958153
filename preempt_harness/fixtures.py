"""The plugin's fixtures. Each makes what a test asks for, and gives everything back, last first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

# Everything else is imported by the fixtures that need it: `pytest --help` loads this module.
if TYPE_CHECKING:
    from preempt_engine import LLM
    from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
    from preempt_harness.harness import PreemptHarness
    from preempt_harness.plan import Action, PreemptionPlan


@pytest.fixture
def preempt_adapter(request: pytest.FixtureRequest) -> EngineAdapter:
    """The engine adapter chosen by marker, command line or ini."""
    from preempt_harness import marks
    from preempt_harness.session_state import session_state

    state = session_state(request.config)
    return state.adapter(marks.preempt_values(request.node).get("engine"))


@pytest.fixture
def preempt_settings(
    request: pytest.FixtureRequest, preempt_adapter: EngineAdapter
) -> EngineSettings:
    """The settings that trials of this test start from."""
    return _harness(request, preempt_adapter).settings()


@pytest.fixture
def preempt_plan() -> Callable[..., PreemptionPlan]:
    """Makes a plan of actions or their string forms: `preempt_plan("preempt:r0@out=3")`."""

    from preempt_harness.plan import PreemptionPlan

    def make(*actions: Action | str) -> PreemptionPlan:
        parsed: list[Action] = []
        for action in actions:
            parsed += PreemptionPlan.parse(action).actions if isinstance(action, str) else [action]
        return PreemptionPlan(parsed)

    return make


@pytest.fixture
def preempt(
    request: pytest.FixtureRequest, preempt_adapter: EngineAdapter
) -> Iterator[PreemptHarness]:
    """Runs workloads under preemption and judges them; see `PreemptHarness`.

    A result of which nothing was asserted fails the test when it ends.
    """
    from preempt_harness import leaks
    from preempt_harness.session_state import session_state

    harness = _harness(request, preempt_adapter)
    before = leaks.snapshot()
    yield harness
    for result in harness.results:
        session_state(request.config).finish_trial(request.node, result)
    unasserted = [result for result in harness.results if not result.asserted]
    if unasserted and not _failed_already(request):
        pytest.fail(
            f"{len(unasserted)} of {len(harness.results)} trials were run, and nothing was "
            f"asserted of them: a test that cannot fail. Call assert_clean(), "
            f"assert_preempted() or assert_matches_baseline() on what preempt.run() returns.",
            pytrace=False,
        )
    leaks.check(before, session_state(request.config).host_pids())


@pytest.fixture
def tiny_llm(request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """A factory of embedded engines with tiny block budgets.

        llm = tiny_llm(num_kv_blocks=8)                    # the exact model
        llm = tiny_llm("tiny-llama", num_kv_blocks=8)      # a seeded tiny checkpoint

    Engines are closed when the test ends, the last one first; processes that an engine leaves
    behind fail the test.
    """
    from preempt_harness import leaks, marks
    from preempt_harness.session_state import session_state

    built: list[LLM] = []
    before = leaks.snapshot()

    def make(model: str | None = None, **options: Any) -> LLM:
        from preempt_engine import LLM
        from preempt_harness.checkpoints import resolve_model_name

        selection = session_state(request.config).selection
        name = model or marks.preempt_values(request.node).get("model") or selection.model
        options = {"block_size": 4, "num_kv_blocks": 16, "seed": selection.seed, **options}
        llm = LLM(resolve_model_name(name or "exact"), **options)
        built.append(llm)
        return llm

    yield make
    while built:
        built.pop().close()
    leaks.check(before)


def _harness(request: pytest.FixtureRequest, adapter: EngineAdapter) -> PreemptHarness:
    from preempt_harness import marks
    from preempt_harness.session_state import session_state

    state = session_state(request.config)
    return state.harness(
        adapter,
        marks.preempt_values(request.node),
        request.node.nodeid,
        marks.explore_values(request.node),
    )


def _failed_already(request: pytest.FixtureRequest) -> bool:
    from preempt_harness import marks

    report = request.node.stash.get(marks.CALL_REPORT, None)
    return report is not None and not report.passed
