"""Phases, caches and neighbours of preemptions, with drafts and with steps decided ahead.

What `test_phases`, `test_neighbours` and `test_repeats` do, while tokens are computed that nobody
knows yet.
"""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.checks.drafts import ACCEPTED, REJECTED
from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import block_size, options, request, require_mode, together
from preempt_harness.suite.test_phases import PHASES
from preempt_harness.suite.test_speculation import assert_drafted, drafts, scripted, weaker_model
from preempt_harness.workload import RequestSpec, Workload

pytestmark = pytest.mark.preempt_requires("preempt", "stepped")

SPECULATION = pytest.mark.preempt_requires("speculation")
ASYNC = pytest.mark.preempt_requires("async_scheduling")
DRAFTER = pytest.mark.parametrize("drafter", ["ngram", "scripted", "model"])
AHEAD = pytest.mark.parametrize("ahead", [1, 2])
CACHE = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
REPEATED, OTHER = 7, 9  # a bias makes the output repeat the first
BIAS = {"always": 100.0, "mostly": 3.5}


def config_of(preempt: PreemptHarness, drafter: str) -> dict[str, Any]:
    """Drafts of which some are right."""
    if drafter == "ngram":
        return drafts("ngram")
    return scripted(preempt, 0.7) if drafter == "scripted" else weaker_model(preempt)


def repeating(
    preempt: PreemptHarness, name: str, prompt: list[int], outputs: int, bias: float, **more: Any
) -> RequestSpec:
    """A request whose output repeats one token as often as the bias has it.

    N-grams draft it.
    """
    return request(preempt, name, prompt, outputs, logit_bias=((REPEATED, bias),), **more)


def victim_and_sharer(preempt: PreemptHarness, block: int, bias: float) -> Workload:
    """The sharer arrives when the victim has been preempted."""
    prompt = [*preempt.prompts.take(6 * block), *[REPEATED] * (2 * block)]
    return together(
        repeating(preempt, "victim", prompt, 4 * block, bias),
        repeating(preempt, "sharer", [*prompt, REPEATED], 2 * block, bias, arrival_step=12),
    )


@SPECULATION
@pytest.mark.preempt_requires("logit_bias", "chunked_prefill")
@DRAFTER
@CACHE
@pytest.mark.parametrize("phase", PHASES)
def test_phase_with_drafts(
    preempt: PreemptHarness, phase: str, prefix_caching: bool, drafter: str
) -> None:
    block = block_size(preempt)
    result = preempt.run(
        victim_and_sharer(preempt, block, BIAS["mostly"]),
        plan=PHASES[phase],
        block_size=block,
        max_num_batched_tokens=2 * block,
        enable_prefix_caching=prefix_caching,
        speculative_config=config_of(preempt, drafter),
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@SPECULATION
@pytest.mark.preempt_requires("logit_bias")
@DRAFTER
@pytest.mark.parametrize("bias", BIAS)
@pytest.mark.parametrize("victims", ["several", "all"])
def test_several_victims_with_drafts(
    preempt: PreemptHarness, victims: str, bias: str, drafter: str
) -> None:
    block = block_size(preempt)
    workload = together(
        [
            repeating(
                preempt,
                f"r{index}",
                [*preempt.prompts.take(block + index), *[REPEATED] * block],
                8 * block,
                BIAS[bias],
            )
            for index in range(3)
        ]
    )
    plan = {
        "several": "preempt:r0@step=3/preempt:r1@step=3/preempt:r1@step=6/preempt:r2@step=6",
        "all": "/".join(f"preempt-all@step={step}" for step in range(3, 24, 2)),
    }[victims]
    result = preempt.run(
        workload, plan=plan, block_size=block, speculative_config=config_of(preempt, drafter)
    )
    result.assert_preempted(at_least=4)
    result.assert_matches_baseline()
    result.assert_clean()


@SPECULATION
@pytest.mark.preempt_requires("logit_bias")
@CACHE
def test_preempted_after_drafts_of_which_some_were_right(
    preempt: PreemptHarness, prefix_caching: bool
) -> None:
    """The prompt has the output's beginning, and goes on otherwise after one more token."""
    block = block_size(preempt)
    known = [OTHER, REPEATED, REPEATED, REPEATED, OTHER, OTHER, REPEATED]
    prompt = [*preempt.prompts.take(block), *known]
    result = preempt.run(
        together(repeating(preempt, "victim", prompt, 4 * block, BIAS["always"])),
        plan="preempt:victim@step=2",
        block_size=block,
        enable_prefix_caching=prefix_caching,
        speculative_config=drafts("ngram"),
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@SPECULATION
@pytest.mark.preempt_requires("hold_blocks", "prefix_caching", "logit_bias")
@DRAFTER
def test_part_of_it_is_evicted_with_drafts(preempt: PreemptHarness, drafter: str) -> None:
    """Blocks are held hostage right after the preemption, some of the victim's too."""
    block = block_size(preempt)
    prompt = [*preempt.prompts.take(6 * block), *[REPEATED] * (2 * block)]
    result = preempt.run(
        together(repeating(preempt, "victim", prompt, 6 * block, BIAS["mostly"])),
        16,
        plan="preempt:victim@step=3/squeeze:10@4..7",
        block_size=block,
        speculative_config=config_of(preempt, drafter),
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@ASYNC
@pytest.mark.preempt_requires("chunked_prefill")
@AHEAD
@CACHE
@pytest.mark.parametrize("phase", PHASES)
def test_phase_with_steps_ahead(
    preempt: PreemptHarness, phase: str, prefix_caching: bool, ahead: int
) -> None:
    block = block_size(preempt)
    prompt = preempt.prompts.take(8 * block)
    workload = together(
        request(preempt, "victim", prompt, 4 * block),
        request(preempt, "sharer", [*prompt, prompt[0]], 2 * block, arrival_step=12),
    )
    result = preempt.run(
        workload,
        plan=PHASES[phase],
        block_size=block,
        max_num_batched_tokens=2 * block,
        enable_prefix_caching=prefix_caching,
        async_scheduling=ahead,
    )
    result.assert_preempted(request="victim")
    result.assert_matches_baseline()
    result.assert_clean()


@ASYNC
@AHEAD
def test_several_victims_with_steps_ahead(preempt: PreemptHarness, ahead: int) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{index}", 2 * block + index, 8 * block) for index in range(3)]
    )
    result = preempt.run(
        workload,
        plan="preempt:r0@step=5/preempt:r1@step=5/preempt:r1@step=9/preempt:r2@step=9",
        block_size=block,
        async_scheduling=ahead,
    )
    result.assert_preempted(at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@SPECULATION
@ASYNC
@pytest.mark.preempt_requires("logit_bias")
@AHEAD
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("drafter", ["ngram", "none-right", "some-right", "all-right"])
def test_drafts_in_steps_ahead(
    preempt: PreemptHarness, drafter: str, mode: str, ahead: int
) -> None:
    """How far a step gets is not known when the next is decided, nor when its request goes."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [
            repeating(
                preempt,
                f"r{index}",
                [*preempt.prompts.take(block + index), *[REPEATED] * block],
                8 * block,
                BIAS["mostly"],
            )
            for index in range(3)
        ]
    )
    plan = "/".join(f"preempt:r{step % 3}@step={step}:{mode}" for step in range(3, 6 * block, 2))
    result = preempt.run(
        workload,
        plan=plan,
        block_size=block,
        async_scheduling=ahead,
        speculative_config=by_lookup_or_script(preempt, drafter),
    )
    # Two steps ahead a row always waits to be launched, and a request with one is recomputed.
    result.assert_preempted(at_least=3, mode=mode if ahead == 1 else None)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, REJECTED if drafter == "none-right" else ACCEPTED)


@SPECULATION
@ASYNC
@AHEAD
@pytest.mark.parametrize("drafter", ["none-right", "some-right", "all-right"])
def test_tight_pool_with_drafts_in_steps_ahead(
    preempt: PreemptHarness, drafter: str, ahead: int
) -> None:
    block = block_size(preempt)
    workload = together([request(preempt, f"r{i}", 2 * block + i, 8 * block) for i in range(5)])
    result = preempt.run(
        workload,
        "tight",
        block_size=block,
        async_scheduling=ahead,
        speculative_config=by_lookup_or_script(preempt, drafter),
    )
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, REJECTED if drafter == "none-right" else ACCEPTED)


@SPECULATION
@ASYNC
@AHEAD
@pytest.mark.parametrize("drafter", ["some-right", "all-right"])
def test_drafts_take_the_blocks_that_others_left(
    preempt: PreemptHarness, drafter: str, ahead: int
) -> None:
    """Requests end and go one by one; what they leave is written to while more is decided."""
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, (20 - i) * block) for i in range(6)]
    )
    plan = "/".join(f"preempt:r{step % 4}@step={step}" for step in range(3, 24, 2))
    result = preempt.run(
        workload,
        plan=plan,
        block_size=block,
        max_num_batched_tokens=16 * block,
        enable_prefix_caching=False,
        async_scheduling=ahead,
        speculative_config=by_lookup_or_script(preempt, drafter),
        options=options(preempt, poison=True, block_reuse_order="lifo"),
    )
    result.assert_preempted(at_least=4)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_drafted(result, ACCEPTED)


def by_lookup_or_script(preempt: PreemptHarness, drafter: str) -> dict[str, Any]:
    """Drafts that are there when a step is launched; scripts know the exact model only."""
    if drafter == "ngram":
        return drafts("ngram")
    if preempt.settings().model != "exact":
        pytest.skip("only the exact model can be told how many drafts are right")
    return scripted(preempt, {"none-right": 0.0, "some-right": 0.7, "all-right": 1.0}[drafter])
