"""Drafts in a record: which there were, what became of them, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.baseline import BaselineStore
from preempt_harness.budget import KVBudget
from preempt_harness.checks import Code, run_checks
from preempt_harness.checks._work_drafts import drafts_for_itself
from preempt_harness.checks.drafts import ACCEPTED, DRAFTED, REJECTED, DraftLedger, WrongDraft
from preempt_harness.checks.kvsan import check_kvsan
from preempt_harness.faults import Fault, plant
from preempt_harness.faults.speculation import FAULTS
from preempt_harness.record import (
    Arrived,
    BlocksFreed,
    Computed,
    Event,
    Forked,
    Header,
    Preempted,
    TokensDelivered,
    TrialRecord,
)
from preempt_harness.situations import classify
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

ADAPTER = EmbeddedAdapter()
BLOCK = 4


def drafts(method: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": 3, **more}


SCRIPTED = drafts("scripted", acceptance_rate=0.7)
ITSELF = drafts("draft_model", model="exact")


def workload(count: int = 3, max_tokens: int = 40, **sampling: Any) -> Workload:
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[(5 * index + 3 * place) % 50 + 4 for place in range(9 + index)],
                sampling=SamplingSpec(max_tokens=max_tokens, **sampling),
            )
            for index in range(count)
        ]
    )


def run(
    speculative: dict[str, Any] | None,
    work: Workload | None = None,
    *,
    blocks: int = 18,
    plan: str = "",
    **settings: Any,
) -> TrialRecord:
    """A trial in a small pool, with its baseline."""
    work = work or workload()
    asked = EngineSettings(
        num_blocks=blocks, block_size=BLOCK, speculative_config=speculative, **settings
    )
    record = run_trial(Trial(engine="embedded", settings=asked, workload=work, plan=plan), ADAPTER)
    store = BaselineStore(lambda trial: run_trial(trial, ADAPTER))
    record.baseline = store.get(asked, work, ADAPTER)
    return record


# The ledger ---------------------------------------------------------------------------------------


def ledger_of(*events: Event) -> DraftLedger:
    ledger = DraftLedger()
    ledger.take(Arrived(0, "r0", [4, 5, 6], 8))
    for event in events:
        ledger.take(event)
    return ledger


def computed(start: int, token_ids: list[int], step: int = 1, rank: int = 0) -> Computed:
    slots = list(range(start, start + len(token_ids)))
    return Computed(step, rank, "r0.0", start, token_ids, slots, 0, [0], start + len(token_ids))


def delivered(*token_ids: int, step: int = 1) -> TokensDelivered:
    return TokensDelivered(step, "r0.0", list(token_ids))


def totals(ledger: DraftLedger) -> tuple[int, int, int]:
    return ledger.totals[DRAFTED], ledger.totals[ACCEPTED], ledger.totals[REJECTED]


def test_tokens_that_are_known_are_no_drafts() -> None:
    ledger = ledger_of(computed(0, [4, 5, 6]), delivered(7), computed(3, [7], step=2))
    assert totals(ledger) == (0, 0, 0)
    assert ledger.known["r0.0"] == 4


def test_drafts_are_accepted_up_to_the_first_that_is_another_token() -> None:
    ledger = ledger_of(delivered(7, step=0), computed(3, [7, 8, 9, 10]), delivered(8, 11))
    assert totals(ledger) == (3, 1, 2)
    assert ledger.wrong == [WrongDraft(1, "r0.0", 5, 9, 11)]


def test_the_same_comes_of_one_event_and_of_several() -> None:
    one = ledger_of(computed(2, [6, 7, 8]), delivered(7, 9))
    several = ledger_of(computed(2, [6, 7, 8]), delivered(7), delivered(9))
    assert totals(one) == totals(several) == (2, 1, 1)


def test_drafts_behind_the_end_are_rejected_and_not_wrong() -> None:
    ledger = ledger_of(computed(2, [6, 7, 8, 9]), delivered(7), BlocksFreed(1, "r0.0", [0]))
    assert totals(ledger) == (3, 1, 2)
    assert ledger.wrong == []


def test_drafts_that_wait_are_neither() -> None:
    assert totals(ledger_of(computed(2, [6, 7, 8]))) == (2, 0, 0)


def test_other_ranks_compute_the_same_drafts() -> None:
    ledger = ledger_of(computed(2, [6, 7]), computed(2, [6, 7], rank=1), delivered(7))
    assert totals(ledger) == (1, 1, 0)


def test_a_branch_knows_what_its_parent_knew() -> None:
    ledger = ledger_of(delivered(7, step=0), Forked(0, "r0.0", "r0.1"))
    assert ledger.known["r0.1"] == 4


# Records of the embedded engine -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("speculative", [SCRIPTED, drafts("ngram"), ITSELF, None])
def test_a_clean_engine_has_no_finding(speculative: dict[str, Any] | None, mode: str) -> None:
    record = run(speculative, options={"preemption_mode": mode})
    report = run_checks(record)
    assert report.findings == ()
    assert sum(isinstance(event, Preempted) for event in record.events)
    drafted = report.counted["accounting/counters: counters judged"]
    assert drafted
    ledger = DraftLedger()
    for event in record.events:
        ledger.take(event)
    assert (ledger.totals[DRAFTED] > 0) == (speculative is not None)


def test_the_baseline_drafts_nothing() -> None:
    seen: list[Trial] = []

    def watched(trial: Trial) -> TrialRecord:
        seen.append(trial)
        return run_trial(trial, ADAPTER)

    settings = EngineSettings(num_blocks=18, block_size=BLOCK, speculative_config=SCRIPTED)
    store = BaselineStore(watched)
    first = store.get(settings, workload(), ADAPTER)
    plain = msgspec.structs.replace(settings, speculative_config=None)
    assert store.get(plain, workload(), ADAPTER) is first
    assert [trial.settings.speculative_config for trial in seen] == [None]


def test_a_slot_with_a_rejected_draft_is_stale() -> None:
    """The step behind the rejection skips the position: what lies there is the draft's."""
    record = run(drafts("scripted", acceptance_rate=0.0), blocks=64)
    position = skipped = None
    for index, event in enumerate(record.events):
        if not isinstance(event, Computed) or event.start < 12:
            continue
        if skipped is None:
            skipped = event
        elif event.seq == skipped.seq:
            position = event.start
            record.events[index] = msgspec.structs.replace(
                event,
                start=event.start + 1,
                token_ids=event.token_ids[1:],
                written_slots=event.written_slots[1:],
            )
            break
    findings = check_kvsan(record).findings
    assert [(finding.code, finding.position) for finding in findings][:1] == [
        (Code.KVSAN_STALE_READ, position)
    ]
    assert check_kvsan(record, verify="full").findings == findings


def test_situations_tell_what_became_of_the_victims_drafts() -> None:
    values = {}
    for rate in (0.0, 1.0):
        record = run(drafts("scripted", acceptance_rate=rate))
        decode = [item for item in classify(record) if item.values["accepted"]]
        values[rate] = {item.values["accepted"] for item in decode}
        assert {item.values["drafts"] for item in classify(record)} == {("scripted",)}
        assert {item.values["phase"] for item in decode} == {("decode",)}
    assert values == {0.0: {("none",)}, 1.0: {("all",)}}
    assert {item.values["drafts"] for item in classify(run(None))} == {("off",)}


def test_a_token_budget_and_a_block_count_hold_with_drafts() -> None:
    record = run(SCRIPTED, max_num_batched_tokens=5, blocks=20)
    assert run_checks(record).findings == ()


# A draft model that is the target itself ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "judged"),
    [
        ({}, True),
        ({"config": {"model": "exact", "speculative_config": {**ITSELF, "model": "x"}}}, False),
        ({"config": {"model": "exact", "speculative_config": None}}, False),
        ({"config": {"model": "exact", "speculative_config": SCRIPTED}}, False),
        (
            {"config": {"model": "x", "speculative_config": {**ITSELF, "model": "x"}}},
            True,
        ),
        ({"batch_invariant": False}, False),
        ({"num_ranks": 2}, False),
    ],
)
def test_which_drafts_must_all_be_right(changes: dict[str, Any], judged: bool) -> None:
    header = Header(
        workload=workload().to_builtins(),
        engine="embedded",
        model="exact",
        config={"model": "exact", "speculative_config": ITSELF},
        block_size=4,
        num_blocks=8,
        batch_invariant=True,
    )
    assert drafts_for_itself(msgspec.structs.replace(header, **changes)) == judged


def test_a_wrong_draft_of_the_target_itself_is_a_finding() -> None:
    record = run(ITSELF)
    index, event = next(
        (index, event)
        for index, event in enumerate(record.events)
        if isinstance(event, TokensDelivered) and event.step > 3
    )
    record.events[index] = msgspec.structs.replace(event, token_ids=[event.token_ids[0] ^ 1])
    assert Code.WORK_DRAFTS in {finding.code for finding in run_checks(record, ["work"]).findings}


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.7}, {"min_tokens": 30}])
def test_what_a_processor_changes_is_not_the_draft_models_fault(sampling: dict[str, Any]) -> None:
    work = workload(stop_token_ids=tuple(range(4, 50)), **sampling)
    assert run_checks(run(ITSELF, work), ["work"]).findings == ()


# Budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_count_that_is_proved_to_preempt_does_at_any_acceptance(count: int, rate: float) -> None:
    speculative = drafts("scripted", acceptance_rate=rate) | {"num_speculative_tokens": count}
    work = workload(4, max_tokens=60)
    settings = EngineSettings(num_blocks=1, block_size=BLOCK, speculative_config=speculative)
    model = ADAPTER.admission_model(settings)
    assert model.draft_tokens == count
    least = KVBudget.solve(work, model, "minimal")
    proved = [
        budget
        for blocks in range(least.num_blocks_min, least.num_blocks_never)
        if (budget := KVBudget.solve(work, model, blocks)).proof.kind == "proved"
    ]
    assert {budget.verdict for budget in proved} == {"preempts"}
    assert "the first of r0, r1 ends in step" in proved[0].proof.statement
    for budget in (proved[0], proved[len(proved) // 2], proved[-1]):
        record = run(speculative, work, blocks=budget.num_blocks)
        assert any(isinstance(event, Preempted) for event in record.events), budget.explain()


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_a_count_that_is_proved_never_to_preempt_does_not(rate: float) -> None:
    speculative = drafts("scripted", acceptance_rate=rate)
    work = workload(4, max_tokens=60)
    settings = EngineSettings(num_blocks=1, block_size=BLOCK, speculative_config=speculative)
    never = KVBudget.solve(work, ADAPTER.admission_model(settings), "minimal").num_blocks_never
    record = run(speculative, work, blocks=never)
    assert not any(isinstance(event, Preempted) for event in record.events)


def test_where_nothing_is_proved_both_ends_are_played() -> None:
    model = ADAPTER.admission_model(
        EngineSettings(num_blocks=1, block_size=BLOCK, speculative_config=SCRIPTED)
    )
    late = msgspec.structs.replace(workload().requests[1], arrival_step=2)
    work = Workload(requests=[workload().requests[0], late])
    budget = KVBudget.tight(work, model)
    assert budget.proof.kind == "simulated"
    assert budget.proof.statement.endswith("be all drafts accepted or none")


# Faults -------------------------------------------------------------------------------------------


def trials() -> list[TrialRecord]:
    """A few trials in which every fault of drafts has to show."""
    prompt = workload().requests[0].prompt_token_ids[:8]
    victim = RequestSpec(id="r0", prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=32))
    alone = run(None, Workload(requests=[victim]), blocks=64)
    text = prompt + alone.results["r0"].outputs[0].token_ids
    sharer = RequestSpec(
        id="r1",
        prompt_token_ids=text[:28],
        sampling=SamplingSpec(max_tokens=8),
        arrival_step=14,
    )
    lookup = Workload(requests=[victim, sharer])
    wrong = drafts("scripted", acceptance_rate=0.0)
    swap = {"preemption_mode": "swap"}
    several = workload(2, max_tokens=20, n=2, temperature=1.0, seed=3)
    return [
        run(SCRIPTED),
        run(wrong, lookup, blocks=64, plan="preempt:r0@out=12"),
        run(SCRIPTED, workload(presence_penalty=1.5)),
        run(SCRIPTED, workload(16, 16, min_tokens=9, stop_token_ids=tuple(range(4, 40)))),
        run(SCRIPTED, workload(temperature=1.0, seed=1), max_num_batched_tokens=6),
        run(SCRIPTED, workload(stop_token_ids=tuple(range(4, 12)))),
        run(ITSELF, options=swap),
        run(SCRIPTED, options=swap),
        run(ITSELF, several, blocks=30),
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_of_drafts_is_found(fault: Fault) -> None:
    with plant(fault) as planted:
        reports = [run_checks(record) for record in trials()]
    assert planted.num_reached
    codes = {finding.code.value for report in reports for finding in report.findings}
    assert any(code.startswith(fault.expected) for code in codes), codes


def test_without_a_fault_these_trials_are_clean() -> None:
    for record in trials():
        assert run_checks(record).findings == ()
