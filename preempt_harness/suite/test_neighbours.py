"""What a preemption does to others: those who take its blocks, those who share its prefix."""

from __future__ import annotations

import pytest

from preempt_harness.adapters.protocol import BLOCK_REUSE_ORDER
from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, request, require_mode, together
from preempt_harness.suite.test_phases import PHASES

CACHE = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])


@CACHE
@pytest.mark.preempt_requires("preempt", "stepped")
def test_a_bystander_takes_the_freed_blocks(preempt: PreemptHarness, prefix_caching: bool) -> None:
    block = block_size(preempt)
    # The pool holds both at their longest, and nothing more: whatever grows takes freed blocks.
    workload = together(
        request(preempt, "bystander", block, 6 * block),
        request(preempt, "victim", 4 * block, 3 * block),
        request(preempt, "newcomer", 3 * block, 2 * block, arrival_step=4),
    )
    result = preempt.run(
        workload,
        14,
        plan="preempt:victim@out=3",
        block_size=block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@CACHE
@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("shared_blocks", [1, 3])
def test_a_later_request_shares_the_victims_prefix(
    preempt: PreemptHarness, shared_blocks: int, prefix_caching: bool
) -> None:
    block = block_size(preempt)
    prefix = preempt.prompts.take(shared_blocks * block)
    workload = together(
        request(preempt, "victim", prefix + preempt.prompts.take(block + 1), 4 * block),
        request(preempt, "other", 2 * block + 1, 4 * block),
        request(preempt, "sharer", prefix + preempt.prompts.take(block), 3 * block, arrival_step=8),
    )
    result = preempt.run(
        workload,
        plan="preempt:victim@out=5",
        block_size=block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@CACHE
@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill")
@pytest.mark.parametrize("phase", [*PHASES, "all"])
def test_a_later_request_shares_what_the_victim_had_computed(
    preempt: PreemptHarness, phase: str, prefix_caching: bool
) -> None:
    """The sharer arrives after the preemption, in whatever phase it fell."""
    block = block_size(preempt)
    prefix = preempt.prompts.take(7 * block)
    workload = together(
        request(preempt, "victim", prefix + preempt.prompts.take(block), 3 * block),
        request(preempt, "other", block + 1, 3 * block) if phase == "all" else [],
        request(preempt, "sharer", prefix + preempt.prompts.take(1), 2 * block, arrival_step=8),
    )
    result = preempt.run(
        workload,
        plan=PHASES.get(phase, "preempt-all@step=5"),
        block_size=block,
        max_num_batched_tokens=2 * block,
        enable_prefix_caching=prefix_caching,
    )
    result.assert_preempted(request="victim", phase=phase if phase in PHASES else None)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill", "prefix_caching")
@pytest.mark.parametrize("phase", PHASES)
def test_prompts_that_begin_with_a_later_block_of_the_victim(
    preempt: PreemptHarness, phase: str
) -> None:
    """What the victim computes after its return hangs on what it found again, and is no beginning.

    nano-vllm forgot the hash of a free block that was found again, so that the next block was
    entered as a first one (GeeeekExplorer/nano-vllm, f64d821).
    """
    block = block_size(preempt)
    prompt = preempt.prompts.take(8 * block)
    later = [
        request(
            preempt,
            f"s{index}",
            prompt[index * block : (index + 1) * block] + preempt.prompts.take(1),
            block,
            arrival_step=9,
        )
        for index in range(1, 8)
    ]
    result = preempt.run(
        together(request(preempt, "victim", prompt, 3 * block), later),
        plan=PHASES[phase],
        block_size=block,
        max_num_batched_tokens=2 * block,
    )
    result.assert_preempted(request="victim", phase=phase)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill", "mixed_steps")
@pytest.mark.parametrize("num_blocks", ["roomy", 20])
@pytest.mark.parametrize("phase", PHASES)
def test_growing_requests_take_the_freed_blocks(
    preempt: PreemptHarness, phase: str, num_blocks: str | int
) -> None:
    """Four requests out of step with each other, so that one needs a block in every step."""
    block = block_size(preempt)
    growing = [request(preempt, f"c{index}", block + index, 6 * block) for index in range(4)]
    workload = together(growing, request(preempt, "victim", 8 * block, 3 * block))
    ordered = BLOCK_REUSE_ORDER in preempt.adapter.capabilities
    result = preempt.run(
        workload,
        num_blocks,
        plan=PHASES[phase],
        block_size=block,
        max_num_batched_tokens=2 * block + len(growing),
        options={"block_reuse_order": "lifo"} if ordered else {},
    )
    result.assert_preempted(request="victim", phase=phase)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "hold_blocks", "prefix_caching")
def test_part_of_it_is_evicted_before_its_second_return(preempt: PreemptHarness) -> None:
    """Blocks are held hostage right after the second preemption, some of the victim's too."""
    block = block_size(preempt)
    result = preempt.run(
        together(request(preempt, "victim", 8 * block, 4 * block)),
        14,
        plan="preempt:victim@step=6/preempt:victim@resume=1/squeeze:8@9..11",
        block_size=block,
    )
    result.assert_preempted(request="victim", phase="just_resumed")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching")
def test_equal_later_blocks_under_different_first_blocks(preempt: PreemptHarness) -> None:
    """A hit on a later block must not hide that the first one differs, with room or without."""
    block = block_size(preempt)
    later = preempt.prompts.take(2 * block)
    workload = together(
        [
            request(
                preempt, f"r{index}", preempt.prompts.take(block) + later + [later[0]], 5 * block
            )
            for index in range(3)
        ]
    )
    result = preempt.run(workload, "tight", block_size=block, baseline="solo")
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "stepped")
def test_a_prompt_that_begins_with_a_later_block_of_another(preempt: PreemptHarness) -> None:
    """The same tokens at another place are another content, in either run."""
    block = block_size(preempt)
    text = preempt.prompts.take(4 * block)
    workload = together(
        request(preempt, "r0", text, 5 * block),
        request(preempt, "r1", [*text[block:], text[0]], 5 * block, arrival_step=3),
        request(preempt, "r2", [*text[2 * block :], text[0]], 5 * block, arrival_step=5),
    )
    result = preempt.run(workload, "tight", block_size=block, baseline="solo")
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "preempt", "stepped")
def test_equal_later_blocks_when_one_returns(preempt: PreemptHarness) -> None:
    """The first prompt is gone from the cache's root when the second, with equal ends, returns."""
    block = block_size(preempt)
    first, later = preempt.prompts.take(block), preempt.prompts.take(2 * block)
    workload = together(
        request(preempt, "r0", first + later + [later[1]], 3 * block),
        request(preempt, "r1", preempt.prompts.take(block) + later + [later[1]], 3 * block),
        request(preempt, "r2", first + later + [later[2]], 3 * block, arrival_step=6),
        request(
            preempt,
            "r3",
            preempt.prompts.take(block) + later + [later[2]],
            3 * block,
            arrival_step=4 * block,
        ),
    )
    result = preempt.run(workload, plan="preempt:r0@out=2/preempt:r1@out=4", block_size=block)
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "preempt")
def test_identical_prompts(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block)
    workload = together(
        [request(preempt, f"r{index}", list(prompt), 3 * block) for index in range(3)]
    )
    result = preempt.run(workload, plan="preempt:r1@out=2/preempt:r0@out=5", block_size=block)
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "stepped")
def test_evicted_and_asked_for_again(preempt: PreemptHarness) -> None:
    """A prefix is evicted by others and comes again: its old entry must lead nowhere."""
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block + 1)
    workload = together(
        request(preempt, "r0", prompt, 2),
        request(preempt, "r1", 4 * block, 6 * block, arrival_step=2),
        request(preempt, "r2", 4 * block, 6 * block, arrival_step=3),
        request(preempt, "r3", list(prompt), 3 * block, arrival_step=4 * block),
    )
    result = preempt.run(workload, "tight", block_size=block)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("abort", "preempt", "stepped")
@pytest.mark.parametrize("when", ["waiting", "resumed"])
def test_aborted_after_a_preemption(preempt: PreemptHarness, when: str) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(3 * block)
    workload = together(
        request(preempt, "victim", prompt, 4 * block),
        request(preempt, "other", 2 * block + 1, 4 * block),
        request(preempt, "sharer", list(prompt), 2 * block, arrival_step=10),
    )
    abort = {"waiting": "abort:victim@step=5", "resumed": "abort:victim@resume=1"}[when]
    plan = f"preempt:victim@step=4/{abort}"
    result = preempt.run(workload, plan=plan, block_size=block)
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("abort", "preempt", "stepped", "chunked_prefill")
def test_aborted_in_the_middle_of_its_prefill(preempt: PreemptHarness) -> None:
    """Blocks of a half computed prompt must not be found by the next request with that prompt."""
    block = block_size(preempt)
    prompt = preempt.prompts.take(6 * block)
    workload = together(
        request(preempt, "other", block, 6 * block),
        request(preempt, "victim", prompt, 2 * block),
        request(preempt, "sharer", list(prompt), 2 * block, arrival_step=5),
    )
    result = preempt.run(
        workload,
        plan="abort:victim@chunk=2/preempt:other@out=7",
        block_size=block,
        max_num_batched_tokens=block + 1,
    )
    result.assert_preempted(request="other")
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("abort", "preempt", "stepped")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_survivors_cancelled_after_a_preemption(preempt: PreemptHarness, mode: str) -> None:
    """The waiting request must come back although those that ran never finish by themselves."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        request(preempt, "victim", 3 * block, 3 * block),
        request(preempt, "r1", 2 * block, 9 * block),
        request(preempt, "r2", 2 * block, 9 * block),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@step=4:{mode}/abort:r1@step=6/abort:r2@step=6",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("abort", "stepped")
def test_survivors_cancelled_in_a_full_pool(preempt: PreemptHarness) -> None:
    """The same without a forced preemption: the pool has room for two of three until the end."""
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block, 9 * block) for i in range(3)])
    # The three fill 14 blocks with 3 blocks of outputs each; two of them do so with 5.
    result = preempt.run(
        workload,
        14,
        plan=f"abort:r0@out={4 * block}/abort:r1@out={4 * block}",
        block_size=block,
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "abort")
@pytest.mark.parametrize("aborted", ["r0", "r1"])
@pytest.mark.parametrize("count", [3, 5, 6])
def test_one_of_several_victims_is_aborted(
    preempt: PreemptHarness, count: int, aborted: str
) -> None:
    """The last to arrive is the first to be preempted; the others come back in their order."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 2 * block + index, 4 * block) for index in range(count)]
    )
    victims = "/".join(f"preempt:r{index}@step=6" for index in reversed(range(count)))
    result = preempt.run(workload, plan=f"{victims}/abort:{aborted}@step=7", block_size=block)
    result.assert_preempted(at_least=count)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped")
@pytest.mark.parametrize("at", ["out=1", "out=4"])
def test_who_comes_back_is_not_the_next_victim(preempt: PreemptHarness, at: str) -> None:
    """The oldest was preempted by force; when blocks run short, the youngest has to go."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", block + index, 6 * block) for index in range(4)]
    )
    result = preempt.run(workload, "tight", plan=f"preempt:r0@{at}", block_size=block)
    result.assert_preempted(request="r0")
    result.assert_preempted(at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("prefix_caching", "stepped", "chunked_prefill")
@pytest.mark.parametrize("num_blocks", [8, 10])
def test_what_a_waiting_request_can_share_grows(preempt: PreemptHarness, num_blocks: int) -> None:
    """It fits beside the first only when that one has computed what both begin with.

    Engines that know no chunks may share what the same step is about to compute, and those that
    promise no order may have nobody wait.
    """
    if not {"strict_order", "queue_order"} & preempt.adapter.capabilities:
        pytest.skip(f"engine {preempt.adapter.name} promises no order")
    block = block_size(preempt)
    text = preempt.prompts.take(4 * block)
    workload = together([request(preempt, f"r{i}", [*text, text[i]], 3 * block) for i in range(3)])
    result = preempt.run(workload, num_blocks, block_size=block, enable_prefix_caching=True)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("preempt", "stepped", "chunked_prefill", "mixed_steps", "recompute")
@pytest.mark.preempt_requires("prompt_logprobs")
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_rows_of_a_prompt_beside_a_chunk_without_any(
    preempt: PreemptHarness, num_rows: int
) -> None:
    """One decodes, one has its last tokens scored, one is in its prompt: 1, some and 0 rows."""
    block = block_size(preempt)
    share = block + 2  # of a step's budget, beside the one that decodes
    scored = 2 * share + num_rows
    workload = together(
        request(preempt, "decodes", block, 8 * block),
        request(preempt, "scored", scored, 2 * block, arrival_step=2, prompt_logprobs=0),
        request(preempt, "long", 6 * share, block, arrival_step=2),
    )
    result = preempt.run(
        workload,
        plan="preempt:long@chunk=2:recompute/preempt:scored@out=3:recompute",
        block_size=block,
        max_num_batched_tokens=1 + share,
    )
    result.assert_preempted(request="long")
    result.assert_preempted(request="scored")
    result.assert_matches_baseline()
    result.assert_clean()
