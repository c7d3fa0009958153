"""Requests of several sequences, several outputs (n) and beams: the request is the unit."""

from __future__ import annotations

import pytest

from preempt_harness.adapters.protocol import DerivesBranches
from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import (
    block_size,
    companions,
    drawn,
    options,
    request,
    require_mode,
    together,
)
from preempt_harness.workload import BeamSpec

PARALLEL = pytest.mark.preempt_requires("parallel_sampling", "preempt", "stepped")
BEAMS = pytest.mark.preempt_requires("beam_search", "preempt", "stepped")
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])
OFFSETS = pytest.mark.parametrize("offset", [-1, 0, 1], ids=["minus-1", "exact", "plus-1"])


@PARALLEL
@MODES
@OFFSETS
@pytest.mark.parametrize("n", [2, 3])
def test_outputs_that_share_a_prompt(
    preempt: PreemptHarness, n: int, offset: int, mode: str
) -> None:
    """The last block of the prompt is shared until a branch writes to it, unless it is full."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + offset, 3 * block, n=n, **drawn(preempt, n + 1)),
        companions(preempt, block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={block + 1}:{mode}/preempt:victim@step={2 * block + 2}:{mode}",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode, at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@MODES
def test_outputs_equal_those_of_requests_of_their_own(preempt: PreemptHarness, mode: str) -> None:
    """Forks and copies on write happen with room as well; only runs without branches can tell."""
    require_mode(preempt, mode)
    if not isinstance(preempt.adapter, DerivesBranches):
        pytest.skip(f"engine {preempt.adapter.name} has no rule for a branch alone")
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 3 * block, n=3, temperature=1.0, seed=8),
        companions(preempt, block, count=1),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={block + 1}:{mode}",
        block_size=block,
        baseline="solo",
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@pytest.mark.preempt_requires("chunked_prefill", "recompute", "sampling")
@OFFSETS
def test_a_chunk_ends_beside_what_branches_share(preempt: PreemptHarness, offset: int) -> None:
    """Who waits for the shared blocks goes on when the last of their tokens is computed."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 4 * block + 1, 2 * block, n=3, temperature=1.0, seed=3)
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@step=4:recompute",
        block_size=block,
        max_num_batched_tokens=4 * block + offset,
        enable_prefix_caching=False,
    )
    result.assert_preempted(request="victim", mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@MODES
@OFFSETS
def test_outputs_that_are_all_the_same(preempt: PreemptHarness, offset: int, mode: str) -> None:
    """Nothing is drawn: even the last block, of which each wants its next token, has equals."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + 1, 3 * block, n=3),
        companions(preempt, block, count=1),
    )
    step = 2 * block - 1 + offset
    result = preempt.run(workload, plan=f"preempt:victim@step={step}:{mode}", block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@MODES
@pytest.mark.preempt_requires("sampling", "stop_tokens")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_others_take_the_places_of_branches_that_ended(
    preempt: PreemptHarness, seed: int, mode: str
) -> None:
    """Some end soon after the preemption, some late or at their full length."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    stops = tuple(range(4, 7))
    workload = together(
        request(
            preempt,
            "victim",
            2 * block + 1,
            8 * block,
            n=3,
            temperature=1.0,
            seed=seed,
            stop_token_ids=stops,
        ),
        [request(preempt, f"next{index}", block + index, 4 * block) for index in range(4)],
    )
    result = preempt.run(
        workload, plan=f"preempt:victim@step=2:{mode}", block_size=block, max_num_seqs=3
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@pytest.mark.preempt_requires("chunked_prefill", "recompute", "sampling")
@pytest.mark.parametrize("chunk", [3, 5])
def test_outputs_that_return_in_chunks(preempt: PreemptHarness, chunk: int) -> None:
    """What branches share is computed by one of them, in several steps; the others wait for it."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 3 * block + 1, 2 * block, n=3, temperature=1.0, seed=2)
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@step=8:recompute",
        block_size=block,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
    )
    result.assert_preempted(request="victim", mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@pytest.mark.preempt_requires("chunked_prefill", "recompute", "swap", "sampling")
@pytest.mark.parametrize("n", [2, 3])
def test_outputs_swapped_out_while_one_computes_for_the_others(
    preempt: PreemptHarness, n: int
) -> None:
    """They come back in chunks, the first computes what all begin with, and all go once more."""
    block = block_size(preempt)
    victim = request(preempt, "victim", 4 * block + 1, 3 * block, n=n, **drawn(preempt, 5))
    result = preempt.run(
        together(victim, companions(preempt, block, count=1)),
        plan="preempt:victim@out=2:recompute/preempt:victim@resume=1:swap",
        block_size=block,
        max_num_batched_tokens=block + 1,
        enable_prefix_caching=False,
    )
    result.assert_preempted(request="victim", mode="recompute")
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@pytest.mark.preempt_requires("sampling")
def test_no_more_sequences_than_may_run(preempt: PreemptHarness) -> None:
    """Every branch counts."""
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{i}", 2 * block, 3 * block, n=2, temperature=1.0, seed=i)
            for i in range(3)
        ]
    )
    result = preempt.run(workload, plan="preempt:r0@step=3", block_size=block, max_num_seqs=3)
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("chunked_prefill", "parallel_sampling", "sampling")
def test_a_prompt_that_is_to_split_has_the_places_of_its_outputs(preempt: PreemptHarness) -> None:
    """Another comes while the last chunk of a prompt is computed, and finds no place."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "splits", 2 * block + 1, 2 * block, n=3, **drawn(preempt, 6)),
        request(preempt, "other", block, 2 * block),
    )
    result = preempt.run(
        workload,
        "roomy",
        block_size=block,
        max_num_batched_tokens=2 * block,
        max_num_seqs=3,
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@pytest.mark.preempt_requires("swap", "sampling")
def test_no_return_without_room_for_copies(preempt: PreemptHarness) -> None:
    """Swapped out in its first decode: all branches still share a block that each must copy."""
    block = block_size(preempt)
    workload = together(
        request(preempt, "other", 2 * block, 2 * block),
        request(preempt, "victim", block + 2, 2, n=3, temperature=1.0, seed=4),
    )
    result = preempt.run(workload, 6, block_size=block, options={"preemption_mode": "swap"})
    result.assert_preempted(request="victim", mode="swap")
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@MODES
@pytest.mark.preempt_requires("stop_tokens", "min_tokens")
def test_outputs_of_unequal_length(preempt: PreemptHarness, mode: str) -> None:
    """Branches end at different times; those that are left come back without the others."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    stops = tuple(range(4, max(6, preempt.vocab_size // 8)))
    workload = together(
        request(
            preempt,
            "victim",
            2 * block + 1,
            6 * block,
            n=3,
            **drawn(preempt, 5),
            stop_token_ids=stops,
            min_tokens=2,
        ),
        companions(preempt, block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step=2:{mode}/preempt:victim@step=6:{mode}",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@MODES
def test_several_requests_of_several_outputs_in_a_small_pool(
    preempt: PreemptHarness, mode: str
) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{i}", block + i, 4 * block, n=2, **drawn(preempt, i))
            for i in range(3)
        ]
    )
    # Alone a request needs at most 11 blocks; three of them need 30.
    result = preempt.run(
        workload,
        16,
        block_size=block,
        options=options(preempt, preemption_mode=mode),
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@MODES
@pytest.mark.preempt_requires("abort", "sampling", "stop_tokens", "min_tokens")
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "running"])
def test_aborted_when_some_outputs_have_ended(
    preempt: PreemptHarness, waits: bool, mode: str
) -> None:
    """Those keep their ends; the others are aborted."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    stops = tuple(range(4, max(6, preempt.vocab_size // 8)))
    victim = request(
        preempt,
        "victim",
        2 * block + 1,
        12 * block,
        n=4,
        **drawn(preempt, 5),
        stop_token_ids=stops,
        min_tokens=2,
    )
    plan = f"preempt:victim@step=2:{mode}/squeeze:all@{3 * block}..{4 * block}"
    if waits:
        plan += f"/preempt:victim@step={3 * block}:{mode}"
    result = preempt.run(
        together(victim, companions(preempt, block, count=1)),
        plan=f"{plan}/abort:victim@step={3 * block + 1}",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@PARALLEL
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("budget", "offset"),
    [(budget, offset) for budget in ("tight", "exact") for offset in (-1, 0, 1)]
    + [("minimal", -1), ("minimal", 0)],
)
def test_outputs_share_a_prompt_in_a_pool_that_was_solved_for(
    preempt: PreemptHarness, budget: str, offset: int, n: int
) -> None:
    """What an output writes next may be shared, its own, or a block that it has yet to get; in the
    exact pool there is not one more than all of them need."""
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{i}", 2 * block + offset, block + 2, n=n, **drawn(preempt, i))
            for i in range(3)
        ]
    )
    scarce = budget != "exact"
    shared, longest = (2 * block + offset) // block, 3 * block + offset + 1
    enough = len(workload.requests) * (shared + n * (-(-longest // block) - shared))
    result = preempt.run(
        workload, budget if scarce else enough, block_size=block, expect_preemption=scarce
    )
    if scarce:
        result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("parallel_sampling", "prefix_caching", "stepped")
@pytest.mark.parametrize("spare", [0, 1])
def test_outputs_that_need_more_than_sharers_can_give_up(
    preempt: PreemptHarness, spare: int
) -> None:
    """Both outputs reach a boundary; the one who came last has little but what they share."""
    block = block_size(preempt)
    text = preempt.prompts.take(2 * block)
    workload = together(
        request(preempt, "elder", 1, 3 * block),
        request(preempt, "needy", text, 2 * block, n=2, **drawn(preempt, 3)),
        request(preempt, "sharer", [*text, text[0]], 2 * block, arrival_step=block - 2),
    )
    result = preempt.run(
        workload,
        7 + spare,
        block_size=block,
        enable_prefix_caching=True,
        expect_preemption=False,
    )
    result.assert_matches_baseline()
    result.assert_clean()


@BEAMS
@MODES
@OFFSETS
def test_beams(preempt: PreemptHarness, offset: int, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 2 * block + offset, 3 * block, beam=BeamSpec(num_beams=3)),
        companions(preempt, block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step={block}:{mode}/preempt:victim@step={2 * block + 1}:{mode}",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode, at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@BEAMS
@MODES
def test_beams_in_a_small_pool(preempt: PreemptHarness, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [
            request(preempt, f"r{i}", block + i, 4 * block, beam=BeamSpec(num_beams=2))
            for i in range(3)
        ]
    )
    result = preempt.run(
        workload,
        16,
        block_size=block,
        options=options(preempt, preemption_mode=mode),
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@BEAMS
@MODES
@pytest.mark.preempt_requires("abort")
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "running"])
def test_aborted_beams(preempt: PreemptHarness, waits: bool, mode: str) -> None:
    """Nothing of the search stays behind."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    plan = f"preempt:victim@step={block}:{mode}/squeeze:all@{2 * block}..{3 * block}"
    if waits:
        plan += f"/preempt:victim@step={2 * block}:{mode}"
    result = preempt.run(
        together(
            request(preempt, "victim", 2 * block + 1, 6 * block, beam=BeamSpec(num_beams=3)),
            companions(preempt, block),
        ),
        plan=f"{plan}/abort:victim@step={2 * block + 1}",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
