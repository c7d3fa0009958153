"""Beam search on the exact model, against a naive one that keeps whole token lists."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from exact_reference import VOCAB_SIZE, expected_outputs
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

from preempt_engine import LLM, BeamSearchParams, SamplingParams
from preempt_engine.beam_search import BeamSearch
from preempt_engine.errors import ConfigError

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10]  # a block and a half


def engine(**options: Any) -> LLM:
    settings = {"num_kv_blocks": 40, "block_size": BLOCK, "poison": True, "swap_space_blocks": 40}
    return LLM("exact", exact_vocab_size=VOCAB_SIZE, **(settings | options))


def params(beam_width: int = 3, **changes: Any) -> BeamSearchParams:
    return BeamSearchParams(beam_width=beam_width, **({"max_tokens": 9} | changes))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("num_stop_ids", [0, 1, 12])
def test_results_are_those_of_a_naive_search(
    early_stopping: bool | str, length_penalty: float, num_stop_ids: int
) -> None:
    case = Case(
        PROMPT,
        params(
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            ignore_eos=num_stop_ids == 0,
            stop_token_ids=range(20, 20 + max(0, num_stop_ids - 1)),
        ),
    )
    (output,) = engine().beam_search(case.prompt, case.params, use_tqdm=False)  # type: ignore[arg-type]
    assert_as_expected(case, output.outputs)


def test_results_come_best_first_with_their_scores() -> None:
    (output,) = engine().beam_search(PROMPT, params(length_penalty=2.0), use_tqdm=False)
    scores = [branch.score for branch in output.outputs]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    for branch in output.outputs:
        assert branch.cumulative_logprob is not None
        assert branch.logprobs is not None
        chosen = zip(branch.token_ids, branch.logprobs, strict=True)
        total = sum(entry[token_id] for token_id, entry in chosen)
        assert branch.cumulative_logprob == pytest.approx(total)
        assert branch.score == pytest.approx(total / len(branch.token_ids) ** 2.0)


def test_one_beam_is_greedy() -> None:
    (beam,) = engine().beam_search(PROMPT, params(1), use_tqdm=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    (plain,) = engine().generate(PROMPT, greedy, use_tqdm=False)
    assert beam.outputs[0].token_ids == plain.outputs[0].token_ids


def test_beams_and_samples_run_together() -> None:
    llm = engine()
    cases = [Case(PROMPT, params()), Case(PROMPT, SamplingParams(n=2, seed=3, max_tokens=9))]
    outputs = llm.generate(
        [case.prompt for case in cases], [case.params for case in cases], use_tqdm=False
    )
    for case, output in zip(cases, outputs, strict=True):
        assert_as_expected(case, output.outputs)


def test_nothing_is_delivered_before_the_search_has_ended() -> None:
    llm = engine()
    llm.add_request(PROMPT, params())
    changed = []
    while llm.has_unfinished_requests():
        changed.append(step_watched(llm))
    assert [len(outputs) for outputs in changed] == [0] * (len(changed) - 1) + [1]
    assert llm.counters.num_generated_tokens == sum(
        len(branch.token_ids) for branch in changed[-1][0].outputs
    )


def test_a_dropped_beam_gives_its_blocks_back_at_once() -> None:
    llm = engine()
    llm.add_request([9, 9, 2, 4, 30], params(4, max_tokens=14, ignore_eos=True))
    dropped = 0
    while llm.has_unfinished_requests():
        request = llm.scheduler.requests["0"]
        before = set(request.sequences)
        step_watched(llm)
        dropped += len(before - set(request.sequences))
        llm.scheduler.check_integrity()
        tables = [sequence.block_table for sequence in request.sequences.values()]
        named = {block for table in tables for block in table}
        assert llm.scheduler.blocks.num_used_blocks == len(named)
        assert len(tables) <= 4
    assert dropped > 4
    assert_idle(llm)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("step", range(1, 11))
def test_beams_come_back_wherever_they_are_preempted(mode: str, step: int) -> None:
    options = {
        "num_kv_blocks": 40,
        "block_size": BLOCK,
        "swap_space_blocks": 40,
        "max_num_batched_tokens": 4,
        "enable_prefix_caching": False,
        "poison": True,
    }
    run_trial(Trial(options, [Case(PROMPT, params())], forced={step: [(0, mode)] * 2}))


def test_recompute_computes_what_beams_have_in_common_once() -> None:
    """Beams split late: they have blocks of the output in common, not of the prompt only."""
    llm = engine(enable_prefix_caching=False, block_size=2)
    llm.add_request([1, 2, 3], params(3, max_tokens=14, ignore_eos=True))
    for _ in range(12):
        step_watched(llm)
    sequences = list(llm.scheduler.requests["0"].sequences.values())
    full_blocks = {
        tuple(sequence.token_ids[: 2 * index + 2])
        for sequence in sequences
        for index in range(sequence.num_computed_tokens // 2)
    }
    partial = sum(sequence.num_computed_tokens % 2 for sequence in sequences)
    assert len(full_blocks) < 1 + sum(
        sequence.num_computed_tokens // 2 - 1 for sequence in sequences
    )
    llm.preempt_request("0", "recompute")
    while llm.has_unfinished_requests():
        step_watched(llm)
    assert llm.counters.num_recomputed_tokens == 2 * len(full_blocks) + partial


def test_candidates_of_a_beam_wait_for_the_others() -> None:
    """With a budget of 2, four beams take two steps; a preemption in between loses no candidate."""
    options = {
        "num_kv_blocks": 60,
        "block_size": BLOCK,
        "max_num_batched_tokens": 2,
        "swap_space_blocks": 60,
    }
    for step in range(5, 12):
        for mode in ("recompute", "swap"):
            run_trial(Trial(options, [Case(PROMPT, params(4))], forced={step: [(0, mode)]}))


def test_an_aborted_search_has_no_results() -> None:
    llm = engine()
    llm.add_request(PROMPT, params())
    for _ in range(4):
        llm.step()
    output = llm.abort_request("0")
    assert output is not None
    assert [branch.token_ids for branch in output.outputs] == [[]] * 3
    assert {branch.finish_reason for branch in output.outputs} == {"abort"}
    assert_idle(llm)


def test_a_search_that_outgrows_the_pool_is_one_with_fewer_tokens() -> None:
    """One shared block, then 3 blocks for each of 3 beams: 16 tokens and one that needs none."""
    llm = engine(num_kv_blocks=1 + 3 * 3)
    (output,) = llm.beam_search(PROMPT, params(max_tokens=50, ignore_eos=True), use_tqdm=False)
    assert_as_expected(Case(PROMPT, params(max_tokens=11, ignore_eos=True)), output.outputs)


def test_a_search_needs_enough_tokens_to_choose_from() -> None:
    (output,) = engine().beam_search(PROMPT, params(33), use_tqdm=False)
    assert "needs 66 tokens to choose from; the vocabulary has 64" in str(output.error)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"beam_width": 0}, r"BeamSearchParams\(beam_width=0\) is out of range"),
        ({"max_tokens": 0}, r"max_tokens=0"),
        ({"early_stopping": "sometimes"}, r'must be True, False or "never"'),
    ],
)
def test_wrong_parameters_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        params(**changes)


def test_equal_scores_are_ordered_by_beam_and_id() -> None:
    search = BeamSearch(params(2, max_tokens=2, ignore_eos=True), frozenset(), 2)
    assert search.take_row(0, np.zeros(8))
    assert search.advance() == [(0, 0), (0, 1)]
    search.renumber([0, 1])
    assert not search.take_row(1, np.zeros(8))
    assert search.take_row(0, np.zeros(8))
    assert search.advance() == []
    assert [[token for token, _ in found.tokens()] for found in search.hypotheses] == [
        [0, 0],
        [0, 1],
    ]


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(2, 4))
def test_beams_in_a_tight_pool_give_the_naive_result(rng: Random, beam_width: int) -> None:
    trial = draw_trial(rng)
    for case in trial.cases:
        case.params = params(
            beam_width,
            max_tokens=rng.choice([2, 6, 10]),
            early_stopping=rng.choice([True, False, "never"]),
            length_penalty=rng.choice([0.0, 1.0, 1.5]),
            stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 4])),
        )
    prompts = max(len(case.prompt) for case in trial.cases)
    own = -(-(prompts + 10) // trial.options["block_size"])
    trial.options |= {"num_kv_blocks": beam_width * own + 1, "max_num_seqs": 2 * beam_width}
    trial.held = {}
    run_trial(trial)


def test_the_naive_search_is_a_search() -> None:
    """Exhaustive check of the reference: with all 64 beams, two steps rank all 64 * 64 pairs."""
    wide = params(32, max_tokens=1, ignore_eos=True)
    (best, *_) = expected_outputs(PROMPT, wide)
    logprobs = [expected.logprobs for expected in expected_outputs(PROMPT, wide)]
    scores = [next(iter(entry[0].values())) for entry in logprobs if entry]
    assert best.score == max(scores)
    assert len(scores) == 32
