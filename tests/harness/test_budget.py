"""Budgets and the admission simulator: arithmetic by hand, and the embedded engine as judge."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from exact_runs import VOCAB_SIZE, run_exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from preempt_harness import budget as budget_module
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.admission import (
    AdmissionModel,
    AdmissionModelError,
    AdmissionPolicy,
    PredictedPreemption,
    simulate,
)
from preempt_harness.budget import BudgetError, KVBudget, NoPreemptingBudgetError
from preempt_harness.record import Preempted
from preempt_harness.strategies import workloads
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload


def requests(*sizes: tuple[int, int], arrivals: tuple[int, ...] = ()) -> Workload:
    """Requests of (prompt, output) tokens, no two prompts alike."""
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[4 + 30 * index + position % 30 for position in range(prompt)],
                sampling=SamplingSpec(max_tokens=outputs),
                arrival_step=arrivals[index] if arrivals else 0,
            )
            for index, (prompt, outputs) in enumerate(sizes)
        ]
    )


@st.composite
def models(
    draw: DrawFn, policies: tuple[AdmissionPolicy, ...] = ("full_prompt",)
) -> AdmissionModel:
    """Admission models of engines that keep no block back and look no token ahead."""
    return AdmissionModel(
        policy=draw(st.sampled_from(policies)),
        block_size=draw(st.sampled_from((4, 1, 2, 3, 16))),
        max_num_batched_tokens=draw(st.sampled_from((2048, 64, 16, 7, 3))),
        max_num_seqs=draw(st.sampled_from((256, 4, 2, 1))),
        watermark=draw(st.sampled_from((0.0, 0.1))),
        max_model_len=draw(st.sampled_from((None, 40))),
        prefix_caching=draw(st.booleans()),
    )


NO_STOPS = (
    "shared_prefix",
    "equal_later_blocks",
    "late_arrivals",
    "sampling",
    "operations",
    "long_prompts",
)


# By hand ------------------------------------------------------------------------------------------


# Two requests of 4 prompt and 5 output tokens, blocks of 2. KV for 8 tokens each: 4 blocks alone,
# 8 together. Both prompts together: 4. Step s computes position 3 + s: in step 1 each needs a
# third block, in step 3 a fourth.
TWINS = requests((4, 5), (4, 5))
BLOCKS_OF_2 = AdmissionModel(block_size=2, prefix_caching=False)


@pytest.mark.parametrize(
    ("num_blocks", "verdict", "kind"),
    [
        (3, "infeasible", "proved"),
        (4, "preempts", "proved"),
        (5, "preempts", "proved"),
        (7, "preempts", "proved"),
        (8, "never_preempts", "proved"),
        (9, "never_preempts", "proved"),
    ],
)
def test_two_equal_requests_are_judged_as_by_hand(num_blocks: int, verdict: str, kind: str) -> None:
    budget = KVBudget.solve(TWINS, BLOCKS_OF_2, num_blocks)
    assert (budget.verdict, budget.proof.kind) == (verdict, kind)
    assert (budget.num_blocks_min, budget.num_blocks_never) == (4, 8)


def test_the_simulation_names_the_step_and_the_victim_found_by_hand() -> None:
    # 7 blocks: in step 3 r0 takes the seventh block and r1, admitted last, lacks one.
    simulation = simulate(TWINS, BLOCKS_OF_2, 7)
    assert simulation.preemptions == (PredictedPreemption(3, "r1", 6, 3),)
    assert simulation.finished == {"r0": 5, "r1": 5}
    assert simulation.peak_blocks == 6  # r1 has given up its three when the step is computed
    assert simulation.num_recomputed_tokens == 6


def test_a_proof_states_its_inequality() -> None:
    forced = KVBudget.solve(TWINS, BLOCKS_OF_2, 7).proof.statement
    assert "hold at most 4 blocks <= 7 usable" in forced
    assert "in step 4 r0, r1 still run and need 8 blocks > 7" in forced
    never = KVBudget.solve(TWINS, BLOCKS_OF_2, 8).proof.statement
    assert "r0: ceil((4 + 5 - 1) / 2) = 4; r1: ceil((4 + 5 - 1) / 2) = 4; in all 8 <= 8" in never


def test_requests_that_fit_alone_and_not_together_need_not_preempt() -> None:
    """r0 has finished before r1 grows, so no count preempts although 3 + 4 blocks exceed 6."""
    workload = requests((6, 1), (4, 5))
    room = KVBudget.roomy(workload, BLOCKS_OF_2)
    assert (room.num_blocks_min, room.num_blocks_never) == (4, 7)
    with pytest.raises(NoPreemptingBudgetError, match=r"before others grow.*with a plan"):
        KVBudget.tight(workload, BLOCKS_OF_2)


def test_fewer_blocks_may_preempt_less() -> None:
    """With 3 blocks of 1 the second request waits for the first; with 4 it is let in too soon."""
    model = AdmissionModel(block_size=1, prefix_caching=False)
    budget = KVBudget.tight(requests((2, 2), (2, 2)), model)
    assert [budget.would_preempt(count) for count in (3, 4, 5, 6)] == [False, True, True, False]
    assert budget.num_blocks in (4, 5)


def test_a_reserved_block_shifts_every_answer_by_one() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, reserved_blocks=1)
    without, reserving = KVBudget.tight(TWINS, BLOCKS_OF_2), KVBudget.tight(TWINS, model)
    assert reserving.num_blocks == without.num_blocks + 1
    assert reserving.num_blocks_min == without.num_blocks_min + 1
    assert reserving.num_blocks_never == without.num_blocks_never + 1


def test_one_request_at_a_time_never_preempts() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, max_num_seqs=1)
    assert KVBudget.roomy(TWINS, model).num_blocks_never == 4
    with pytest.raises(NoPreemptingBudgetError, match="4 blocks, the least possible, hold all"):
        KVBudget.tight(TWINS, model)
    with pytest.raises(NoPreemptingBudgetError, match="404 blocks, the least possible, hold all"):
        KVBudget.tight(requests((400, 409), (3, 5)), model)


def test_an_engine_that_reserves_outputs_never_preempts() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, policy="output_reserved")
    five = KVBudget.solve(TWINS, model, 5)
    assert five.verdict == "never_preempts"
    assert (five.num_blocks_min, five.num_blocks_never) == (4, 4)
    assert five.simulation() == simulate(TWINS, model, 5)
    assert simulate(TWINS, model, 5).num_preemptions == 0
    with pytest.raises(NoPreemptingBudgetError, match="never preempts"):
        KVBudget.tight(TWINS, model)


def test_a_roomy_budget_covers_the_watermark() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, watermark=0.2)
    room = KVBudget.roomy(TWINS, model)
    # 10 - floor(0.2 * 10) = 8 = what both hold; 9 - floor(0.2 * 9) = 8 as well, and is smaller.
    assert room.num_blocks == 9
    assert room.verdict == "never_preempts"


def test_lookahead_slots_enlarge_what_a_request_needs() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, lookahead_tokens=3)
    budget = KVBudget.tight(TWINS, model)
    assert (budget.num_blocks_min, budget.num_blocks_never) == (6, 12)  # ceil((8 + 3) / 2) each
    assert budget.proof.kind == "simulated"  # a step may bring several tokens
    assert simulate(TWINS, model, 6).finished == {"r0": 5, "r1": 5}


def test_a_request_that_outgrows_the_pool_alone_is_infeasible_in_the_simulation() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, lookahead_tokens=3)
    assert simulate(TWINS, model, 5).infeasible == ("r0", "r1")


CHUNKED = AdmissionModel(
    policy="full_fit", block_size=2, max_num_batched_tokens=2, prefix_caching=False
)


def test_full_fit_takes_the_blocks_of_a_chunk_and_wants_room_for_all() -> None:
    """r1 begins when four blocks are free, takes them as it computes, and r0 grows meanwhile."""
    workload = requests((2, 4), (8, 1))
    reserving = msgspec.structs.replace(CHUNKED, policy="full_prompt")
    assert simulate(workload, reserving, 6).preempted == {"r1"}
    assert simulate(workload, CHUNKED, 6).preempted == frozenset()
    assert simulate(workload, CHUNKED, 5).peak_blocks == 4, "r1 fits when r0 is done"


def test_a_last_token_that_needs_room_makes_the_smallest_pool_larger() -> None:
    workload = requests((4, 5))
    asks = msgspec.structs.replace(BLOCKS_OF_2, last_token_needs_room=True)
    assert KVBudget.solve(workload, BLOCKS_OF_2, "minimal").num_blocks == 4  # 8 tokens
    assert KVBudget.solve(workload, asks, "minimal").num_blocks == 5
    assert "ceil((4 + 5 - 0) / 2) = 5" in KVBudget.solve(workload, asks, 4).explain()


def test_drafts_that_come_first_leave_nothing_for_others() -> None:
    """One request and its drafts fill a step, so that the next begins when it has ended."""
    shared = AdmissionModel(
        block_size=2, max_num_batched_tokens=4, draft_tokens=3, prefix_caching=False
    )
    first = msgspec.structs.replace(shared, drafts_first=True)
    workload = requests((4, 9), (4, 9))
    assert simulate(workload, shared, 40).last_step < simulate(workload, first, 40).last_step
    alone = simulate(requests((4, 9)), first, 40)
    assert simulate(workload, first, 40).last_step == 2 * alone.last_step + 1
    quick = simulate(workload, first, 40, num_accepted_drafts=3)
    assert quick.last_step < simulate(workload, first, 40).last_step


def test_a_pool_smaller_than_a_request_ends_it_early() -> None:
    simulation = simulate(requests((4, 9)), BLOCKS_OF_2, 3)
    assert simulation.finished == {"r0": 3}  # 3 * 2 + 1 tokens, the last one never computed
    assert simulation.truncated == ("r0",)


def test_a_prompt_without_room_ends_alone() -> None:
    simulation = simulate(requests((7, 2), (2, 2)), BLOCKS_OF_2, 3)
    assert simulation.infeasible == ("r0",)
    assert simulation.finished == {"r1": 2}


def test_shared_prompt_blocks_are_counted_once_in_a_proof() -> None:
    """Equal prompts of two blocks: 6 blocks are enough in truth, so 6 must not be called forced."""
    caching = msgspec.structs.replace(BLOCKS_OF_2, prefix_caching=True)
    request = TWINS.requests[0]
    workload = Workload(requests=[request, msgspec.structs.replace(request, id="r1")])
    proofs = [KVBudget.solve(workload, caching, count).proof for count in (5, 6, 7)]
    assert [proof.kind for proof in proofs] == ["proved", "simulated", "simulated"]
    assert "(2 shared)" in proofs[0].statement


def test_an_abort_before_the_peak_undoes_the_proof() -> None:
    workload = Workload(
        requests=TWINS.requests, operations=[Operation(kind="abort", step=2, request="r0")]
    )
    assert KVBudget.solve(TWINS, BLOCKS_OF_2, 6).proof.kind == "proved"
    aborted = KVBudget.solve(workload, BLOCKS_OF_2, 6)
    assert (aborted.verdict, aborted.proof.kind) == ("never_preempts", "simulated")


def test_stops_leave_only_what_is_certain_proved() -> None:
    stopping = Workload(
        requests=[
            msgspec.structs.replace(
                request, sampling=SamplingSpec(max_tokens=5, stop_token_ids=(9,))
            )
            for request in TWINS.requests
        ]
    )
    guess = KVBudget.solve(stopping, BLOCKS_OF_2, 6)
    assert (guess.verdict, guess.proof.kind) == ("preempts", "simulated")
    assert "if r0, r1 do not stop early" in guess.proof.statement
    assert KVBudget.solve(stopping, BLOCKS_OF_2, 8).proof.kind == "proved"
    known = KVBudget.solve(stopping, BLOCKS_OF_2, 6, output_lengths={"r0": 5, "r1": 5})
    assert (known.verdict, known.proof.kind) == ("preempts", "proved")
    short = KVBudget.solve(stopping, BLOCKS_OF_2, 6, output_lengths={"r0": 1, "r1": 1})
    assert (short.verdict, short.proof.kind) == ("never_preempts", "proved")


def test_min_tokens_make_a_stopping_request_certain_again() -> None:
    sampling = SamplingSpec(max_tokens=5, min_tokens=5, stop_token_ids=(9,))
    workload = Workload(
        requests=[msgspec.structs.replace(item, sampling=sampling) for item in TWINS.requests]
    )
    assert KVBudget.solve(workload, BLOCKS_OF_2, 7).proof.kind == "proved"


def test_a_tight_budget_gives_as_many_preemptions_as_asked_or_says_how_many_there_are() -> None:
    workload = requests((8, 24), (8, 24), (8, 24))
    for at_least in (1, 3):
        budget = KVBudget.tight(workload, BLOCKS_OF_2, at_least=at_least)
        assert budget.simulation().num_preemptions >= at_least
    with pytest.raises(NoPreemptingBudgetError, match=r"preempts 1000 times: .* at most"):
        KVBudget.tight(workload, BLOCKS_OF_2, at_least=1000)
    with pytest.raises(BudgetError, match="at_least=0 is not a count"):
        KVBudget.tight(workload, BLOCKS_OF_2, at_least=0)


def test_a_wide_range_of_counts_is_scanned_until_one_preempts() -> None:
    """About 1,000 counts are feasible; a few dozen looks are enough for those that preempt."""
    model = AdmissionModel(block_size=1, prefix_caching=False)
    budget = KVBudget.tight(requests((20, 500), (20, 500), (20, 500)), model)
    assert budget.simulation().num_preemptions >= 2
    assert budget.simulation().recompute_ratio <= 1


def rank(budget: KVBudget) -> tuple[bool, bool, bool]:
    """How suitable a count is, in the words of `KVBudget.tight`: calm, proved, several."""
    simulation = budget.simulation()
    several = simulation.num_preemptions >= 2
    return simulation.recompute_ratio <= 1, budget.proof.kind == "proved", several


@pytest.mark.parametrize(
    "workload",
    [
        TWINS,
        requests((4, 9), (6, 7), (3, 12)),
        requests((5, 20), (1, 3), (9, 30)),
        requests((4, 9), (6, 7), (3, 12), arrivals=(0, 2, 3)),
        requests((12, 12), (2, 25), (9, 3), arrivals=(0, 0, 4)),
        requests((44, 8), (24, 10), (38, 32), (38, 28)),  # some counts thrash when it is greedy
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"reserved_blocks": 1}, {"draft_tokens": 2}, {"policy": "greedy"}]
)
def test_a_tight_budget_is_the_most_suitable_of_all_counts(
    workload: Workload, options: dict[str, Any]
) -> None:
    """And of those that are equally good it is the largest; the smallest where drafts guess."""
    model = msgspec.structs.replace(BLOCKS_OF_2, **options)
    tight = KVBudget.tight(workload, model)
    preempting = [
        budget
        for count in range(tight.num_blocks_min, tight.num_blocks_never)
        if (budget := KVBudget.solve(workload, model, count)).simulation().num_preemptions
    ]
    assert rank(tight) == max(map(rank, preempting))
    equals = [budget.num_blocks for budget in preempting if rank(budget) == rank(tight)]
    if tight.proof.kind == "proved":
        assert tight.num_blocks == (min if model.draft_tokens else max)(equals)


@pytest.mark.parametrize("reserved", [0, 2])
def test_in_a_wide_range_the_ends_of_proofs_are_looked_at(reserved: int) -> None:
    workload = requests((20, 200), (20, 230), (20, 260))
    model = AdmissionModel(block_size=1, prefix_caching=False, reserved_blocks=reserved)
    tight = KVBudget.tight(workload, model)
    assert tight.num_blocks_never - tight.num_blocks_min > 3 * 64
    assert rank(tight) == (True, True, True)
    assert rank(KVBudget.solve(workload, model, tight.num_blocks + 1)) < rank(tight)


def test_a_wide_range_without_proofs_is_looked_at_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that come one by one are beyond proofs. First looks are spread evenly."""
    simulated: dict[int, None] = {}

    def noting(workload: Workload, model: AdmissionModel, num_blocks: int, **known: Any) -> Any:
        simulated[num_blocks] = None
        return simulate(workload, model, num_blocks, **known)

    monkeypatch.setattr(budget_module, "simulate", noting)
    workload = requests((20, 90), (20, 90), (20, 90), arrivals=(0, 5, 9))
    model = AdmissionModel(block_size=1, prefix_caching=False)
    tight = KVBudget.tight(workload, model)
    assert tight.proof.kind == "simulated"
    assert rank(tight) == (True, False, True)
    assert len(simulated) < 40, "it ends with the first that is as good as any can be"

    simulated.clear()
    with pytest.raises(NoPreemptingBudgetError):
        KVBudget.tight(workload, model, at_least=1000)
    counts = range(tight.num_blocks_min, tight.num_blocks_never)
    looks = sorted(list(simulated)[:65])  # the first is for the roomiest, to know the peak
    assert (looks[0], looks[-2:]) == (counts[0], [counts[-1], counts[-1] + 1])
    gaps = {after - before for before, after in itertools.pairwise(looks)}
    assert max(gaps) <= len(counts) // 64 + 1
    assert set(counts) <= set(simulated), "before it is given up, all are looked at"


# What the user reads ------------------------------------------------------------------------------


def test_a_vacuous_budget_explains_what_would_preempt() -> None:
    text = KVBudget.solve(TWINS, BLOCKS_OF_2, 40).explain()
    assert text.startswith("40 blocks never preempt (proved): ")
    other = KVBudget.tight(TWINS, BLOCKS_OF_2).num_blocks
    assert f"{other} blocks would preempt (proved): r0, r1 arrive in step 0" in text


def test_a_vacuous_budget_without_alternative_gives_advice() -> None:
    text = KVBudget.solve(requests((4, 5)), BLOCKS_OF_2, 40).explain()
    assert "No block count preempts" in text
    assert "force a preemption with a plan" in text


def test_the_range_that_was_looked_at_is_named_as_it_is() -> None:
    workload = requests((6, 1), (4, 5))
    with pytest.raises(NoPreemptingBudgetError) as caught:
        KVBudget.tight(workload, BLOCKS_OF_2)
    room = KVBudget.roomy(workload, BLOCKS_OF_2)
    low, high = room.num_blocks_min, room.num_blocks_never
    assert f"with {low} to {high - 1} blocks" in str(caught.value)
    assert f"{high} hold them all" in str(caught.value)


def test_what_no_pool_can_run_needs_no_more_than_a_block() -> None:
    model = msgspec.structs.replace(BLOCKS_OF_2, max_model_len=4, reserved_blocks=1)
    budget = KVBudget.roomy(requests((4, 5), (7, 2)), model)
    assert (budget.num_blocks_min, budget.num_blocks, budget.verdict) == (2, 2, "never_preempts")
    none = KVBudget.solve(budget.workload, model, 1)
    assert none.verdict == "infeasible"
    assert "a pool needs 1 blocks alone > 0 usable" in none.explain()


def test_an_infeasible_budget_names_the_request_and_what_it_needs() -> None:
    text = KVBudget.solve(TWINS, BLOCKS_OF_2, 3).explain()
    assert text.startswith("3 blocks are too few (proved): r0: ceil((4 + 5 - 1) / 2) = 4 blocks")


@pytest.mark.parametrize("want", ["snug", 0, -3, True, 2.5])
def test_a_budget_that_is_none_is_refused_with_the_choices(want: object) -> None:
    with pytest.raises(BudgetError, match='"tight", "roomy", "minimal" or a positive number'):
        KVBudget.solve(TWINS, BLOCKS_OF_2, want)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "hopeful"}, {"block_size": 0}, {"watermark": 1.0}, {"max_model_len": 1}],
)
def test_an_impossible_admission_model_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(AdmissionModelError, match=f"{next(iter(wrong))} must be"):
        AdmissionModel(**{"block_size": 2, **wrong})  # type: ignore[arg-type]


def test_a_budget_goes_into_a_record_as_plain_data() -> None:
    data = KVBudget.tight(TWINS, BLOCKS_OF_2).to_builtins()
    assert json.loads(json.dumps(data)) == data
    assert data["verdict"] == "preempts"
    assert data["proof"]["kind"] == "proved"


# Drawn --------------------------------------------------------------------------------------------


@st.composite
def any_cases(draw: DrawFn) -> tuple[Workload, AdmissionModel]:
    """Workloads of all features under all policies, reserved blocks included."""
    model = draw(models(("full_prompt", "chunk", "greedy", "output_reserved")))
    model = msgspec.structs.replace(model, reserved_blocks=draw(st.integers(0, 1)))
    workload = draw(
        workloads(vocab_size=VOCAB_SIZE, block_size=model.block_size, use_features=NO_STOPS)
    )
    return workload, model


@settings(max_examples=40)
@given(any_cases(), st.data())
def test_proofs_never_contradict_the_simulation(
    case: tuple[Workload, AdmissionModel], data: st.DataObject
) -> None:
    workload, model = case
    room = KVBudget.roomy(workload, model)
    num_blocks = data.draw(st.integers(room.num_blocks_min, room.num_blocks))
    budget = KVBudget.solve(workload, model, num_blocks)
    simulation = simulate(workload, model, num_blocks)
    assert (budget.verdict == "preempts") == (simulation.num_preemptions > 0)
    assert not simulation.truncated


def is_runnable(request: RequestSpec, model: AdmissionModel) -> bool:
    return model.output_limit(request) > 0


@settings(max_examples=40)
@given(st.data(), models())
def test_the_simulation_predicts_every_preemption_of_the_engine(
    data: st.DataObject, model: AdmissionModel
) -> None:
    workload = data.draw(workloads(vocab_size=VOCAB_SIZE, block_size=model.block_size))
    room = KVBudget.roomy(workload, model)
    num_blocks = data.draw(st.integers(max(1, room.num_blocks_min - 2), room.num_blocks))
    run = run_exactly(workload, model, num_blocks)
    known = {
        request: ids
        for request, ids in run.outputs.items()
        if run.reasons.get(request) in ("stop", "length")
    }
    simulation = simulate(workload, model, num_blocks, output_token_ids=known)
    assert list(simulation.preemptions) == run.preemptions
    assert set(simulation.infeasible) == {
        request for request, reason in run.reasons.items() if reason == "error"
    }


@settings(max_examples=40)
@given(st.data(), models())
def test_a_forcing_count_preempts_the_engine_and_a_roomy_one_does_not(
    data: st.DataObject, model: AdmissionModel
) -> None:
    workload = data.draw(
        workloads(vocab_size=VOCAB_SIZE, block_size=model.block_size, use_features=NO_STOPS)
    )
    room = KVBudget.roomy(workload, model)
    assert run_exactly(workload, model, room.num_blocks_never).preemptions == []
    assert run_exactly(workload, model, room.num_blocks).preemptions == []
    try:
        tight = KVBudget.tight(workload, model)
    except NoPreemptingBudgetError:
        return
    assert run_exactly(workload, model, tight.num_blocks).preemptions


@settings(max_examples=25)
@given(st.data(), models())
def test_the_smallest_feasible_count_lets_every_request_finish_and_one_less_does_not(
    data: st.DataObject, model: AdmissionModel
) -> None:
    features = [name for name in NO_STOPS if name != "operations"]
    workload = data.draw(
        workloads(vocab_size=VOCAB_SIZE, block_size=model.block_size, use_features=features)
    )
    least = KVBudget.solve(workload, model, "minimal").num_blocks
    wanted = {
        request.id: model.output_limit(request)
        for request in workload.requests
        if is_runnable(request, model)
    }

    def lengths(num_blocks: int) -> dict[str, int]:
        run = run_exactly(workload, model, num_blocks)
        return {name: len(ids) for name, ids in run.outputs.items() if ids}

    assert lengths(least) == wanted
    if least > 1:
        assert lengths(least - 1) != wanted


def test_a_wrong_admission_model_is_found_out_by_the_engine() -> None:
    """Negative control: were the comparison blind, this difference of one block would pass too."""
    wrong = msgspec.structs.replace(BLOCKS_OF_2, reserved_blocks=1)
    run = run_exactly(TWINS, BLOCKS_OF_2, 8)
    assert list(simulate(TWINS, BLOCKS_OF_2, 8).preemptions) == run.preemptions
    assert list(simulate(TWINS, wrong, 8).preemptions) != run.preemptions


def _several_outputs(source: random.Random) -> Workload:
    """Requests of one to four outputs, which run to their full length."""
    requests = []
    for index in range(source.randint(2, 4)):
        count = source.choice((1, 2, 2, 3, 4))
        drawn = {"n": count, "temperature": 1.0, "seed": index} if count > 1 else {}
        prompt = [source.randrange(4, 60) for _ in range(source.randint(1, 20))]
        sampling = SamplingSpec(max_tokens=source.randint(1, 16), **drawn)
        requests.append(RequestSpec(id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    return Workload(requests=requests)


def test_several_outputs_are_judged_as_the_engine_runs_them() -> None:
    """Proofs hold, and what is simulated is what happens."""
    adapter = EmbeddedAdapter()
    verdicts = Counter[str]()
    for seed in range(60):
        source = random.Random(seed)
        settings = EngineSettings(
            num_blocks=1,
            block_size=source.choice((1, 2, 4, 8)),
            max_num_batched_tokens=source.choice((8, 16, 2048)),
            enable_prefix_caching=source.random() < 0.5,
        )
        workload = _several_outputs(source)
        admission = adapter.admission_model(settings)
        smallest = KVBudget.solve(workload, admission, "minimal")
        least, enough = smallest.num_blocks_min, smallest.num_blocks_never
        for num_blocks in sorted({least, source.randint(least, enough), enough}):
            budget = KVBudget.solve(workload, admission, num_blocks)
            trial = Trial(
                engine="embedded",
                settings=msgspec.structs.replace(settings, num_blocks=num_blocks),
                workload=workload,
            )
            record = run_trial(trial, adapter)
            assert all(
                len(output.token_ids) == request.sampling.max_tokens
                for request in workload.requests
                for output in record.results[request.id].outputs
            ), f"{num_blocks} blocks are too few, seed {seed}"
            preempts = any(isinstance(event, Preempted) for event in record.events)
            verdicts[f"{budget.proof.kind}, {budget.verdict}"] += 1
            assert preempts == (budget.verdict == "preempts"), (seed, budget.explain())
    assert min(verdicts.values()) >= 10, verdicts
    assert len(verdicts) == 4


def test_what_several_outputs_need_is_spelled_out() -> None:
    sampling = SamplingSpec(max_tokens=6, n=3)
    workload = Workload(
        requests=[RequestSpec(id="r0", prompt_token_ids=list(range(9)), sampling=sampling)]
    )
    budget = KVBudget.solve(workload, AdmissionModel(block_size=4), 7)
    # Two full blocks of the prompt, and of 14 tokens two blocks more for each output.
    assert budget.verdict == "infeasible"
    assert "r0: 2 + 3 * (ceil((9 + 6 - 1) / 4) - 2) = 8 blocks alone > 7" in budget.explain()
    assert KVBudget.solve(workload, AdmissionModel(block_size=4), "minimal").num_blocks == 8


def test_more_outputs_than_may_run_at_once_can_never_run() -> None:
    sampling = SamplingSpec(max_tokens=6, n=3)
    workload = Workload(
        requests=[
            RequestSpec(id="wide", prompt_token_ids=[1, 2], sampling=sampling),
            RequestSpec(id="narrow", prompt_token_ids=[3], sampling=SamplingSpec(max_tokens=6)),
        ]
    )
    played = simulate(workload, AdmissionModel(block_size=4, max_num_seqs=2), 9)
    assert played.infeasible == ("wide",)
    assert played.finished == {"narrow": 6}


def test_outputs_apart_need_room_for_one_at_a_time() -> None:
    """Each is a request of its own: they need not fit together, nor run at once."""
    sampling = SamplingSpec(max_tokens=6, n=3)
    workload = Workload(
        requests=[RequestSpec(id="wide", prompt_token_ids=list(range(9)), sampling=sampling)]
    )
    model = AdmissionModel(block_size=4, max_num_seqs=2, outputs_apart=True)
    least = KVBudget.solve(workload, model, "minimal")
    assert least.num_blocks == 4  # ceil((9 + 6 - 1) / 4)
    assert least.num_blocks_never == 8
    assert least.simulation().finished == {"wide": 6, "wide/1": 6, "wide/2": 6}
    assert "preempts wide/1 in step 5" in KVBudget.solve(workload, model, 5).explain()
    assert least.workload == workload


def test_an_abort_ends_all_outputs_that_are_apart() -> None:
    sampling = SamplingSpec(max_tokens=8, n=2)
    workload = Workload(
        requests=[RequestSpec(id="r0", prompt_token_ids=[1, 2], sampling=sampling)],
        operations=[Operation(kind="abort", step=3, request="r0")],
    )
    model = AdmissionModel(block_size=4, outputs_apart=True)
    assert set(KVBudget.roomy(workload, model).simulation().aborted) == {"r0", "r0/1"}


def test_a_length_that_is_known_is_that_of_the_longest_output() -> None:
    sampling = SamplingSpec(max_tokens=8, n=2, ignore_eos=False)
    workload = Workload(requests=[RequestSpec(id="r0", prompt_token_ids=[1, 2], sampling=sampling)])
    fixed = msgspec.structs.replace(
        workload.requests[0], sampling=msgspec.structs.replace(sampling, ignore_eos=True)
    )
    model = AdmissionModel(block_size=4, outputs_apart=True)
    # Of outputs that may stop early, nobody knows which was the longest.
    assert KVBudget.roomy(workload, model, output_lengths={"r0": 3}).num_blocks == 6
    known = KVBudget.roomy(Workload(requests=[fixed]), model, output_lengths={"r0": 3})
    assert known.num_blocks == 2


def test_blocks_that_are_merged_leave_no_proof_for_equal_prompts() -> None:
    """transformers' continuous batching: equal outputs of equal prompts share all full blocks."""
    sampling = SamplingSpec(max_tokens=13, n=3)
    workload = Workload(
        requests=[RequestSpec(id="r0", prompt_token_ids=list(range(7)), sampling=sampling)]
    )
    apart = AdmissionModel(policy="chunk", block_size=4, outputs_apart=True)
    merging = msgspec.structs.replace(apart, merges_equal_blocks=True)
    assert KVBudget.solve(workload, apart, 11).proof.kind == "proved"
    assert KVBudget.solve(workload, merging, 11).proof.kind == "simulated"


def test_merged_blocks_are_played() -> None:
    """Two equal requests hold a block each while they fill it, and one of them when it is full."""
    twins = [
        RequestSpec(id=f"r{i}", prompt_token_ids=[1, 2], sampling=SamplingSpec(max_tokens=9))
        for i in range(2)
    ]
    model = AdmissionModel(block_size=2)
    merging = msgspec.structs.replace(model, merges_equal_blocks=True)
    assert simulate(Workload(requests=twins), model, 20).peak_blocks == 5 + 5
    assert simulate(Workload(requests=twins), merging, 20).peak_blocks == 4 + 2
