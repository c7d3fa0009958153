"""Several outputs of one prompt (`n`): one request, sequences that share the prompt's blocks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from exact_reference import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from preemption_trials import (
    Case,
    Trial,
    assert_as_expected,
    assert_idle,
    draw_trial,
    run_trial,
    step_watched,
)

from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.sampling.noise import branch_seed
from preempt_engine.worker.exact_runner import ExactRunner

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10]  # a block and a half


def engine(**options: Any) -> LLM:
    settings = {"num_kv_blocks": 40, "block_size": BLOCK, "poison": True, "swap_space_blocks": 40}
    return LLM("exact", exact_vocab_size=VOCAB_SIZE, **(settings | options))


def params(n: int, **changes: Any) -> SamplingParams:
    given = {"n": n, "seed": 11, "max_tokens": 9, "ignore_eos": True}
    return SamplingParams(**(given | changes))


def tokens(output: RequestOutput) -> list[list[int]]:
    return [branch.token_ids for branch in output.outputs]


def test_branch_i_is_a_request_with_the_derived_seed() -> None:
    (output,) = engine().generate(PROMPT, params(4, logprobs=2), use_tqdm=False)
    assert [branch.index for branch in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(branch) for branch in tokens(output)}) == 4
    for branch in output.outputs:
        seed = branch_seed(11, branch.index)
        (alone,) = engine().generate(PROMPT, params(1, seed=seed, logprobs=2), use_tqdm=False)
        assert alone.outputs[0].token_ids == branch.token_ids
        assert alone.outputs[0].logprobs == branch.logprobs
        assert alone.outputs[0].text == branch.text


def test_the_first_branch_has_the_requests_own_seed() -> None:
    assert branch_seed(11, 0) == 11
    assert len({branch_seed(seed, branch) for seed in range(3) for branch in range(3)}) == 9


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared() -> None:
    llm = engine(enable_prefix_caching=False)
    llm.add_request(PROMPT, params(3))
    llm.step()
    request = llm.scheduler.requests["0"]
    assert llm.counters.num_computed_tokens == len(PROMPT)
    assert llm.scheduler.blocks.num_used_blocks == 2
    llm.step()
    tables = [sequence.block_table for sequence in request.sequences.values()]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert llm.counters.num_copied_blocks == 2  # the last of the three keeps the original


@pytest.mark.parametrize("prompt_tokens", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_prompt_that_fills_its_blocks_needs_no_copy(prompt_tokens: int) -> None:
    llm = engine()
    prompt = PROMPT[:prompt_tokens]
    (output,) = llm.generate(prompt, params(3), use_tqdm=False)
    assert llm.counters.num_copied_blocks == (0 if prompt_tokens == BLOCK else 2)
    assert_as_expected(Case(prompt, params(3)), output.outputs)


def test_a_branch_that_ends_gives_its_blocks_back_at_once() -> None:
    llm = engine()
    (full,) = engine().generate(PROMPT, params(3), use_tqdm=False)
    stop = full.outputs[1].token_ids[3]
    stopping = params(3, stop_token_ids=[stop])
    llm.add_request(PROMPT, stopping)
    output = None
    while output is None or not output.outputs[1].finished():
        (output,) = llm.step()
    live = llm.scheduler.requests["0"].sequences
    assert 1 not in live
    llm.scheduler.check_integrity()
    blocks = {block for sequence in live.values() for block in sequence.block_table}
    assert llm.scheduler.blocks.num_used_blocks == len(blocks)
    assert not output.finished
    while llm.has_unfinished_requests():
        llm.step()
    assert output.finished
    assert_as_expected(Case(PROMPT, stopping), output.outputs)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("step", range(1, 11))
def test_all_branches_come_back_wherever_the_request_is_preempted(mode: str, step: int) -> None:
    options = engine_options = {
        "num_kv_blocks": 40,
        "block_size": BLOCK,
        "swap_space_blocks": 40,
        "max_num_batched_tokens": 4,
        "enable_prefix_caching": False,
    }
    case = Case(PROMPT, params(3, logprobs=1))
    run_trial(Trial(options, [case], forced={step: [(0, mode)]}))
    run_trial(Trial(engine_options | {"poison": True}, [case], forced={step: [(0, mode)] * 2}))


def test_recompute_shares_the_prompt_again() -> None:
    """Each of three branches has computed 6 + 3 tokens; the first block of 4 is computed once."""
    llm = engine(enable_prefix_caching=False)
    llm.add_request(PROMPT, params(3))
    for _ in range(4):
        llm.step()
    llm.preempt_request("0", "recompute")
    for _ in range(3):  # preempted; the first branch; the others
        step_watched(llm)
    tables = [sequence.block_table for sequence in llm.scheduler.requests["0"].sequences.values()]
    assert len({table[0] for table in tables}) == 1
    assert llm.counters.num_recomputed_tokens == 9 + (9 - BLOCK) + (9 - BLOCK)


def test_branches_that_said_the_same_share_that_too() -> None:
    """Greedy branches are equal: after a recompute they share every full block."""
    llm = engine(enable_prefix_caching=False)
    greedy = params(3, temperature=0.0, max_tokens=14)
    llm.add_request(PROMPT, greedy)
    for _ in range(9):
        llm.step()
    llm.preempt_request("0", "recompute")
    for _ in range(4):
        outputs = step_watched(llm)
    tables = [sequence.block_table for sequence in llm.scheduler.requests["0"].sequences.values()]
    assert len({tuple(table[:3]) for table in tables}) == 1
    while llm.has_unfinished_requests():
        outputs = step_watched(llm)
    assert_as_expected(Case(PROMPT, greedy), outputs[0].outputs)
    assert_idle(llm)


def test_a_branch_waits_when_the_budget_is_smaller_than_n() -> None:
    case = Case(PROMPT, params(4))
    options = {"num_kv_blocks": 40, "block_size": BLOCK, "max_num_batched_tokens": 3}
    run_trial(Trial(options, [case], forced={5: [(0, "recompute")]}))


def test_sequences_count_towards_max_num_seqs() -> None:
    llm = engine(max_num_seqs=4)
    for n in (3, 2, 1):
        llm.add_request(PROMPT, params(n))
    llm.step()
    assert [request.request_id for request in llm.scheduler.running] == ["0"]


def test_an_ended_branch_makes_room_for_another_request() -> None:
    (full,) = engine().generate(PROMPT, params(3), use_tqdm=False)
    stop = full.outputs[1].token_ids[3]
    assert stop not in full.outputs[0].token_ids + full.outputs[2].token_ids
    llm = engine(max_num_seqs=3)
    llm.add_request(PROMPT, params(3, stop_token_ids=[stop]))
    llm.add_request(PROMPT, params(1))
    for _ in range(5):
        llm.step()
    assert [request.request_id for request in llm.scheduler.running] == ["0", "1"]


def test_more_outputs_than_may_ever_run_are_refused_alone() -> None:
    llm = engine(max_num_seqs=2)
    wide, fine = llm.generate([PROMPT, PROMPT], [params(3), params(2)], use_tqdm=False)
    assert "n=3 sequences of one request never run at once" in str(wide.error)
    assert [branch.finish_reason for branch in wide.outputs] == ["error"] * 3
    assert_as_expected(Case(PROMPT, params(2)), fine.outputs)


@pytest.mark.parametrize(("num_blocks", "length"), [(2, 1), (3, 1), (4, 3), (6, 3), (7, 7)])
def test_branches_that_outgrow_the_pool_end_by_length_together(
    num_blocks: int, length: int
) -> None:
    """One shared block, then each of 3 branches has a third of the rest: room for 4 more tokens
    each per block, less the 2 of the prompt, and the last one chosen needs no room."""
    llm = engine(num_kv_blocks=num_blocks)
    (output,) = llm.generate(PROMPT, params(3, max_tokens=50), use_tqdm=False)
    assert [len(branch.token_ids) for branch in output.outputs] == [length] * 3
    assert {branch.finish_reason for branch in output.outputs} == {"length"}
    assert llm.counters.num_preemptions == 0


def test_workers_forget_branches_that_ended() -> None:
    runners = []

    class Runner(ExactRunner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            runners.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preempt_engine.worker.exact_runner.ExactRunner", Runner)
        llm = engine()
    llm.generate(PROMPT, params(3), use_tqdm=False)
    llm.generate([1], params(1, max_tokens=1), use_tqdm=False)
    assert len(runners[0].state.sequences) == 1


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(2, 5))
def test_several_outputs_in_a_tight_pool_give_the_closed_form(rng: Random, n: int) -> None:
    trial = draw_trial(rng)
    for case in trial.cases:
        case.params = params(n, seed=rng.randrange(100), max_tokens=rng.choice([2, 6, 11]))
    prompts = max(len(case.prompt) for case in trial.cases)
    own = -(-(prompts + 11) // trial.options["block_size"])
    trial.options |= {"num_kv_blocks": n * own + 1, "max_num_seqs": 2 * n}
    trial.held = {}
    run_trial(trial)
