"""Swap, several outputs and beam search on the embedded engine, judged by every check."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.baseline import as_baseline
from preempt_harness.checks.run import run_checks
from preempt_harness.record import (
    AnyEvent,
    Forked,
    Preempted,
    TokensChosen,
    TrialRecord,
    WorkerCopied,
    WorkerSwappedIn,
    WorkerSwappedOut,
)
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import BeamSpec, RequestSpec, SamplingSpec, Workload

BLOCK_SIZE = 3
ROOM = 400


def run(workload: Workload, num_blocks: int, plan: str = "", **options: object) -> TrialRecord:
    """A trial with its baseline attached."""
    adapter = EmbeddedAdapter()
    budget = options.pop("max_num_batched_tokens", 64)
    assert isinstance(budget, int)
    trial = Trial(
        engine=adapter.name,
        settings=EngineSettings(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=budget,
            options={"poison": True, "record_pool_every": 1, **options},
        ),
        workload=workload,
        plan=plan,
    )
    record = run_trial(trial, adapter)
    settings_with_room = EngineSettings(num_blocks=ROOM, block_size=BLOCK_SIZE)
    roomy = Trial(engine=adapter.name, settings=settings_with_room, workload=workload)
    record.baseline = as_baseline(run_trial(roomy, adapter))
    return record


def assert_clean(record: TrialRecord) -> None:
    assert record.baseline is not None
    assert record.baseline.problems == []
    assert [str(finding) for finding in run_checks(record).findings] == []


def requests(*samplings: SamplingSpec, prompt_tokens: int = 7) -> Workload:
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[1 + index, *range(10, 9 + prompt_tokens)],
                sampling=sampling,
            )
            for index, sampling in enumerate(samplings)
        ]
    )


def kinds(events: Iterable[AnyEvent]) -> set[type]:
    return {type(event) for event in events}


def test_a_swapped_request_is_seen_on_both_sides_and_clean() -> None:
    record = run(requests(SamplingSpec(max_tokens=9), SamplingSpec()), 40, "preempt:r1@out=4:swap")
    assert_clean(record)
    assert {WorkerSwappedOut, WorkerSwappedIn} <= kinds(record.events)
    (preempted,) = (event for event in record.events if isinstance(event, Preempted))
    assert (preempted.mode, preempted.reason) == ("swap", "forced")


def test_outputs_of_one_prompt_are_swapped_and_recomputed_clean() -> None:
    sampling = SamplingSpec(n=3, temperature=1.0, seed=5, max_tokens=9, logprobs=1)
    record = run(requests(sampling), 40, "preempt:r0@out=3:swap / preempt:r0@out=6")
    assert_clean(record)
    assert len(record.results["r0"].outputs) == 3
    assert {Forked, WorkerCopied, WorkerSwappedIn} <= kinds(record.events)


def test_beams_are_swapped_and_recomputed_clean() -> None:
    sampling = SamplingSpec(beam=BeamSpec(num_beams=3), max_tokens=9)
    record = run(requests(sampling), 40, "preempt:r0@out=3:swap / preempt:r0@out=6")
    assert_clean(record)
    assert sum(isinstance(event, Preempted) for event in record.events) == 2
    assert len(record.results["r0"].outputs) == 3
    assert {Forked, TokensChosen, WorkerCopied, WorkerSwappedIn} <= kinds(record.events)


def test_a_tight_pool_swaps_by_itself_and_is_clean() -> None:
    sampling = SamplingSpec(n=2, temperature=1.0, seed=5, max_tokens=12)
    record = run(requests(sampling, sampling), 11, preemption_mode="swap")
    assert_clean(record)
    natural = [event for event in record.events if isinstance(event, Preempted)]
    assert natural
    assert {(event.mode, event.reason) for event in natural} == {("swap", "out_of_blocks")}


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_no_check_has_anything_to_say(rng: Random) -> None:
    samplings = [draw_sampling(rng) for _ in range(rng.randint(1, 3))]
    prompt_tokens = rng.randint(1, 10)
    alone = [
        sampling.num_sequences * (1 + (prompt_tokens + sampling.max_tokens) // BLOCK_SIZE)
        for sampling in samplings
    ]
    plan = rng.choice(["", "random:p=0.2,max=4,seed=3", "random:p=0.2,max=4,seed=3:swap"])
    record = run(
        requests(*samplings, prompt_tokens=prompt_tokens),
        max(alone) + rng.choice([0, 1, 3]),
        plan,
        max_num_batched_tokens=rng.choice([2, 5, 64]),
        preemption_mode=rng.choice(["recompute", "swap"]),
        swap_space_blocks=rng.choice([0, 3, 100]),
        block_reuse_order=rng.choice(["fifo", "lifo"]),
    )
    assert_clean(record)


def draw_sampling(rng: Random) -> SamplingSpec:
    max_tokens = rng.choice([1, 4, 8])
    if rng.random() < 0.4:
        beam = BeamSpec(num_beams=rng.randint(1, 3), early_stopping=rng.choice([True, "never"]))
        return SamplingSpec(beam=beam, max_tokens=max_tokens, ignore_eos=rng.random() < 0.5)
    return SamplingSpec(
        n=rng.randint(1, 3),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(99),
        max_tokens=max_tokens,
        logprobs=rng.choice([None, 1]),
    )
