"""Speculative decoding: the same output in fewer steps, whatever is rejected or preempted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spec_trials import compare, draw_trial

from preempt_engine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from preempt_engine.block_manager import BlockManager
from preempt_engine.errors import ConfigError
from preempt_engine.exact import reference_generate
from preempt_engine.sequence import Request, Sequence
from preempt_engine.spec_decode.allowance import cut_drafts
from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_engine.spec_decode.ngram import NgramProposer
from preempt_engine.spec_decode.proposer import DraftRequest, is_kept
from preempt_engine.step import SchedulerOutput, SequenceKey

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * j + i) % 50 + 1 for j in range(9 + 3 * i)] for i in range(4)]
METHODS = ("scripted", "draft_model")


def drafts(method: str = "scripted", count: int = 3, **more: Any) -> dict[str, Any]:
    if method == "draft_model":
        more.setdefault("model", "exact")
    return {"method": method, "num_speculative_tokens": count, **more}


def engine(speculative: dict[str, Any] | None, **options: Any) -> LLM:
    settings: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 64, "debug_worker_state": True}
    return LLM("exact", speculative_config=speculative, **(settings | options))


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    """All outputs; integrity is asserted after every step."""
    names = [llm.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()
    counters = llm.counters
    judged = counters.num_accepted_tokens + counters.num_rejected_tokens
    assert judged == counters.num_drafted_tokens
    return [outputs[name] for name in names]


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[branch.token_ids for branch in output.outputs] for output in outputs]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [64, 14, 11])
def test_greedy_output_is_the_closed_form(method: str, rate: float, num_blocks: int) -> None:
    with engine(drafts(method, acceptance_rate=rate), num_kv_blocks=num_blocks) as llm:
        outputs = run(llm, PROMPTS, GREEDY)
        counters = llm.counters
    assert token_ids(outputs) == [[reference_generate(p, 24, 64)] for p in PROMPTS]
    assert counters.num_drafted_tokens > 0
    assert (counters.num_accepted_tokens > 0) == (rate > 0)
    assert (counters.num_rejected_tokens > 0) == (rate < 1)
    assert (counters.num_preemptions > 0) == (num_blocks < 64)


def test_accepted_drafts_save_steps() -> None:
    steps = {}
    for rate in (0.0, 1.0):
        with engine(drafts(acceptance_rate=rate)) as llm:
            run(llm, PROMPTS, GREEDY)
            steps[rate] = llm.counters.num_steps
    assert steps[0.0] == 24
    assert steps[1.0] == 1 + -(-23 // 4)  # the prompts, then runs of three drafts and one more


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, max_tokens=20, seed=3, n=2),
        SamplingParams(temperature=0.8, max_tokens=20, top_k=5, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.5, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=20, min_tokens=9, stop_token_ids=range(4, 50)),
        SamplingParams(temperature=0.0, max_tokens=20, stop=["A", "%"]),
        SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1),
    ],
    ids=["n=2", "sampled", "penalty", "min-tokens", "stop", "prompt-logprobs"],
)
def test_everything_a_user_sees_is_the_same(
    params: SamplingParams, method: str, preemption_mode: str
) -> None:
    with engine(None, num_kv_blocks=256) as llm:
        plain = run(llm, PROMPTS, params)
    options = {"num_kv_blocks": 20, "preemption_mode": preemption_mode, "swap_space_blocks": 32}
    with engine(drafts(method, acceptance_rate=0.8), **options) as llm:
        drafted = run(llm, PROMPTS, params)
        assert llm.counters.num_drafted_tokens > 0
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs == other.outputs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("budget", [2, 4, 5, 7, 64])
def test_no_step_exceeds_the_token_budget(budget: int) -> None:
    with engine(drafts(acceptance_rate=0.7), max_num_batched_tokens=budget) as llm:
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
        while llm.has_unfinished_requests():
            step = llm.schedule()
            assert step is not None
            assert step.num_scheduled_tokens <= budget
            llm.update(step, llm.execute(step).result())


@pytest.mark.parametrize(("budget", "num_drafts"), [(4, 0), (5, 1), (9, 5)])
def test_drafts_have_what_a_full_batch_leaves_of_the_budget(budget: int, num_drafts: int) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "num_kv_blocks": 256}
    with engine(drafts(), **options) as llm:
        for prompt in PROMPTS:
            llm.add_request(prompt, replace(GREEDY, max_tokens=120))
        seen = set()
        while llm.has_unfinished_requests():
            decoding = all(
                request.sequence.num_output_tokens > 1 for request in llm.scheduler.running
            )
            step = llm.schedule()
            assert step is not None
            if decoding and len(step.scheduled) == 4:
                seen.add(step.num_scheduled_tokens - 4)
            llm.update(step, llm.execute(step).result())
    assert max(seen) == num_drafts


@pytest.mark.parametrize(
    ("options", "num_found", "num_head", "num_drafts"),
    [
        ({"max_num_batched_tokens": 64}, 0, 8, 5),
        ({"max_num_batched_tokens": 12}, 0, 8, 3),
        ({"max_num_batched_tokens": 9}, 0, 8, 0),
        ({"max_num_batched_tokens": 7}, 0, 6, 0),
        ({"max_num_batched_tokens": 12}, 4, 4, 5),  # four of its tokens are in the cache
        ({"max_num_batched_tokens": 9}, 4, 4, 4),
        ({"max_num_batched_tokens": 9, "max_num_seqs": 1}, 0, 0, 5),  # it cannot come
    ],
)
def test_drafts_have_what_the_head_of_the_queue_leaves(
    options: dict[str, Any], num_found: int, num_head: int, num_drafts: int
) -> None:
    """One request runs and has five drafts; another of eight tokens comes."""
    with engine(drafts(count=5), **options) as llm:
        llm.add_request([40, 41, 42, 43, 44], replace(GREEDY, max_tokens=60))
        for _ in range(3):
            llm.step()
        newcomer = [40, 41, 42, 43][:num_found] + [1, 2, 3, 4, 5, 6, 7, 8][num_found:]
        llm.add_request(newcomer, GREEDY)
        step = llm.schedule()
        assert step is not None
        tokens = [item.end - item.start for item in step.scheduled]
    assert tokens == ([1 + num_drafts, num_head] if num_head else [1 + num_drafts])


def _running(num_tokens: int, num_computed: int, blocks: list[int], num_drafts: int) -> Request:
    request = Request.create(
        request_id="a",
        arrival_index=0,
        prompt_token_ids=range(num_tokens),
        params=GREEDY,
        seed=0,
    )
    sequence = request.sequence
    sequence.block_table = blocks
    sequence.set_computed(num_computed)
    sequence.draft_token_ids = [1] * num_drafts
    return request


@pytest.mark.parametrize(
    ("free", "budget", "kept"),
    [
        (8, 64, 5),  # room for all
        (8, 3, 2),  # one token of the budget is the known one's
        (8, 1, 0),
        (0, 64, 3),  # the last block of the table has slots for so many
        (1, 64, 5),
    ],
)
def test_drafts_have_what_known_tokens_leave(free: int, budget: int, kept: int) -> None:
    blocks = BlockManager(2 + free, 4)
    request = _running(5, 4, [], 5)
    blocks.grow(request.sequence, 5)
    cut_drafts([request], blocks, budget)
    assert len(request.sequence.draft_token_ids) == kept


def test_drafts_cost_nobody_a_block() -> None:
    """Two requests grow in a pool that just holds them: with drafts it does, too."""
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    with engine(drafts(acceptance_rate=0.4, count=8), num_kv_blocks=10) as llm:
        outputs = run(llm, [PROMPTS[0][:8], PROMPTS[1][:8]], params)
        assert llm.counters.num_preemptions == 0
    assert [len(output.outputs[0].token_ids) for output in outputs] == [13, 13]


def test_a_block_is_found_only_with_what_the_sequence_is() -> None:
    """Rejected drafts filled slots of blocks; what is found later is the text, never a draft."""
    prompt = PROMPTS[0]
    with engine(drafts(acceptance_rate=0.0)) as llm:
        (first,) = run(llm, [prompt], GREEDY)
        longer = prompt + first.outputs[0].token_ids
        (second,) = run(llm, [longer], GREEDY)
    assert second.num_cached_tokens == (len(longer) - 1) // 4 * 4
    assert second.outputs[0].token_ids == reference_generate(longer, 24, 64)


def test_beams_are_not_drafted_for() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    with engine(None) as llm:
        (plain,) = llm.beam_search(PROMPTS[:1], params, use_tqdm=False)
    with engine(drafts("ngram")) as llm:
        (drafted,) = llm.beam_search(PROMPTS[:1], params, use_tqdm=False)
        assert llm.counters.num_drafted_tokens == 0
    assert plain.outputs == drafted.outputs


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_drafts_travel_to_every_rank(num_ranks: int) -> None:
    options = {"tensor_parallel_size": num_ranks, "num_kv_blocks": 14}
    with engine(drafts(acceptance_rate=0.6), **options) as llm:
        outputs = run(llm, PROMPTS, GREEDY)
        assert llm.counters.num_accepted_tokens > 0
        assert llm.counters.num_rejected_tokens > 0
        assert llm.counters.num_preemptions > 0
    expected = [[reference_generate(p, 24, 64, num_ranks=num_ranks)] for p in PROMPTS]
    assert token_ids(outputs) == expected


def test_an_engine_that_was_reset_drafts_as_a_new_one() -> None:
    with engine(drafts("draft_model")) as llm:
        first = run(llm, PROMPTS, GREEDY)
        counters = llm.counters
        llm.reset(num_kv_blocks=14)
        run(llm, PROMPTS, GREEDY)
        llm.reset(num_kv_blocks=64)
        assert token_ids(run(llm, PROMPTS, GREEDY)) == token_ids(first)
        assert llm.counters == counters
        llm.reset(speculative_config=None)
        run(llm, PROMPTS, GREEDY)
        assert llm.counters.num_drafted_tokens == 0


# Proposers ----------------------------------------------------------------------------------------


def _propose(proposer: NgramProposer, token_ids: list[int], limit: int) -> list[int]:
    sequence = Sequence(key=SequenceKey("a"), token_ids=token_ids, num_prompt_tokens=1)
    (proposed,) = proposer.propose(SchedulerOutput(0), [DraftRequest(sequence, GREEDY, 0, limit)])
    return proposed


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),  # what followed 1 2
        ([1, 2, 9, 5, 2, 8, 1, 2], 1, [9]),  # the longer end counts, not the later place of 2
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # of equal ones the later place
        ([1, 2, 3, 4], 3, []),
        ([7, 7, 7], 3, [7]),
        ([7], 3, []),
    ],
)
def test_ngrams_continue_the_longest_end_seen_before(
    text: list[int], limit: int, expected: list[int]
) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    assert _propose(NgramProposer(config), text, limit) == expected


def test_ngrams_of_a_growing_text_are_those_of_the_whole() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2)
    growing = NgramProposer(config)
    text = [(i * i) % 7 for i in range(60)]
    for length in range(1, 61):
        anew = _propose(NgramProposer(config), text[:length], 3)
        assert _propose(growing, text[:length], 3) == anew


def test_a_positions_lot_is_its_own() -> None:
    lots = [is_kept(0.3, 1, SequenceKey("a"), position) for position in range(2000)]
    assert 500 < sum(lots) < 700
    assert lots == [is_kept(0.3, 1, SequenceKey("a"), position) for position in range(2000)]
    assert not any(is_kept(0.0, 1, SequenceKey("a"), position) for position in range(50))
    assert all(is_kept(1.0, 1, SequenceKey("a"), position) for position in range(50))


# Configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram"}, "has no 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 2}, "has no 'method'"),
        (drafts("eagle"), "method='eagle' is unknown"),
        (drafts("ngram", 0), "num_speculative_tokens=0 is out of range"),
        (drafts("ngram", lookup=3), "no key 'lookup'"),
        (drafts("ngram", prompt_lookup_min=5), "prompt_lookup_min=5 is out of range"),
        (drafts("ngram", model="exact"), "model='exact' with method='ngram'"),
        (drafts("ngram", acceptance_rate=0.5), "acceptance_rate=0.5 with method='ngram'"),
        (drafts("scripted", acceptance_rate=2), "acceptance_rate=2 is no share"),
        (drafts("draft_model", num_hidden_layers=1), "no checkpoint drafts"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "model=None"),
        ("ngram", "is no configuration"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(given)


# Drawn trials -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_drawn_trials(seed: int) -> None:
    problems, _ = compare(draw_trial(seed))
    assert problems == []
