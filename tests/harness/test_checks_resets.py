"""Cache resets: what was computed before one must not be found after it."""

from __future__ import annotations

import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.checks import Code, run_checks
from preempt_harness.faults import Fault, Patch, fault_named, plant
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import (
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    Computed,
    SwappedIn,
    SwappedOut,
    TrialRecord,
)
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload


def run(kind: str = "reset_prefix_cache") -> TrialRecord:
    """A victim waits through a reset, and comes back."""
    harness = PreemptHarness(EmbeddedAdapter(), {"model": "exact", "block_size": 4})
    workload = Workload(
        requests=[
            RequestSpec(
                id="r0",
                prompt_token_ids=list(range(4, 20)),
                sampling=SamplingSpec(max_tokens=12),
            )
        ],
        operations=[Operation(kind=kind, step=8)],
    )
    # It grows into the held blocks, waits for them, and has all its own in the cache.
    return harness.run(workload, 7, plan="squeeze:2@3..10").record


def resets(record: TrialRecord) -> list[tuple[str, int | None, str | None]]:
    findings = run_checks(record, ["accounting"]).findings
    return [(str(found.code), found.step, found.sequence) for found in findings]


@pytest.mark.parametrize("kind", ["reset_prefix_cache", "reset_running_requests"])
def test_a_reset_that_is_kept_is_no_finding(kind: str) -> None:
    record = run(kind)
    assert resets(record) == []
    assert run_checks(record).counted["accounting/resets: resets judged"] == 1


def test_a_reset_that_is_skipped_is_found_at_the_next_hit() -> None:
    with plant(fault_named("reset-refused-while-preempted")):
        record = run()
    (first, *_) = resets(record)
    resumed = next(
        event.step
        for event in record.events
        if isinstance(event, BlocksAllocated) and event.step > 8
    )
    assert first == (Code.ACC_RESET, resumed, "r0.0")


@pytest.mark.parametrize("name", ["reset-spares-the-swapped", "reset-spares-the-just-resumed"])
def test_who_keeps_what_was_computed_before_a_reset_of_running_requests_is_found(
    name: str,
) -> None:
    def record() -> TrialRecord:
        harness = PreemptHarness(EmbeddedAdapter(), {"model": "exact", "block_size": 4})
        workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=16)
        resets = [Operation(kind="reset_running_requests", step=step) for step in range(5, 9)]
        return harness.run(
            Workload(requests=workload.requests, operations=resets),
            plan="preempt-all@out=4:swap",
        ).record

    assert resets(record()) == []
    with plant(fault_named(name)) as planted:
        found = resets(record())
    assert planted.num_reached
    assert {code for code, _, _ in found} == {Code.ACC_RESET}


def test_an_engine_that_does_not_show_resets_is_not_observable() -> None:
    record = run()
    record.events = [event for event in record.events if not isinstance(event, CacheReset)]
    observed = [name for name in record.header.observed if name != "CacheReset"]
    record.header.observed[:] = observed
    reasons = run_checks(record, ["accounting"]).not_observable
    assert reasons["accounting/resets"] == "embedded does not show CacheReset"


@pytest.mark.parametrize("granted_anew", [True, False])
def test_a_block_granted_anew_is_as_old_as_its_new_content(granted_anew: bool) -> None:
    """Its swap is decided while the step that writes it is under way, and not told of yet."""
    record = run("reset_running_requests")
    record.events = [
        BlocksAllocated(0, "r0.0", [3], 0),
        Computed(0, 0, "r0.0", 0, [4, 5, 6, 7], [12, 13, 14, 15], 0, [3], 4),
        BlocksFreed(1, "r0.0", [3]),
        CacheReset(2, running=True),
        *([BlocksAllocated(5, "r1.0", [3], 0)] if granted_anew else []),
        SwappedOut(6, "r1", [(3, 0)]),
        SwappedIn(8, "r1", [(0, 4)]),
    ]
    found = [code for code, step, _ in resets(record) if code == Code.ACC_RESET and step == 8]
    assert bool(found) != granted_anew


def test_content_is_as_old_on_its_way_through_the_host() -> None:
    """r0 is swapped out and in about a reset; r1 begins with its prompt."""
    harness = PreemptHarness(EmbeddedAdapter(), {"model": "exact", "block_size": 4})
    prompt = list(range(4, 20))
    requests = [
        RequestSpec(id="r0", prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=20)),
        RequestSpec(
            id="r1",
            prompt_token_ids=[*prompt, 4],
            sampling=SamplingSpec(max_tokens=4),
            arrival_step=13,
        ),
    ]
    workload = Workload(
        requests=requests, operations=[Operation(kind="reset_prefix_cache", step=8)]
    )
    renewed = Fault(
        name="a-swap-renews-the-epoch",
        mechanism="what was computed before a reset is offered again after a swap",
        source="mechanism",
        expected=("ACC-RESET",),
        patches=(
            Patch(
                "preempt_engine.block_manager:BlockManager.rebuild",
                "num_shared = 0",
                "num_shared, sequence.cache_epoch = 0, self._num_resets",
            ),
        ),
    )
    for at in (7, 9):
        assert resets(harness.run(workload, plan=f"preempt:r0@step={at}:swap").record) == []
        with plant(renewed):
            record = harness.run(workload, plan=f"preempt:r0@step={at}:swap").record
        found = resets(record)
        assert {(code, sequence) for code, _, sequence in found} == {("ACC-RESET", "r1.0")}
