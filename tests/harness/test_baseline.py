"""Baselines: never preempted themselves, and solo ones see what goes wrong with room as well."""

from __future__ import annotations

import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.baseline import BaselineError, output_lengths
from preempt_harness.faults import fault_named, plant
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import Preempted
from preempt_harness.result import TrialResult
from preempt_harness.verdict import Verdict
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

DIGEST_WITHOUT_PARENT = "digest-without-parent"


@pytest.fixture
def harness() -> PreemptHarness:
    return PreemptHarness(EmbeddedAdapter(), {"model": "exact", "block_size": 4})


def requests(**sampling: object) -> list[RequestSpec]:
    return [
        RequestSpec(
            id=f"r{index}",
            prompt_token_ids=list(range(10 + index, 24 + index)),
            sampling=SamplingSpec(max_tokens=6, **sampling),  # type: ignore[arg-type]
            arrival_step=index,
        )
        for index in range(2)
    ]


def preempted(result: TrialResult) -> bool:
    return any(isinstance(event, Preempted) for event in result.record.events)


def test_solo_outputs_equal_those_of_the_same_configuration(harness: PreemptHarness) -> None:
    workload = Workload(requests=requests())
    settings = harness.settings()
    together = harness.baselines.get(settings, workload, harness.adapter)
    solo = harness.baselines.get(settings, workload, harness.adapter, "solo")
    assert (together.kind, solo.kind) == ("same-config", "solo")
    assert solo.problems == []
    for request in ("r0", "r1"):
        assert solo.results[request].outputs == together.results[request].outputs


def test_a_mistake_of_both_runs_is_found_against_solo_runs(harness: PreemptHarness) -> None:
    text = list(range(10, 26))
    workload = Workload(
        requests=[
            RequestSpec(
                id=name,
                prompt_token_ids=prompt,
                sampling=SamplingSpec(max_tokens=24),
                arrival_step=step,
            )
            for name, prompt, step in (("r0", text, 0), ("r1", [*text[4:], 30], 2))
        ]
    )
    with plant(fault_named(DIGEST_WITHOUT_PARENT)):
        result = harness.run(workload, "tight", baseline="solo", expect_preemption=False)
    assert result.verdict is Verdict.DIVERGED
    assert harness.run(workload, "tight", baseline="solo").verdict is Verdict.EQUAL


def test_who_samples_without_a_seed_has_no_solo_baseline(harness: PreemptHarness) -> None:
    workload = Workload(requests=requests(temperature=1.0))
    with pytest.raises(BaselineError, match="r0 samples without a seed"):
        harness.run(workload, baseline="solo")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_branches_run_alone_too(harness: PreemptHarness, temperature: float) -> None:
    workload = Workload(requests=requests(n=3, seed=5, temperature=temperature))
    settings = harness.settings()
    solo = harness.baselines.get(settings, workload, harness.adapter, "solo")
    together = harness.baselines.get(settings, workload, harness.adapter)
    assert len(solo.results["r0"].outputs) == 3
    assert solo.results["r0"].outputs == together.results["r0"].outputs
    assert solo.num_preemptions == 0


def test_branches_of_an_engine_without_a_rule_have_no_solo_baseline(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedAdapter, "branch_sampling", lambda *_: None)
    workload = Workload(requests=requests(n=2, seed=5, temperature=1.0))
    with pytest.raises(BaselineError, match="no rule by which a branch of r0"):
        harness.run(workload, baseline="solo")


def test_a_reset_that_preempts_is_a_plain_one_in_the_baseline() -> None:
    harness = PreemptHarness(EmbeddedAdapter(), {"model": "exact", "block_size": 4})
    workload = Workload(
        requests=requests(), operations=[Operation(kind="reset_running_requests", step=3)]
    )
    baseline = harness.baselines.get(harness.settings(), workload, harness.adapter)
    assert baseline.num_preemptions == 0
    result = harness.run(workload, "roomy")
    assert (result.verdict, preempted(result)) == (Verdict.EQUAL, True)


def test_the_more_urgent_find_a_place_in_the_baseline() -> None:
    harness = PreemptHarness(
        EmbeddedAdapter(),
        {"model": "exact", "block_size": 4, "scheduling_policy": "priority", "max_num_seqs": 1},
    )
    first, second = requests()
    urgent = RequestSpec(
        id="r1",
        prompt_token_ids=second.prompt_token_ids,
        sampling=second.sampling,
        arrival_step=3,
        priority=-1,
    )
    workload = Workload(requests=[first, urgent])
    result = harness.run(workload, "roomy")
    assert result.record.baseline is not None
    assert result.record.baseline.num_preemptions == 0
    assert (result.verdict, preempted(result)) == (Verdict.EQUAL, True)


def test_who_is_aborted_has_its_whole_length(harness: PreemptHarness) -> None:
    workload = Workload(
        requests=requests(), operations=[Operation(kind="abort", step=3, request="r1")]
    )
    for kind in ("same-config", "solo"):
        baseline = harness.baselines.get(harness.settings(), workload, harness.adapter, kind)
        assert output_lengths(baseline) == {"r0": 6, "r1": 6}
