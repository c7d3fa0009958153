"""Aimed trials: what each aim is for happens in them, and they suit the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import msgspec
import pytest

from preempt_harness.adapters import protocol
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.checks._work_drafts import drafts_for_itself
from preempt_harness.checks.drafts import DraftLedger
from preempt_harness.explore._aimed import Aimed
from preempt_harness.explore.aims import AIMS, aim
from preempt_harness.explore.random_settings import random_settings
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.generators import random_workload
from preempt_harness.plan import PreemptAll, PreemptionPlan, Squeeze, Step
from preempt_harness.record import (
    Aborted,
    BlocksAllocated,
    BlocksCopied,
    BlocksPoisoned,
    CacheReset,
    Finished,
    PoolCounts,
    Preempted,
    PriorityChanged,
    SwappedIn,
    SwappedOut,
    TokensDelivered,
    TrialRecord,
)
from preempt_harness.trial import Trial, run_trial

SEEDS = range(40)


def drawn(seed: int, adapter: EmbeddedAdapter) -> Aimed:
    """A trial in the making, before any aim."""
    settings = random_settings(random.Random(seed), adapter, "exact")
    settings = msgspec.structs.replace(settings, tensor_parallel_size=1)
    workload = random_workload(
        seed, vocab_size=64, block_size=settings.block_size, features=["shared_prefix"]
    )
    return Aimed(settings=settings, workload=workload)


def aimed(name: str) -> Iterator[Aimed]:
    adapter = EmbeddedAdapter()
    for seed in SEEDS:
        yield AIMS[name].apply(random.Random(f"{seed}/aim"), drawn(seed, adapter), adapter)


def run(trial: Aimed) -> TrialRecord:
    adapter = EmbeddedAdapter()
    urgent = any(request.priority for request in trial.workload.requests)
    settings = msgspec.structs.replace(
        trial.settings, scheduling_policy="priority" if urgent else "fcfs"
    )
    admission = adapter.admission_model(settings)
    least = KVBudget.solve(trial.workload, admission, "minimal").num_blocks
    settings = msgspec.structs.replace(settings, num_blocks=least + trial.num_spare_blocks)
    plan = PreemptionPlan(trial.actions).encode()
    return run_trial(
        Trial(engine="embedded", settings=settings, workload=trial.workload, plan=plan), adapter
    )


def steps_of(record: TrialRecord, kind: type) -> set[int]:
    return {event.step for event in record.events if type(event) is kind}


def test_followers_find_blocks_of_outputs() -> None:
    num_found = 0
    for trial in aimed("followers"):
        assert trial.settings.enable_prefix_caching
        record = run(trial)
        requests = trial.workload.requests
        for request in requests:
            cached = record.results[request.id].num_cached_tokens or 0
            # What it found is longer than the prompt whose continuation it is.
            num_found += any(
                request.prompt_token_ids[: other.num_prompt_tokens] == other.prompt_token_ids
                and cached > other.num_prompt_tokens
                for other in requests
                if other is not request and other.arrival_step < request.arrival_step
            )
    assert num_found > 5


def test_limits_are_met_within_runs_of_drafts() -> None:
    num_met = 0
    for trial in aimed("limits"):
        if trial.settings.speculative_config is None:
            continue
        record = run(trial)
        for request in trial.workload.requests:
            (output,) = record.results[request.id].outputs
            index = len(output.token_ids) - 1
            if output.finish_reason != "stop" or index != request.sampling.min_tokens:
                continue
            last, before = [
                event.step
                for event in reversed(record.events)
                if isinstance(event, TokensDelivered) and event.seq == f"{request.id}.0"
            ][:2]
            num_met += last == before
    assert num_met > 5


def test_long_outputs_are_lost_near_their_end() -> None:
    num_late = 0
    for trial in islice(aimed("long"), 12):
        prompts = {item.id: item.num_prompt_tokens for item in trial.workload.requests}
        num_late += any(
            event.num_tokens > prompts[event.request] + 40
            for event in run(trial).events
            if isinstance(event, Preempted)
        )
    assert num_late > 8


def test_ends_leave_blocks_while_steps_are_decided_ahead_with_drafts() -> None:
    num_poisoned = 0
    for trial in aimed("ends"):
        settings = trial.settings
        assert settings.async_scheduling in (1, 2)
        assert settings.max_num_batched_tokens >= 16
        if settings.speculative_config is not None:
            num_poisoned += bool(steps_of(run(trial), BlocksPoisoned))
    assert num_poisoned > 10


def test_want_is_of_one_or_two_and_lasts() -> None:
    for trial in aimed("want"):
        (squeeze,) = trial.actions
        assert isinstance(squeeze, Squeeze)
        assert squeeze.stop - squeeze.start >= 8
        assert len(trial.workload.requests) <= 2


def test_both_ways_in_one_step() -> None:
    num_both = 0
    for trial in aimed("both ways"):
        record = run(trial)
        num_both += bool(steps_of(record, SwappedIn) & steps_of(record, SwappedOut))
    assert num_both


def test_both_ways_changes_priorities_of_some_who_are_out() -> None:
    num_changed = 0
    for trial in aimed("both ways"):
        out: set[str] = set()
        for event in run(trial).events:
            if isinstance(event, SwappedOut):
                out.add(event.request)
            elif isinstance(event, SwappedIn):
                out.discard(event.request)
            num_changed += isinstance(event, PriorityChanged) and event.request in out
    assert num_changed > 3


def test_all_out_swaps_several_out_in_one_step_and_others_come_meanwhile() -> None:
    num_together = num_newcomers = 0
    for trial in aimed("all out"):
        record = run(trial)
        (action,) = trial.actions
        assert isinstance(action, PreemptAll)
        assert isinstance(action.at, Step)
        forced = [
            event
            for event in record.events
            if isinstance(event, Preempted) and event.reason == "forced"
        ]
        num_together += len(forced) > 1 and {"swap", "recompute"} == {item.mode for item in forced}
        num_newcomers += any(
            request.arrival_step >= action.at.number for request in trial.workload.requests
        )
    assert num_together > 3
    assert num_newcomers > 10


def test_own_drafts_are_right_while_blocks_are_copied_and_swapped() -> None:
    num_copied = num_swapped = 0
    for trial in aimed("own drafts"):
        record = run(trial)
        if drafts_for_itself(record.header):
            ledger = DraftLedger()
            for event in record.events:
                ledger.take(event)
            assert not ledger.wrong
            num_drafted = ledger.totals["num_accepted_tokens"]
            num_copied += bool(num_drafted and steps_of(record, BlocksCopied))
            num_swapped += bool(num_drafted and steps_of(record, SwappedIn))
    assert num_copied > 10
    assert num_swapped > 5


def test_drafts_are_under_way_when_their_request_is_swapped_out() -> None:
    num_under_way = 0
    for trial in aimed("under way"):
        if trial.settings.speculative_config is None:
            continue
        ledger = DraftLedger()
        for event in run(trial).events:
            if isinstance(event, Preempted) and event.mode == "swap":
                totals = ledger.totals
                settled = totals["num_accepted_tokens"] + totals["num_rejected_tokens"]
                num_under_way += totals["num_drafted_tokens"] > settled
            ledger.take(event)
    assert num_under_way > 5


def test_outputs_end_one_by_one_while_their_request_is_moved() -> None:
    num_apart = 0
    for trial in aimed("under way"):
        record = run(trial)
        moved = steps_of(record, SwappedOut)
        for request in trial.workload.requests:
            if request.sampling.n > 1 and request.sampling.stop_token_ids and moved:
                outputs = record.results[request.id].outputs
                num_apart += len({len(output.token_ids) for output in outputs}) > 1
    assert num_apart > 20


def test_urgent_ones_have_others_swapped_out_who_leave_some_that_grow() -> None:
    num_copied = 0
    for trial in aimed("urgent"):
        by_urgency = [
            event
            for event in run(trial).events
            if isinstance(event, Preempted) and event.reason == "priority"
        ]
        num_copied += any(event.mode == "swap" for event in by_urgency)
    assert num_copied > 10


def test_sharers_stand_behind_one_with_several_outputs_that_lacks_blocks() -> None:
    num_shared = num_short = 0
    for trial in aimed("sharers"):
        record = run(trial)
        assert trial.workload.requests[1].sampling.n > 1
        num_shared += any(
            isinstance(event, BlocksAllocated) and event.num_cached for event in record.events
        )
        num_short += any(
            isinstance(event, Preempted) and event.reason == "out_of_blocks"
            for event in record.events
        )
    assert num_shared > 20
    assert num_short > 10


def test_a_batch_that_comes_in_an_order_of_the_pools_draws_nothing_at_random() -> None:
    adapter, num_short = EmbeddedAdapter(), 0
    for seed in SEEDS:
        trial = drawn(seed, adapter)
        settings = msgspec.structs.replace(trial.settings, max_waiting_requests=1)
        trial = msgspec.structs.replace(trial, settings=settings)
        called = AIMS["calls"].apply(random.Random(f"{seed}/aim"), trial, adapter)
        if called.settings.max_waiting_requests is not None:
            num_short += 1
            assert not any(request.sampling.temperature for request in called.workload.requests)
    assert 5 < num_short < 30


def test_calls_have_victims_some_of_whom_are_given_up() -> None:
    num_given_up = num_in_short_queues = 0
    calls = set()
    for trial in aimed("calls"):
        calls.add(trial.settings.options["call"])
        record = run(trial)
        victims = {event.request for event in record.events if isinstance(event, Preempted)}
        given_up = {event.request for event in record.events if isinstance(event, Aborted)}
        num_given_up += bool(victims & given_up)
        num_in_short_queues += bool(victims and trial.settings.max_waiting_requests)
    assert calls == {"generate", "stream"}
    assert num_given_up > 5
    assert num_in_short_queues > 5


def test_some_lose_their_blocks_at_once_in_both_modes_while_others_take_some() -> None:
    num_both = num_takers = 0
    for trial in aimed("at once"):
        record = run(trial)
        modes: dict[int, set[str]] = {}
        for event in record.events:
            if isinstance(event, Preempted) and event.reason == "forced":
                modes.setdefault(event.step, set()).add(event.mode)
        both = {step for step, used in modes.items() if len(used) == 2}
        num_both += bool(both)
        num_takers += bool(both & steps_of(record, BlocksAllocated))
    assert num_both > 5
    assert num_takers > 3


def test_urgent_ones_come_with_the_text_of_those_below_who_have_little_else() -> None:
    num_evicted = num_waiting = num_shared = 0
    for trial in aimed("alike below"):
        record = run(trial)
        num_evicted += any(
            isinstance(event, Preempted) and event.reason == "priority" for event in record.events
        )
        first = {
            request.id: next(
                event
                for event in record.events
                if isinstance(event, BlocksAllocated) and event.seq == f"{request.id}.0"
            )
            for request in trial.workload.requests
        }
        arrivals = {request.id: request.arrival_step for request in trial.workload.requests}
        urgent = [item.id for item in trial.workload.requests if not item.priority][1:]
        num_waiting += any(first[name].step > arrivals[name] for name in urgent)
        num_shared += any(first[name].num_cached for name in urgent)
    assert num_evicted > 5
    assert num_waiting > 5
    assert num_shared > 20


def test_what_a_victim_gives_up_is_just_enough_while_somebody_stands_behind_it() -> None:
    num_exact = 0
    for trial in aimed("just enough"):
        record = run(trial)
        num_blocks = record.header.num_blocks
        full = {
            event.step
            for event in record.events
            if isinstance(event, PoolCounts) and event.used == num_blocks
        }
        short = {
            event.step
            for event in record.events
            if isinstance(event, Preempted) and event.reason == "out_of_blocks"
        }
        num_exact += bool(full & short)
    assert num_exact > 2


def test_who_stays_begins_blocks_while_the_victims_of_an_urgent_one_are_copied() -> None:
    num_meanwhile = 0
    for trial in aimed("meanwhile"):
        record = run(trial)
        copied = {
            event.step
            for event in record.events
            if isinstance(event, Preempted) and (event.reason, event.mode) == ("priority", "swap")
        }
        begun = {
            event.step
            for event in record.events
            if isinstance(event, BlocksAllocated) and not event.num_cached
        }
        num_meanwhile += bool(begun & {*copied, *(step + 1 for step in copied)})
    assert num_meanwhile > 2


def test_an_urgent_one_comes_with_a_text_that_somebody_took_into_other_blocks() -> None:
    num_returned = num_evicted = num_shared = 0
    for trial in aimed("cut off"):
        record = run(trial)
        newcomer = trial.workload.requests[-1]
        assert newcomer.priority == 0
        num_returned += any(step < newcomer.arrival_step for step in steps_of(record, SwappedIn))
        num_evicted += any(
            isinstance(event, Preempted) and event.reason == "priority" for event in record.events
        )
        num_shared += bool(record.results[newcomer.id].num_cached_tokens)
    assert num_returned > 20
    assert num_evicted > 3
    assert num_shared > 10


def test_some_lose_their_blocks_again_on_their_way_back() -> None:
    num_again = num_several = 0
    for trial in aimed("half back"):
        lost: dict[str, set[str]] = {}
        for event in run(trial).events:
            if isinstance(event, Preempted):
                modes = lost.setdefault(event.request, set())
                again = bool(modes) and event.phase.startswith(("prefill", "just_resumed"))
                modes.add(event.mode)
                num_again += again and len(modes) == 2
        num_several += any(request.sampling.n > 1 for request in trial.workload.requests)
    assert num_again > 5
    assert num_several > 20


@pytest.mark.parametrize("name", AIMS)
def test_an_aimed_trial_suits_the_engine(name: str) -> None:
    adapter = EmbeddedAdapter()
    for trial in aimed(name):
        assert protocol.refusal_of(adapter, trial.settings) is None
        ids = [request.id for request in trial.workload.requests]
        assert ids == [f"r{index}" for index in range(len(ids))]
        for request in trial.workload.requests:
            assert 0 <= request.sampling.min_tokens <= request.sampling.max_tokens


def test_what_an_engine_cannot_do_is_not_aimed_at() -> None:
    class Plain(EmbeddedAdapter):
        capabilities = frozenset({protocol.RECOMPUTE})

    trial = drawn(0, EmbeddedAdapter())
    assert aim(random.Random(0), trial, Plain()) == trial


def test_without_a_plan_there_are_no_actions() -> None:
    adapter = EmbeddedAdapter()
    planned = [aim(random.Random(seed), drawn(seed, adapter), adapter) for seed in SEEDS]
    assert any(trial.actions for trial in planned)
    for seed, trial in enumerate(planned):
        plain = aim(random.Random(seed), drawn(seed, adapter), adapter, planned=False)
        assert plain == msgspec.structs.replace(trial, actions=())


def test_settings_that_are_given_stay() -> None:
    adapter = EmbeddedAdapter()
    settings = EngineSettings(model="exact", num_blocks=1, block_size=8)
    for seed in SEEDS:
        trial = random_trial(seed, adapter, model="exact", settings=settings)
        assert trial.settings.block_size == 8
        assert trial.settings.async_scheduling == 0
        assert trial.settings.speculative_config is None


def test_old_content_is_reset_while_its_owner_goes_on() -> None:
    num_swapped = num_shared = 0
    for trial in aimed("old content"):
        assert trial.settings.enable_prefix_caching
        record = run(trial)
        (reset,) = steps_of(record, CacheReset)
        lives = [event for event in record.events if isinstance(event, Finished)]
        num_swapped += any(step >= reset for step in steps_of(record, SwappedIn))
        num_shared += any(
            request.arrival_step >= reset
            and request.prompt_token_ids[:1] == trial.workload.requests[0].prompt_token_ids[:1]
            for request in trial.workload.requests[1:]
        )
        assert lives
    assert num_swapped >= len(SEEDS) // 5
    assert num_shared >= len(SEEDS) // 2


def test_readers_of_one_text_lose_their_blocks_in_its_middle() -> None:
    num_cut = num_rows = 0
    for trial in aimed("same text"):
        record = run(trial)
        num_cut += any(
            isinstance(event, Preempted) and event.phase.startswith("prefill")
            for event in record.events
        )
        num_rows += any(
            request.sampling.prompt_logprobs is not None for request in trial.workload.requests
        )
    assert num_cut >= len(SEEDS) // 3
    assert num_rows >= len(SEEDS) // 3


def test_those_who_begin_alike_share_and_evict_each_other() -> None:
    num_shared = num_evicted = 0
    for trial in aimed("begun alike"):
        record = run(trial)
        victims = {event.request for event in record.events if isinstance(event, Preempted)}
        num_evicted += bool(victims)
        num_shared += any(
            isinstance(event, BlocksAllocated) and event.num_cached for event in record.events
        )
    assert num_shared >= len(SEEDS) // 2
    assert num_evicted >= len(SEEDS) // 3


def test_a_crowd_grows_in_a_pool_for_some_and_some_are_given_up() -> None:
    num_beside = num_aborted = 0
    for trial in aimed("crowd"):
        record = run(trial)
        assert len(trial.workload.requests) >= 5
        by_need = [event for event in record.events if isinstance(event, Preempted)]
        num_beside += len({event.request for event in by_need}) >= 2
        num_aborted += any(isinstance(event, Aborted) for event in record.events)
    assert num_beside >= len(SEEDS) // 3
    assert num_aborted >= len(SEEDS) // 3
