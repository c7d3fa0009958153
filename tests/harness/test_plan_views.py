"""Progress folded from events is what the engine itself says of its requests."""

from __future__ import annotations

from exact_runs import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st

from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.plan import (
    PlanRunner,
    PreemptCommand,
    PreemptionPlan,
    RequestView,
    RequestViews,
)
from preempt_harness.record import (
    Aborted,
    Arrived,
    Finished,
    Preempted,
    Resumed,
    Scheduled,
    TokensDelivered,
)
from preempt_harness.strategies import workloads
from preempt_harness.workload import Workload


def assert_views_are_the_engines(views: RequestViews, session: EmbeddedSession) -> None:
    requests = session.llm.scheduler.requests
    assert {name for name, view in views.views.items() if view.status != "finished"} == set(
        requests
    )
    for name, request in requests.items():
        view = views.views[name]
        assert view.status == request.status.value
        assert view.num_tokens == request.sequence.num_tokens
        assert view.num_output_tokens == request.sequence.num_output_tokens
        assert view.num_computed_tokens == request.sequence.num_computed_tokens
        assert view.num_preemptions == request.num_preemptions
        if view.status == "running":
            assert view.num_chunks == request.sequence.num_chunks


@settings(max_examples=20)
@given(workloads(vocab_size=VOCAB_SIZE, block_size=4), st.integers(0, 2**16))
def test_views_follow_the_engine_through_random_preemption(workload: Workload, seed: int) -> None:
    session = EmbeddedAdapter().open(
        EngineSettings(num_blocks=200, block_size=4, max_num_batched_tokens=7)
    )
    runner = PlanRunner(PreemptionPlan.parse(f"random:p=0.2,max=9,seed={seed}"))
    views = RequestViews()
    for request in workload.requests:
        session.submit(request)
    step = 0
    while session.unfinished():
        for command in runner.before_step(step, views.views):
            assert isinstance(command, PreemptCommand)
            session.preempt(command.request, command.mode)
        views.apply(session.poll(60.0))
        assert_views_are_the_engines(views, session)
        step += 1
    session.close()


def test_an_engine_that_shows_deliveries_only_is_followed_by_them() -> None:
    views = RequestViews()
    views.apply([Arrived(0, "r0", [4, 5, 6], 8)])
    assert views.views["r0"] == RequestView("waiting", num_prompt_tokens=3)
    views.apply([TokensDelivered(1, "r0.0", [7, 8])])
    assert views.views["r0"] == RequestView("running", num_prompt_tokens=3, num_output_tokens=2)
    views.apply([Finished(2, "r0", "length")])
    assert views.views["r0"].status == "finished"


def test_a_token_that_comes_late_does_not_make_a_preempted_request_run() -> None:
    views = RequestViews()
    views.apply([Arrived(0, "r0", [4, 5, 6], 8), Scheduled(0, "r0.0", 0, 3)])
    views.apply([Preempted(1, "r0", "recompute", "first_decode", "forced", 3, 3)])
    views.apply([TokensDelivered(1, "r0.0", [7])])
    assert views.views["r0"].status == "waiting"
    assert views.views["r0"].num_computed_tokens == 0


def test_a_swapped_request_keeps_its_progress() -> None:
    views = RequestViews()
    views.apply([Arrived(0, "r0", [4, 5, 6], 8), Scheduled(0, "r0.0", 0, 3)])
    views.apply([TokensDelivered(0, "r0.0", [7])])
    views.apply([Preempted(1, "r0", "swap", "first_decode", "forced", 3, 4)])
    assert views.views["r0"].num_computed_tokens == 3
    views.apply([Resumed(2, "r0", 0), Scheduled(2, "r0.0", 3, 4)])
    view = views.views["r0"]
    assert (view.status, view.num_resumes, view.num_chunks) == ("running", 1, 1)


def test_other_branches_and_aborts() -> None:
    views = RequestViews()
    views.apply([Arrived(0, "r0", [4, 5, 6], 8), Scheduled(0, "r0.1", 0, 3)])
    views.apply([TokensDelivered(0, "r0.1", [7])])
    assert views.views["r0"] == RequestView("waiting", num_prompt_tokens=3)
    views.apply([Aborted(1, "r0")])
    assert views.views["r0"].status == "finished"
