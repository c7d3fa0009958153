"""What was begun before the prefix cache was reset is never offered to it again."""

from __future__ import annotations

import pytest

from preempt_engine import LLM, SamplingParams

PROMPT = list(range(4, 16))  # three blocks


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_request_that_runs_through_a_reset_leaves_nothing_to_find(ahead: int) -> None:
    with LLM("exact", num_kv_blocks=40, block_size=4, async_scheduling=ahead) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.add_request(PROMPT, params, request_id="first")
        for _ in range(4 + ahead):
            llm.step()
        llm.reset_prefix_cache()
        finished = {}
        while llm.has_unfinished_requests():
            finished.update({output.request_id: output for output in llm.step()})
        tokens = finished["first"].outputs[0].token_ids
        # The beginning is computed anew and found by the third; the rest is the first one's alone.
        whole = [*PROMPT, *tokens]
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        (third,) = llm.generate([whole], params, use_tqdm=False)
        assert third.num_cached_tokens == len(PROMPT)


def test_an_urgent_request_comes_in_the_step_after_its_victims_copy() -> None:
    """Its room is kept even when the token budget is spent on others."""
    with LLM(
        "exact",
        num_kv_blocks=18,
        block_size=4,
        max_num_batched_tokens=3,
        preemption_mode="swap",
        swap_space_blocks=20,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.add_request(range(4, 36), params, request_id="calm", priority=2)
        for _ in range(4):
            llm.step()
        llm.add_request(range(4, 41), params, request_id="first", priority=0)
        llm.step()
        llm.add_request(range(4, 29), params, request_id="second", priority=0)
        for _ in range(2):
            llm.step()
        running = [request.request_id for request in llm.scheduler.running]
        assert running == ["first", "second"]
