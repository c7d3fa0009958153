"""The embedded engine's ranks in a trial: clean ones agree, and one that differs is named."""

from __future__ import annotations

import random
from typing import Any

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.checks import Code
from preempt_harness.checks.kvsan import check_kvsan
from preempt_harness.record import BlocksPoisoned, Computed, Preempted, StepSent, TrialRecord
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload


def workload() -> Workload:
    """Four requests of which a pool of ten blocks holds two."""
    rng = random.Random(1)
    requests = [
        RequestSpec(
            id=f"r{index}",
            prompt_token_ids=[rng.randrange(1, 64) for _ in range(7 + index)],
            sampling=SamplingSpec(max_tokens=14, ignore_eos=True),
        )
        for index in range(4)
    ]
    return Workload(requests=requests)


def settings_of(*hooks: str, **changes: Any) -> EngineSettings:
    """Two ranks. Without a prefix cache freed blocks are free at once, and poisoned."""
    options: dict[str, Any] = {"poison": True}
    if hooks:
        options["worker_hooks"] = [f"benchmarks.worker_faults:{hook}" for hook in hooks]
    settings = {
        "num_blocks": 10,
        "block_size": 4,
        "max_num_batched_tokens": 9,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "options": options,
    }
    return EngineSettings(**(settings | changes))


def run(*hooks: str) -> TrialRecord:
    adapter = EmbeddedAdapter()
    trial = Trial(engine=adapter.name, settings=settings_of(*hooks), workload=workload())
    record = run_trial(trial, adapter)
    adapter.close_kept()
    return record


def test_clean_ranks_agree_although_each_poisons_its_own_blocks() -> None:
    """Poisoning of rank 1 is reported between the rows of rank 0 and its own."""
    record = run()
    for event_type in (BlocksPoisoned, Computed, StepSent):
        ranks = {event.rank for event in record.events if isinstance(event, event_type)}
        assert ranks == {0, 1}, event_type
    assert any(isinstance(event, Preempted) for event in record.events)
    assert check_kvsan(record).findings == ()


def test_two_blocks_exchanged_on_one_rank_are_found_with_the_rank() -> None:
    found = check_kvsan(run("exchanged_blocks:1 4")).findings
    assert Code.KVSAN_RANKS_DISAGREE in {finding.code for finding in found}
    assert {finding.rank for finding in found} == {1}
