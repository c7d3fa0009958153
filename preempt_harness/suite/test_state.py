"""Every piece of state that a request carries comes back with it, in both modes of preemption."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.suite.shapes import (
    block_size,
    chunks,
    companions,
    request,
    require_mode,
    together,
)
from preempt_harness.workload import Operation, Workload

pytestmark = pytest.mark.preempt_requires("preempt", "stepped")

MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])

# Name -> (capabilities, sampling parameters).
ITEMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "seed": (("sampling",), {"temperature": 1.0, "seed": 11}),
    "no-seed": (("sampling",), {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    "repetition-penalty": (("penalties",), {"repetition_penalty": 1.7}),
    "presence-and-frequency": (
        ("penalties",),
        {"presence_penalty": 0.9, "frequency_penalty": 0.7},
    ),
    "penalties-sampled": (
        ("penalties", "sampling"),
        {"frequency_penalty": 1.1, "temperature": 1.0, "seed": 3},
    ),
    "logprobs": (("logprobs",), {"logprobs": 4}),
    "prompt-logprobs": (("prompt_logprobs",), {"prompt_logprobs": 2, "logprobs": 1}),
    "logit-bias": (("logit_bias",), {"logit_bias": ((5, 6.0), (9, -8.0))}),
    "min-tokens": (
        ("stop_tokens", "min_tokens"),
        {"min_tokens": 9, "stop_token_ids": tuple(range(4, 40))},
    ),
    "stop-tokens": (
        ("stop_tokens", "min_tokens"),
        {"min_tokens": 3, "stop_token_ids": tuple(range(4, 8))},
    ),
}


@MODES
@pytest.mark.parametrize("at", ["chunk=1", "out=1", "out=6"], ids=["prefill", "first", "decode"])
@pytest.mark.parametrize("item", ITEMS)
def test_item(preempt: PreemptHarness, item: str, at: str, mode: str) -> None:
    needs, sampling = ITEMS[item]
    lacking = sorted({*needs} - preempt.adapter.capabilities)
    if lacking:
        pytest.skip(f"engine {preempt.adapter.name} lacks {', '.join(lacking)}")
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        companions(preempt, block, count=1),
        request(preempt, "victim", 4 * block, 4 * block, **sampling),
    )
    # Stop tokens may end the request before its sixth token.
    anchor = "out=2" if at == "out=6" and item == "stop-tokens" else at
    result = preempt.run(
        workload,
        plan=f"preempt:victim@{anchor}:{mode}",
        block_size=block,
        **chunks(preempt, 2 * block),
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("stop_strings", "text")
@pytest.mark.parametrize("length", [1, 3])
def test_stop_string_over_a_preemption(preempt: PreemptHarness, length: int, mode: str) -> None:
    """A stop string whose beginning was delivered before the preemption, and its end after it."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    probe = preempt.run(
        together(request(preempt, "victim", prompt, 4 * block)),
        plan="preempt:victim@out=2",
        block_size=block,
    )
    probe.assert_matches_baseline()
    text = probe.record.results["victim"].outputs[0].text
    middle = len(text) // 2
    stop = text[middle : middle + length]
    workload = together(
        request(preempt, "victim", prompt, 4 * block, stop=(stop,)), companions(preempt, block)
    )
    result = preempt.run(workload, plan=f"preempt:victim@out=1:{mode}", block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires(
    "penalties", "logprobs", "prompt_logprobs", "logit_bias", "sampling", "min_tokens"
)
def test_everything_together_and_all_at_once(preempt: PreemptHarness, mode: str) -> None:
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        [
            request(
                preempt,
                f"r{index}",
                3 * block + index,
                4 * block,
                temperature=1.0,
                seed=index,
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=0.4,
                logprobs=2,
                prompt_logprobs=1,
                logit_bias=((6, 1.5),),
                min_tokens=3,
                stop_token_ids=(7,),
            )
            for index in range(4)
        ]
    )
    result = preempt.run(
        workload,
        plan=f"preempt-all@out=2:{mode}/preempt:r0@out=3:{mode}",
        block_size=block,
        max_num_batched_tokens=3 * block,
    )
    result.assert_preempted(mode=mode, at_least=2)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("reset_running_requests")
def test_reset_with_running_requests(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    requests = [request(preempt, f"r{i}", 3 * block + i, 4 * block) for i in range(3)]
    workload = Workload(
        requests=requests, operations=[Operation(kind="reset_running_requests", step=6)]
    )
    result = preempt.run(workload, "roomy", block_size=block)
    result.assert_preempted(at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("reset_running_requests", "swap")
def test_reset_while_requests_are_swapped_out(preempt: PreemptHarness) -> None:
    """What lies in host blocks was computed before the reset, too."""
    block = block_size(preempt)
    requests = [request(preempt, f"r{i}", 3 * block + i, 4 * block) for i in range(3)]
    workload = Workload(
        requests=requests,
        operations=[Operation(kind="reset_running_requests", step=step) for step in range(5, 8)],
    )
    result = preempt.run(workload, plan="preempt-all@out=4:swap", block_size=block)
    result.assert_preempted(mode="swap")
    result.assert_preempted(mode="recompute", at_least=3)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("queue_limit")
def test_a_preempted_request_is_never_refused_by_the_queue_limit(preempt: PreemptHarness) -> None:
    block = block_size(preempt)
    workload = together(
        [request(preempt, f"r{i}", 2 * block + i, 6 * block) for i in range(3)],
        request(preempt, "late", 2 * block, 2 * block, arrival_step=3 * block),
    )
    result = preempt.run(
        workload, plan="preempt-all@out=3", block_size=block, max_waiting_requests=3
    )
    result.assert_preempted(at_least=2)
    result.assert_clean()
    for index in range(3):
        if result.record.results[f"r{index}"].error:
            pytest.fail(f"r{index} was refused: {result.record.results[f'r{index}'].error}")
