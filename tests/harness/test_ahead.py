"""Records of an engine that decides steps ahead: clean, and each planted fault is found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.baseline import BaselineStore
from preempt_harness.checks import run_checks
from preempt_harness.faults import Fault, plant
from preempt_harness.faults.ahead import FAULTS
from preempt_harness.faults.catalogue import fault_named
from preempt_harness.record import Preempted, TrialRecord
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import BeamSpec, Operation, RequestSpec, SamplingSpec, Workload

ADAPTER = EmbeddedAdapter()
BLOCK = 4


def workload(count: int = 4, max_tokens: int = 30, **sampling: Any) -> Workload:
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[(5 * index + 3 * place) % 50 + 4 for place in range(9 + index)],
                sampling=SamplingSpec(max_tokens=max_tokens - 3 * index, **sampling),
            )
            for index in range(count)
        ]
    )


def run(
    depth: int,
    work: Workload | None = None,
    *,
    blocks: int = 18,
    budget: int = 16,
    plan: str = "",
    drafts: dict[str, Any] | None = None,
    cache: bool = True,
    **options: Any,
) -> TrialRecord:
    work = work or workload()
    settings = EngineSettings(
        num_blocks=blocks,
        block_size=BLOCK,
        async_scheduling=depth,
        max_num_batched_tokens=budget,
        speculative_config=drafts,
        enable_prefix_caching=cache,
        options={"block_reuse_order": "lifo", "poison": True, **options},
    )
    record = run_trial(
        Trial(engine="embedded", settings=settings, workload=work, plan=plan), ADAPTER
    )
    store = BaselineStore(lambda trial: run_trial(trial, ADAPTER))
    record.baseline = store.get(settings, work, ADAPTER)
    return record


def trials() -> list[TrialRecord]:
    """A few trials in which every fault has to show."""
    stops = workload(6, stop_token_ids=tuple(range(4, 12)))
    drafts = {"method": "scripted", "num_speculative_tokens": 3, "acceptance_rate": 0.9}
    swaps = "/".join(f"preempt:r{step % 4}@step={step}:swap" for step in range(3, 24, 2))
    return [
        run(1),
        run(2, preemption_mode="swap"),
        run(1, budget=4, preemption_mode="swap"),
        run(2, stops, blocks=14),
        run(1, workload(1), blocks=18, plan="squeeze:all@1..14"),
        run(1, workload(1), blocks=40, plan="abort:r0@out=7"),
        run(2, plan="preempt-all@step=3/preempt-all@step=5/preempt:r0@step=8"),
        run(
            2,
            workload(2, beam=BeamSpec(num_beams=3)),
            blocks=40,
            plan="/".join(f"preempt:r0@step={step}:swap" for step in range(1, 12, 2)),
            preemption_mode="swap",
        ),
        *(
            run(
                depth,
                workload(6, 80),
                blocks=180,
                budget=64,
                plan=swaps,
                drafts=drafts,
                cache=False,
            )
            for depth in (1, 2)
        ),
    ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_clean_engine_has_no_finding(depth: int, mode: str) -> None:
    record = run(depth, preemption_mode=mode)
    assert run_checks(record).findings == ()
    assert any(isinstance(event, Preempted) for event in record.events)


def test_without_a_fault_these_trials_are_clean() -> None:
    for record in trials():
        assert run_checks(record).findings == ()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found(fault: Fault) -> None:
    with plant(fault) as planted:
        reports = [run_checks(record) for record in trials()]
    assert planted.num_reached
    codes = {finding.code.value for report in reports for finding in report.findings}
    assert any(code.startswith(fault.expected) for code in codes), codes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_drafts", [1, 4, 10])
def test_no_step_waits_for_drafts_near_the_longest_length(num_drafts: int, depth: int) -> None:
    """The bound allows for engines that do; this one cuts the drafts instead."""
    wrong = {
        "method": "scripted",
        "num_speculative_tokens": num_drafts,
        "acceptance_rate": 0.0,
    }
    record = run(depth, workload(1, 12), blocks=64, drafts=wrong, max_model_len=9 + 12)
    assert record.header.config["max_model_len"] == 9 + 12
    assert run_checks(record).findings == ()
    assert max(event.step for event in record.events) + 1 <= 1 + 12 + depth


def test_an_abort_of_the_last_request_ends_the_trial() -> None:
    """Its user asks for no step more, and the engine must have let go of all by then."""
    work = workload(1)
    work.operations.append(Operation(kind="abort", step=4, request="r0"))
    record = run(1, work)
    assert run_checks(record).findings == ()
    with plant(fault_named("abort-of-the-last-leaves-its-step-under-way")):
        (found, *_) = run_checks(run(1, work)).findings
    assert "blocks leaked" in found.message


def test_a_step_that_is_not_launched_takes_no_drafts_with_it() -> None:
    """Drafts come true for all but the last, so that a step was decided for nobody."""
    prompts = [
        ([18, 60, 22, 46, 14, 47, 15, 58, 18, 50, 50, 7], 2),
        ([19, 18, 60, 44], 3),
        ([17], 3),
        ([24, 42, 9, 33, 7, 34, 26], 1),
        ([7, 50, 50, 18, 58, 15, 47, 14, 46, 22, 60, 18], 4),
        ([44, 60, 18, 19], 5),
        ([17], 7),
    ]
    requests = [
        RequestSpec(
            id=f"r{index}",
            prompt_token_ids=prompt,
            sampling=SamplingSpec(max_tokens=max_tokens),
        )
        for index, (prompt, max_tokens) in enumerate(prompts)
    ]
    changed = SamplingSpec(
        max_tokens=7,
        temperature=1.0,
        seed=41471,
        prompt_logprobs=1,
        repetition_penalty=1.5,
        frequency_penalty=0.7,
        logit_bias=((53, 5.0),),
        logits_processors=("no_repeated_bigram",),
    )
    requests[-1] = msgspec.structs.replace(requests[-1], sampling=changed)
    drafts = {"method": "scripted", "num_speculative_tokens": 2, "acceptance_rate": 1.0}
    settings = EngineSettings(
        num_blocks=55,
        block_size=1,
        async_scheduling=2,
        max_num_batched_tokens=16,
        max_num_seqs=256,
        speculative_config=drafts,
        enable_prefix_caching=False,
    )
    record = run_trial(
        Trial(engine="embedded", settings=settings, workload=Workload(requests=requests)), ADAPTER
    )
    assert run_checks(record, ["work"]).findings == ()
