"""Every piece of state that a request carries comes back with it, in both modes of preemption."""

from __future__ import annotations

import pytest

from preempt_harness.harness import PreemptHarness
from preempt_harness.record import TokensDelivered
from preempt_harness.result import TrialResult
from preempt_harness.suite._state import REMEMBERING, STATE, answer, assert_stopped, state
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


@MODES
@pytest.mark.parametrize("at", ["chunk=1", "out=1", "out=6"], ids=["prefill", "first", "decode"])
@pytest.mark.parametrize("item", STATE)
def test_item(preempt: PreemptHarness, item: str, at: str, mode: str) -> None:
    sampling = state(preempt, item)
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
@pytest.mark.parametrize("item", [item for item in STATE if item in REMEMBERING])
def test_item_of_a_long_output(preempt: PreemptHarness, item: str, mode: str) -> None:
    """What came long ago counts as much as what came last, after the preemption as before it."""
    sampling = state(preempt, item)
    require_mode(preempt, mode)
    block = block_size(preempt)
    length = max(24 * block, 96)
    workload = together(request(preempt, "victim", 2 * block + 1, length, **sampling))
    result = preempt.run(workload, plan=f"preempt:victim@out={length - 8}:{mode}", block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("parallel_sampling", "sampling")
@pytest.mark.parametrize("at", ["chunk=1", "out=2"], ids=["prefill", "decode"])
@pytest.mark.parametrize("item", [item for item in STATE if "n" not in STATE[item][1]])
def test_item_of_several_outputs(preempt: PreemptHarness, item: str, at: str, mode: str) -> None:
    """Each output has its own, before the preemption and after it."""
    sampling = {"temperature": 1.0, "seed": 6, "n": 3} | state(preempt, item)
    require_mode(preempt, mode)
    block = block_size(preempt)
    workload = together(
        companions(preempt, block, count=1),
        request(preempt, "victim", 2 * block + 1, 3 * block, **sampling),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@{at}:{mode}",
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
    """Of a longer stop string the beginning comes before the preemption, and the end after it."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    text, num_tokens = _text_and_tokens(answer(preempt, prompt, 4 * block))
    middle = next(
        index
        for index in range(len(text) // 2, len(text) - length)
        if text.find(text[index : index + length]) == index
    )
    workload = together(
        request(preempt, "victim", prompt, 4 * block, stop=(text[middle : middle + length],)),
        companions(preempt, block),
    )
    before = _before_its_end(num_tokens, middle, middle + length)
    result = preempt.run(workload, plan=f"preempt:victim@out={before}:{mode}", block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_stopped(result, "victim")


@MODES
@pytest.mark.preempt_requires("stop_strings", "text")
def test_text_held_back_over_a_preemption(preempt: PreemptHarness, mode: str) -> None:
    """What might have become a stop string at the preemption goes on otherwise."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    text, num_tokens = _text_and_tokens(answer(preempt, prompt, 4 * block))
    middle = len(text) // 2
    begun = text[middle : middle + 2]
    # A third character that does not come anywhere after the first two.
    others = [other for other in "~^#@" if begun + other not in text]
    workload = together(
        request(preempt, "victim", prompt, 4 * block, stop=(begun + others[0],)),
        companions(preempt, block),
    )
    result = preempt.run(
        workload, plan=f"preempt:victim@out={num_tokens[middle + 1]}:{mode}", block_size=block
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("stop_strings", "text")
def test_output_is_full_with_text_held_back(preempt: PreemptHarness, mode: str) -> None:
    """What might have become a stop string is the end of the text."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    text, num_tokens = _text_and_tokens(answer(preempt, prompt, 4 * block))
    workload = together(
        request(preempt, "victim", prompt, 4 * block, stop=(text[-2:] + "~",)),
        companions(preempt, block),
    )
    plan = f"preempt:victim@out={_before_its_end(num_tokens, -2, len(num_tokens))}:{mode}"
    result = preempt.run(workload, plan=plan, block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("stop_strings", "min_tokens", "text")
@pytest.mark.parametrize("earlier", [0, 1], ids=["forbidden", "allowed"])
def test_stop_string_beside_min_tokens(preempt: PreemptHarness, earlier: int, mode: str) -> None:
    """The token of number `min_tokens` completes it, and it ends nothing; or the next one does."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    text, num_tokens = _text_and_tokens(answer(preempt, prompt, 4 * block))
    middle = len(text) // 2
    stop, complete = text[middle : middle + 2], num_tokens[middle + 1]
    workload = together(
        request(preempt, "victim", prompt, 4 * block, stop=(stop,), min_tokens=complete - earlier),
        companions(preempt, block),
    )
    plan = f"preempt:victim@out={_before_its_end(num_tokens, middle, middle + 2)}:{mode}"
    result = preempt.run(workload, plan=plan, block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@MODES
@pytest.mark.preempt_requires("stop_strings_by_end", "text")
@pytest.mark.parametrize("order", [1, -1], ids=["longest-first", "longest-last"])
def test_several_stop_strings_come_together(preempt: PreemptHarness, order: int, mode: str) -> None:
    """Of those that end together the longest counts; the longest of all ends a character later."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    text, num_tokens = _text_and_tokens(answer(preempt, prompt, 4 * block))
    end = next(
        index
        for index in range(len(text) // 2, len(text) - 1)
        if text.find(text[index - 1 : index]) == index - 1
    )
    stops = (text[end - 4 : end + 1], text[end - 3 : end], text[end - 1 : end])
    workload = together(
        request(preempt, "victim", prompt, 4 * block, stop=stops[::order]),
        companions(preempt, block),
    )
    plan = f"preempt:victim@out={_before_its_end(num_tokens, end - 2, end)}:{mode}"
    result = preempt.run(workload, plan=plan, block_size=block)
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()
    assert_stopped(result, "victim")


def _before_its_end(num_tokens: list[int], first: int, end: int) -> int:
    """Tokens with which characters [first, end) have begun, or, where one brings all, have not."""
    return min(num_tokens[first], num_tokens[end - 1] - 1)


def _text_and_tokens(result: TrialResult) -> tuple[str, list[int]]:
    """The probe's text, and for each character how many tokens it took to deliver it."""
    num_tokens: list[int] = []
    delivered = 0
    for event in result.record.events:
        if isinstance(event, TokensDelivered):
            delivered += len(event.token_ids)
            num_tokens += [delivered] * len(event.text)
    return result.record.results["probe"].outputs[0].text, num_tokens


@MODES
@pytest.mark.preempt_requires("bad_words", "text")
def test_bad_words_over_a_preemption(preempt: PreemptHarness, mode: str) -> None:
    """The token that would come after the return ends a word that began before it."""
    require_mode(preempt, mode)
    block = block_size(preempt)
    prompt = preempt.prompts.take(2 * block + 1)
    text, num_tokens = _text_and_tokens(answer(preempt, prompt, 4 * block))
    middle = len(text) // 2
    word = text[middle - 1 : middle + 1]
    workload = together(
        request(preempt, "victim", prompt, 4 * block, bad_words=(word,)), companions(preempt, block)
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@out={num_tokens[middle - 1]}:{mode}",
        block_size=block,
    )
    result.assert_preempted(request="victim", mode=mode)
    result.assert_matches_baseline()
    result.assert_clean()


@pytest.mark.preempt_requires("abort", "stepped")
@pytest.mark.parametrize("item", ["logprobs", "prompt-logprobs", "processor", "several"])
@pytest.mark.parametrize("at", ["chunk=1", "out=2"], ids=["prefill", "decode"])
def test_aborted_while_it_waits(preempt: PreemptHarness, at: str, item: str) -> None:
    """Nothing of it stays behind, and nothing more of it comes."""
    sampling = state(preempt, item)
    block = block_size(preempt)
    workload = together(
        companions(preempt, block, count=1),
        request(preempt, "victim", 4 * block, 4 * block, **sampling),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:victim@{at}/squeeze:all@{2 * block}..{3 * block}"
        f"/preempt:victim@step={2 * block}/abort:victim@step={2 * block + 1}",
        block_size=block,
        **chunks(preempt, 2 * block),
    )
    result.assert_preempted(request="victim")
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


@pytest.mark.preempt_requires("prompt_logprobs", "chunked_prefill", "prefix_caching", "recompute")
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_rows_of_a_prompt_that_another_has_computed(preempt: PreemptHarness, chunk: int) -> None:
    """On its return all of its prompt is in the cache, and some of its rows are still due."""
    block = block_size(preempt)
    prompt = preempt.prompts.take(8 * block)
    workload = together(
        request(preempt, "first", prompt, 6 * block),
        request(preempt, "reader", list(prompt), block, arrival_step=5, prompt_logprobs=1),
    )
    result = preempt.run(
        workload,
        plan=f"preempt:reader@chunk={chunk}",
        block_size=block,
        max_num_batched_tokens=2 * block,
        enable_prefix_caching=True,
    )
    result.assert_preempted(request="reader", mode="recompute")
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
