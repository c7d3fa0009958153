"""Steps decided ahead: requests are preempted, stopped and aborted with outputs under way.

The baseline decides nothing ahead and has room.
"""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite._state import state
from preempt_harness.suite.shapes import (
    block_size,
    companions,
    options,
    request,
    require_mode,
    together,
)
from preempt_harness.workload import BeamSpec, Operation, Workload

pytestmark = pytest.mark.preempt_requires("async_scheduling")

FORCED = pytest.mark.preempt_requires("preempt", "stepped")
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
@MODES
@pytest.mark.parametrize("chunk_blocks", [1, 64], ids=["chunk-1", "whole"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_tight_pool(
    preempt: PreemptHarness, prefix_caching: bool, chunk_blocks: int, mode: str, depth: int
) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 7 * block) for i in range(4)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        max_num_batched_tokens=max(chunk_blocks * block, 4),
        enable_prefix_caching=prefix_caching,
        async_scheduling=depth,
        options=options(preempt, preemption_mode=mode, block_reuse_order="lifo", poison=True),
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


@FORCED
@DEPTHS
@MODES
@pytest.mark.parametrize("at", ["chunk=1", "out=1", "out=2", "out=9", "resume=1"])
def test_preempted_with_an_output_under_way(
    preempt: PreemptHarness, at: str, mode: str, depth: int
) -> None:
    """Every token comes once: what is under way is used, or computed again and the same."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    more = {"logprobs": 1} if "logprobs" in preempt.adapter.capabilities else {}
    workload = together(
        request(preempt, "victim", 4 * block + 1, 5 * block, **more),
        companions(preempt, block),
    )
    plan = f"preempt:victim@{at}:{mode}"
    if at == "resume=1":
        plan = f"preempt:victim@out=4:{mode}/{plan}"
    result = preempt.run(
        workload,
        plan=plan,
        block_size=block,
        max_num_batched_tokens=2 * block,
        async_scheduling=depth,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


@FORCED
@DEPTHS
@MODES
def test_preempted_again_and_again(preempt: PreemptHarness, mode: str, depth: int) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", block + i, 5 * block) for i in range(3)])
    result = preempt.run(
        workload,
        plan=f"preempt-all@step=3:{mode}/preempt-all@step=5:{mode}/preempt:r0@step=8:{mode}",
        block_size=block,
        async_scheduling=depth,
    )
    result.assert_preempted(at_least=3)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


ENDS: dict[str, dict[str, Any]] = {
    "stop-tokens": {"stop_token_ids": tuple(range(4, 12))},
    "min-tokens": {"min_tokens": 7, "stop_token_ids": tuple(range(4, 40))},
    "one-token": {"max_tokens": 1},
    "two-tokens": {"max_tokens": 2},
}


@DEPTHS
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_where_it_should(preempt: PreemptHarness, end: str, depth: int) -> None:
    """Steps decided ahead of a stop give nothing more."""
    block = block_size(preempt)
    sampling = {"max_tokens": 6 * block, **ENDS[end]}
    length = sampling.pop("max_tokens")
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, length, **sampling) for i in range(6)],
        request(preempt, "long", 3 * block, 9 * block),
        request(preempt, "late", 3 * block, 4 * block, arrival_step=4),
    )
    result = preempt.run(
        workload,
        14,
        block_size=block,
        async_scheduling=depth,
        expect_preemption=False,
        options=options(preempt, block_reuse_order="lifo", poison=True),
    )
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


@FORCED
@DEPTHS
@MODES
@pytest.mark.parametrize(
    "item", ["seed", "several", "penalties", "prompt-logprobs", "processor", "logit-bias"]
)
def test_state(preempt: PreemptHarness, item: str, mode: str, depth: int) -> None:
    sampling = state(preempt, item)
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, 5 * block, **sampling) for i in range(3)]
    )
    result = preempt.run(
        workload,
        plan=f"preempt:r0@step=2:{mode}/preempt:r1@step=5:{mode}/preempt-all@step=9:{mode}",
        block_size=block,
        async_scheduling=depth,
    )
    result.assert_preempted(at_least=3)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


@FORCED
@DEPTHS
@pytest.mark.preempt_requires("abort")
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside-others"])
def test_aborted_with_an_output_under_way(preempt: PreemptHarness, alone: bool, depth: int) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block)
    others = [] if alone else companions(preempt, block)
    if not alone:
        others.append(request(preempt, "sharer", list(prompt), 4 * block, arrival_step=7))
    workload = together(request(preempt, "victim", prompt, 6 * block), others)
    result = preempt.run(
        workload,
        plan="preempt:victim@out=3/abort:victim@out=7",
        block_size=block,
        async_scheduling=depth,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@DEPTHS
@pytest.mark.preempt_requires("abort")
def test_aborted_while_others_end(preempt: PreemptHarness, depth: int) -> None:
    """Whichever steps are under way then, one of the others ends in each, and is told so."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block, 8 * block),
        [request(preempt, f"ends{i}", block + i, 3 + i) for i in range(8)],
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@out=2/abort:victim@out=5",
        block_size=block,
        async_scheduling=depth,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@DEPTHS
@pytest.mark.preempt_requires("hold_blocks")
def test_squeezed_pool(preempt: PreemptHarness, depth: int) -> None:
    """Alone in a pool without a free block: it must get on, token by token."""
    block = block_size(preempt)
    for count in (1, 3):
        workload = together(
            [request(preempt, f"r{i}", 2 * block + i, 5 * block) for i in range(count)]
        )
        result = preempt.run(
            workload,
            plan=f"squeeze:all@1..{3 * block}",
            block_size=block,
            async_scheduling=depth,
        )
        result.assert_preempted()
        result.assert_matches_baseline()
        result.assert_clean()


@DEPTHS
@pytest.mark.preempt_requires("reset_running_requests")
def test_reset_with_outputs_under_way(preempt: PreemptHarness, depth: int) -> None:
    block = block_size(preempt)
    workload = Workload(
        requests=[request(preempt, f"r{i}", 3 * block + i, 4 * block) for i in range(3)],
        operations=[Operation(kind="reset_running_requests", step=step) for step in (5, 6, 9)],
    )
    result = preempt.run(workload, "roomy", block_size=block, async_scheduling=depth)
    result.assert_preempted(at_least=3)
    result.assert_clean()


@DEPTHS
@pytest.mark.preempt_requires("tensor_parallel")
def test_ranks_compute_while_the_next_step_is_decided(preempt: PreemptHarness, depth: int) -> None:
    if preempt.settings().model == "smollm2":
        pytest.skip("the heads of smollm2 cannot be divided by 2 ranks")
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 6 * block) for i in range(3)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        tensor_parallel_size=2,
        async_scheduling=depth,
        options=options(preempt, debug_worker_state=True),
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "work"])


@FORCED
@DEPTHS
@MODES
@pytest.mark.preempt_requires("beam_search", "chunked_prefill")
@pytest.mark.parametrize("budget", [2, 3])
def test_beams_of_which_some_wait_for_the_others(
    preempt: PreemptHarness, budget: int, mode: str, depth: int
) -> None:
    """A step has not room for all beams: those that are computed wait, the others need blocks."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{index}", block + index, 3 * block, beam=BeamSpec(num_beams=3))
            for index in range(2)
        ]
    )
    result = preempt.run(
        workload,
        14,
        plan=f"preempt:r0@step={3 * block}:{mode}/preempt:r1@step={5 * block + 1}:{mode}",
        block_size=block,
        max_num_batched_tokens=budget,
        async_scheduling=depth,
        options=options(preempt, preemption_mode=mode),
    )
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@DEPTHS
@MODES
@pytest.mark.preempt_requires("beam_search")
def test_beams_lost_while_they_are_under_way(
    preempt: PreemptHarness, mode: str, depth: int
) -> None:
    """They split when the step is done, which takes blocks, if their blocks are there."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    steps = range(1, 3 * block, 3)
    workload = together(
        request(preempt, "victim", 2 * block, 3 * block, beam=BeamSpec(num_beams=3)),
        companions(preempt, block),
    )
    result = preempt.run(
        workload,
        plan="/".join(f"preempt:victim@step={step}:{mode}" for step in steps),
        block_size=block,
        async_scheduling=depth,
        options=options(preempt, preemption_mode=mode),
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@DEPTHS
@pytest.mark.preempt_requires("prefix_caching", "preempt", "stepped")
@pytest.mark.parametrize("end", ["length", "abort"])
def test_the_next_begins_as_the_one_that_has_just_ended(
    preempt: PreemptHarness, end: str, depth: int
) -> None:
    """One place is left: the next comes while the blocks of the one before wait for a step."""
    if end == "abort" and "abort" not in preempt.adapter.capabilities:
        pytest.skip(f"engine {preempt.adapter.name} lacks abort")
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block)
    workload = together(
        request(preempt, "long", block, 16 * block),
        [request(preempt, f"r{i}", [*prompt, prompt[i]], 3 * block + i) for i in range(4)],
    )
    ends = "/abort:r0@out=9/abort:r2@out=7" if end == "abort" else ""
    result = preempt.run(
        workload,
        plan=f"preempt:r1@out=8{ends}",
        block_size=block,
        max_num_seqs=2,
        enable_prefix_caching=True,
        async_scheduling=depth,
    )
    result.assert_preempted(request="r1")
    result.assert_matches_baseline()
    result.assert_clean()


@DEPTHS
@pytest.mark.preempt_requires("prefix_caching", "preempt", "stepped")
def test_the_end_of_a_text_makes_room_first(preempt: PreemptHarness, depth: int) -> None:
    """Others take some of what the first leaves in the cache; its beginning is found after that."""
    block = block_size(preempt)
    text = preempt.prompts.take(4 * block)
    workload = together(
        request(preempt, "first", [*text, text[0]], 2 * block),
        request(preempt, "long", block, 5 * block),
        request(preempt, "filler", 6 * block, 2 * block, arrival_step=2 * block + 4),
        request(preempt, "later", text[: 2 * block + 1], block, arrival_step=3 * block + 4),
    )
    result = preempt.run(
        workload,
        14,
        plan="preempt:later@out=1",
        block_size=block,
        enable_prefix_caching=True,
        async_scheduling=depth,
    )
    result.assert_preempted(request="later")
    result.assert_matches_baseline()
    result.assert_clean()


@FORCED
@DEPTHS
@MODES
@pytest.mark.preempt_requires("parallel_sampling", "sampling", "stop_tokens")
@pytest.mark.parametrize("step", [2, 3, 4])
def test_some_outputs_end_while_all_are_out(
    preempt: PreemptHarness, step: int, mode: str, depth: int
) -> None:
    """The tokens under way end some of them; those that are left come back without them."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    half = tuple(range(4, 4 + (preempt.vocab_size - 4) // 3))
    workload = together(
        [
            request(
                preempt,
                f"r{i}",
                block + 1 + i,
                3 * block,
                n=3,
                temperature=1.0,
                seed=i + 1,
                stop_token_ids=half,
            )
            for i in range(4)
        ]
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@step={step}:{mode}/preempt-all@step={step + 3}:{mode}",
        block_size=block,
        async_scheduling=depth,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
