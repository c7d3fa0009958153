"""Drafts: tokens computed ahead, accepted or rejected, of requests that are preempted.

The baseline drafts nothing and has room, so every comparison is with plain, unpreempted output.
"""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.budget import KVBudget
from preempt_harness.checks.drafts import ACCEPTED, DRAFTED, REJECTED, DraftLedger
from preempt_harness.harness import PreemptHarness
from preempt_harness.result import TrialResult
from preempt_harness.suite._state import assert_stopped, find_stop, state
from preempt_harness.suite.shapes import (
    block_size,
    companions,
    options,
    request,
    require_mode,
    together,
)

pytestmark = pytest.mark.preempt_requires("speculation")

FORCED = pytest.mark.preempt_requires("preempt", "stepped")
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def drafts(method: str, count: int = 3, **more: Any) -> dict[str, Any]:
    """A speculative configuration."""
    return {"method": method, "num_speculative_tokens": count, **more}


def scripted(preempt: PreemptHarness, rate: float, count: int = 3) -> dict[str, Any]:
    """Drafts of which this share is right, which only the exact model's can be told to be.

    Others are drafted for by themselves where all are to be right, else by a weaker model.
    """
    if preempt.settings().model == "exact":
        return drafts("scripted", count, acceptance_rate=rate)
    return same_model(preempt, count) if rate == 1.0 else weaker_model(preempt, count)


def same_model(preempt: PreemptHarness, count: int = 3) -> dict[str, Any]:
    """The target drafts for itself: every draft is right, if both caches are."""
    return drafts("draft_model", count, model=preempt.settings().model)


def weaker_model(preempt: PreemptHarness, count: int = 3) -> dict[str, Any]:
    """The target without its upper layers, or with a share of its choices changed."""
    exact = preempt.settings().model == "exact"
    weaker = {"acceptance_rate": 0.7} if exact else {"num_hidden_layers": 1}
    return {**same_model(preempt, count), **weaker}


def totals(result: TrialResult) -> dict[str, int]:
    """Drafts computed, accepted and rejected, as the record shows them."""
    ledger = DraftLedger()
    for event in result.record.events:
        ledger.take(event)
    return {name: ledger.totals[name] for name in (DRAFTED, ACCEPTED, REJECTED)}


def assert_drafted(result: TrialResult, *names: str) -> None:
    """Drafts of each of these kinds were seen; without them the trial shows nothing.

    How many a weaker model gets right is its own business: there it is enough that it drafts.
    """
    seen = totals(result)
    if result.record.header.model != "exact":
        names = (DRAFTED,)
    lacking = [name for name in names if not seen[name]]
    if lacking:
        pytest.fail(f"VACUOUS: no {', '.join(lacking)} in a trial of drafts: {seen}")


def require_company(preempt: PreemptHarness, speculative: dict[str, Any], budget: int) -> None:
    """Skip where one request and its drafts fill a step: then requests run one after another."""
    settings = preempt.settings(speculative_config=speculative)
    admission = preempt.adapter.admission_model(settings)
    if admission.drafts_first and budget <= admission.draft_tokens + 1:
        pytest.skip(f"engine {preempt.adapter.name} fills a step of {budget} with one's drafts")


def repetitive(preempt: PreemptHarness, name: str, length: int, max_tokens: int) -> Any:
    """A request whose prompt repeats a short phrase, for drafts by lookup."""
    phrase = preempt.prompts.take(3)
    prompt = (phrase * length)[:length]
    return request(preempt, name, prompt, max_tokens)


@MODES
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_tight_pool(preempt: PreemptHarness, prefix_caching: bool, rate: float, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 8 * block) for i in range(4)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        enable_prefix_caching=prefix_caching,
        speculative_config=scripted(preempt, rate),
        options=options(preempt, preemption_mode=mode),
    )
    result.assert_preempted(mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
    kinds = {0.0: (REJECTED,), 0.6: (ACCEPTED, REJECTED), 1.0: (ACCEPTED,)}
    assert_drafted(result, *kinds[rate])


@FORCED
@MODES
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize("at", ["out=1", "out=2", "out=9", "resume=1"])
def test_preempted_with_drafts_pending(
    preempt: PreemptHarness, at: str, rate: float, mode: str
) -> None:
    """What was drafted for a request dies with its blocks; what was accepted stays."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 3 * block + 1, 6 * block), companions(preempt, block)
    )
    plan = f"preempt:victim@{at}:{mode}"
    if at == "resume=1":
        plan = f"preempt:victim@out=4:{mode}/{plan}"
    result = preempt.run(
        workload, plan=plan, block_size=block, speculative_config=scripted(preempt, rate)
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])
    assert_drafted(result, DRAFTED)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_drafts_over_block_boundaries(preempt: PreemptHarness, count: int, size: int) -> None:
    sizes = preempt.adapter.block_sizes
    if sizes and size not in sizes:
        pytest.skip(f"engine {preempt.adapter.name} has no blocks of {size}")
    workload = together([request(preempt, f"r{i}", 9 + 5 * i, 40) for i in range(3)])
    result = preempt.run(
        workload, "tight", block_size=size, speculative_config=scripted(preempt, 0.7, count)
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, ACCEPTED, REJECTED)


@FORCED
@pytest.mark.preempt_requires("prefix_caching")
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_later_request_with_the_victims_text(preempt: PreemptHarness, rate: float) -> None:
    """A block that held rejected drafts may be found only with what the sequence really is."""
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block)
    probe = preempt.run(
        together(request(preempt, "probe", prompt, 8 * block)),
        plan="preempt:probe@out=1",
        block_size=block,
    )
    probe.assert_matches_baseline()
    text = prompt + probe.record.results["probe"].outputs[0].token_ids
    workload = together(
        request(preempt, "victim", list(prompt), 8 * block),
        companions(preempt, block),
        request(preempt, "sharer", text[: 7 * block], 2 * block, arrival_step=3 * block + 2),
        request(preempt, "second", text[: 9 * block], 2 * block, arrival_step=6 * block),
    )
    # At 3 blocks of output the latest token ends a block, and is not computed yet.
    result = preempt.run(
        workload,
        plan=f"preempt:victim@out={3 * block}/preempt:victim@out={4 * block + 1}",
        block_size=block,
        speculative_config=scripted(preempt, rate),
        options=options(preempt, block_reuse_order="lifo"),
    )
    result.assert_preempted(request="victim", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])
    assert_drafted(result, REJECTED)


@FORCED
@MODES
@pytest.mark.preempt_requires("parallel_sampling", "sampling")
def test_several_outputs(preempt: PreemptHarness, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 6 * block, n=3, temperature=1.0, seed=5),
        companions(preempt, block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@out=3:{mode}/preempt:victim@out=11:{mode}",
        block_size=block,
        speculative_config=scripted(preempt, 0.7),
    )
    result.assert_preempted(request="victim", mode=mode, at_least=2)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])
    assert_drafted(result, ACCEPTED, REJECTED)


@FORCED
@MODES
@pytest.mark.parametrize("item", ["seed", "penalties", "logprobs", "min-tokens", "processor"])
def test_state_within_an_accepted_run(preempt: PreemptHarness, item: str, mode: str) -> None:
    """Each token of a run is chosen with the state after the tokens before it."""
    sampling = state(preempt, item)
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, 8 * block, **sampling) for i in range(8)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt:r0@out=1:{mode}/preempt:r1@out=4:{mode}/preempt-all@step=9:{mode}",
        block_size=block,
        speculative_config=scripted(preempt, 0.8),
    )
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, DRAFTED)


@FORCED
@MODES
@pytest.mark.preempt_requires("stop_tokens")
@pytest.mark.parametrize("rate", [0.8, 1.0], ids=["some", "all"])
def test_a_stop_token_within_a_run_after_a_preemption(
    preempt: PreemptHarness, rate: float, mode: str
) -> None:
    """What was drafted behind the stop is not given, though it was right."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    # Stops at several distances, so that some come within a run and not at its end.
    stops = [find_stop(preempt, 2 * block + i, 2 * block + i) for i in range(4)]
    workload = together(
        [
            request(preempt, f"r{i}", stop.prompt, 8 * block, stop_token_ids=(stop.token_id,))
            for i, stop in enumerate(stops)
        ]
    )
    result = preempt.run(
        workload,
        plan="/".join(f"preempt:r{i}@out={1 + i}:{mode}" for i in range(4)),
        block_size=block,
        speculative_config=scripted(preempt, rate),
    )
    for i, stop in enumerate(stops):
        result.assert_preempted(request=f"r{i}", mode=mode)
        assert_stopped(result, f"r{i}", stop.index + 1)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, ACCEPTED)


@pytest.mark.preempt_requires("chunked_prefill")
@pytest.mark.parametrize("budget", [3, 6, 12])
def test_little_token_budget(preempt: PreemptHarness, budget: int) -> None:
    """Prompts in chunks, known tokens and drafts share a step's budget."""
    speculative = scripted(preempt, 0.7)
    require_company(preempt, speculative, budget)
    block = block_size(preempt)
    workload = together(
        request(preempt, "r0", 2 * block, 6 * block),
        request(preempt, "r1", 7 * block + 1, 4 * block),
        request(preempt, "r2", 5 * block, 6 * block, arrival_step=2 * block),
    )
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        max_num_batched_tokens=budget,
        speculative_config=speculative,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, DRAFTED)


@pytest.mark.preempt_requires("tensor_parallel")
@MODES
def test_drafts_reach_every_rank(preempt: PreemptHarness, mode: str) -> None:
    if preempt.settings().model == "smollm2":
        pytest.skip("the heads of smollm2 cannot be divided by 2 ranks")
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together([repetitive(preempt, f"r{i}", 3 * block + i, 6 * block) for i in range(3)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        tensor_parallel_size=2,
        speculative_config=scripted(preempt, 0.7),
        options=options(preempt, preemption_mode=mode, debug_worker_state=True),
    )
    result.assert_preempted(mode=mode)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "work"])
    assert_drafted(result, DRAFTED)


@FORCED
@pytest.mark.preempt_requires("abort")
def test_aborted_with_drafts_pending(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block)
    workload = together(
        request(preempt, "victim", prompt, 8 * block),
        companions(preempt, block),
        request(preempt, "sharer", list(prompt), 4 * block, arrival_step=7),
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@out=3/abort:victim@out=7",
        block_size=block,
        speculative_config=scripted(preempt, 0.6),
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "n": 2}], ids=["greedy", "n=2"])
def test_the_draft_models_cache_comes_back_with_the_targets(
    preempt: PreemptHarness, sampling: dict[str, Any], prefix_caching: bool, mode: str
) -> None:
    """A model that drafts for itself is right every time, unless its cache lost or mixed blocks."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, 6 * block, **sampling) for i in range(4)]
    )
    result = preempt.run(
        workload,
        # Two branches share 2 blocks and grow by 7 each: room for one request, not for two.
        20 if sampling else "tight",
        block_size=block,
        enable_prefix_caching=prefix_caching,
        speculative_config=same_model(preempt),
        options=options(preempt, preemption_mode=mode, poison=True),
    )
    result.assert_preempted(mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, ACCEPTED)
    rejected = totals(result)[REJECTED]
    if result.record.header.batch_invariant and rejected:
        pytest.fail(f"{rejected} drafts of the target's own model were rejected")


@FORCED
@MODES
@pytest.mark.parametrize("at", ["chunk=1", "out=1", "out=7", "resume=1"])
def test_a_weaker_draft_model(preempt: PreemptHarness, at: str, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 5 * block + 1, 6 * block), companions(preempt, block)
    )
    plan = f"preempt:victim@{at}:{mode}"
    if at == "resume=1":
        plan = f"preempt:victim@out=4:{mode}/{plan}"
    result = preempt.run(
        workload,
        plan=plan,
        block_size=block,
        max_num_batched_tokens=3 * block,
        speculative_config=weaker_model(preempt),
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, DRAFTED, REJECTED)


# The case of the public discussion: blocks of 8, a batch of 4, 256 outputs each, and a pool for one
# of them, 2 + 256 / 8 blocks.
OUTPUTS, BATCH, SIZE = 256, 4, 8
DRAFTERS = ("ngram", "scripted", "model")


@pytest.mark.parametrize("blocks", ["solved", "2+256/8"])
@pytest.mark.parametrize("token_budget", [2048, BATCH, BATCH + 1])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_batch_of_four_with_256_outputs(
    preempt: PreemptHarness, drafter: str, token_budget: int, blocks: str
) -> None:
    """Equal to plain greedy output. With a token budget of 4 there is room for drafts only while
    fewer than four run."""
    speculative = {
        "ngram": drafts("ngram"),
        "scripted": scripted(preempt, 0.7),
        "model": weaker_model(preempt),
    }[drafter]
    require_company(preempt, speculative, token_budget)
    workload = together([repetitive(preempt, f"r{i}", 10 + 2 * i, OUTPUTS) for i in range(BATCH)])
    settings = preempt.settings(
        block_size=SIZE,
        max_num_seqs=BATCH,
        max_num_batched_tokens=token_budget,
        speculative_config=speculative,
    )
    admission = preempt.adapter.admission_model(settings)
    # What the engine keeps for itself and for its drafts comes on top.
    more = admission.reserved_blocks + admission.blocks_for(admission.lookahead_tokens)
    wanted = "tight" if blocks == "solved" else 2 + OUTPUTS // SIZE + more
    tight = KVBudget.solve(workload, admission, wanted)
    if tight.verdict == "infeasible":
        pytest.fail(tight.explain())
    result = preempt.run(
        workload,
        tight,
        block_size=SIZE,
        max_num_seqs=BATCH,
        max_num_batched_tokens=token_budget,
        speculative_config=speculative,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, DRAFTED, ACCEPTED, REJECTED)


@FORCED
@MODES
@pytest.mark.preempt_requires("mixed_steps")
@pytest.mark.parametrize("at", ["out=1", "out=4"])
def test_drafts_leave_room_for_who_comes_back(preempt: PreemptHarness, at: str, mode: str) -> None:
    """Drafts of the others could fill every step; the victim waits for one step and no longer."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    speculative = scripted(preempt, 1.0, 5)
    require_company(preempt, speculative, 10)
    workload = together(
        companions(preempt, block, count=3), request(preempt, "victim", block + 1, 4 * block)
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@{at}:{mode}",
        block_size=block,
        max_num_batched_tokens=10,
        speculative_config=speculative,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, ACCEPTED)
