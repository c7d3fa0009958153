"""The facade: generate, step, score, errors of single requests, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_engine import LLM, EngineConfig, SamplingParams
from preempt_engine.errors import (
    ConfigError,
    EngineClosedError,
    InfeasibleRequestError,
    ModelNotFoundError,
)
from preempt_engine.exact import EOS_TOKEN_ID, ReferenceSequence, logits_of, reference_generate

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(**options: Any) -> LLM:
    return LLM("exact", **{"block_size": 4, "num_kv_blocks": 32, **options})


def test_generate_returns_outputs_in_the_order_of_the_prompts() -> None:
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    outputs = engine().generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == reference_generate(prompt, 12, 64)
        assert output["token_ids"] == output.outputs[0].token_ids
        assert output["text"] == output.outputs[0].text
        assert output.outputs[0].finish_reason == "length"


def test_text_in_text_out() -> None:
    llm = engine()
    [output] = llm.generate("#$%", GREEDY, use_tqdm=False)
    assert output.prompt == "#$%"
    assert output.outputs[0].text == llm.tokenizer.decode(reference_generate([2, 3, 4], 12, 64))


def test_a_single_list_of_ids_is_one_prompt() -> None:
    assert len(engine().generate([1, 2, 3], GREEDY, use_tqdm=False)) == 1


def test_one_sampling_params_per_prompt() -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = engine().generate([[1], [2]], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [2, 5]
    with pytest.raises(ConfigError, match="2 SamplingParams for 3 prompts"):
        engine().generate([[1], [2], [3]], params, use_tqdm=False)


def test_the_progress_bar_counts_requests(capsys: pytest.CaptureFixture[str]) -> None:
    engine().generate([[1], [2]], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_a_second_generate_on_the_same_engine_gives_the_same() -> None:
    llm = engine()
    first = llm.generate([[1, 2, 3, 4, 5, 6]], GREEDY, use_tqdm=False)
    second = llm.generate([[1, 2, 3, 4, 5, 6]], GREEDY, use_tqdm=False)
    assert first[0]["token_ids"] == second[0]["token_ids"]
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 4)


def test_sampled_output_depends_on_seed_and_arrival_only() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    one = engine(seed=3).generate([[1, 2], [3, 4]], params, use_tqdm=False)
    two = engine(seed=3, max_num_seqs=1).generate([[1, 2], [3, 4]], params, use_tqdm=False)
    other = engine(seed=4).generate([[1, 2], [3, 4]], params, use_tqdm=False)
    assert [o["token_ids"] for o in one] == [o["token_ids"] for o in two]
    assert [o["token_ids"] for o in one] != [o["token_ids"] for o in other]


def test_stop_token_ends_the_request_and_is_its_last_token() -> None:
    reference = reference_generate([1, 2, 3], 12, 64)
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[reference[4]]
    )
    [output] = engine().generate([[1, 2, 3]], params, use_tqdm=False)
    assert output["token_ids"] == reference[:5]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == reference[4]


def test_end_of_sequence_ends_the_request_unless_ignored() -> None:
    prompt = next(
        [n, n + 1] for n in range(60) if EOS_TOKEN_ID in reference_generate([n, n + 1], 30, 64)[:-1]
    )
    params = SamplingParams(temperature=0, max_tokens=30)
    [output] = engine().generate([prompt], params, use_tqdm=False)
    expected = reference_generate(prompt, 30, 64, stop_token_ids={EOS_TOKEN_ID})
    assert output["token_ids"] == expected
    assert output.outputs[0].finish_reason == "stop"


def test_stop_string_cuts_the_text() -> None:
    llm = engine()
    reference = reference_generate([1, 2, 3], 12, 64)
    stop = llm.tokenizer.decode(reference[5:7])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert output["text"] == llm.tokenizer.decode(reference[:5])
    assert output["token_ids"] == reference[:7]
    assert output.outputs[0].stop_reason == stop


def test_logprobs_one_per_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    [output] = engine().generate([[1, 2, 3]], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(logprobs)) == token_id
        assert len(logprobs) == 3
    assert completion.cumulative_logprob == pytest.approx(
        sum(d[t] for t, d in zip(completion.token_ids, completion.logprobs, strict=True))
    )


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("cached", [False, True])
def test_score_is_teacher_forced(budget: int, cached: bool) -> None:
    import math

    llm = engine(max_num_batched_tokens=budget)
    prompt, continuation = [1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4, 3]
    if cached:
        llm.generate([prompt + continuation], GREEDY, use_tqdm=False)
    scores = llm.score(prompt, continuation)
    assert [score.token_id for score in scores] == continuation
    for index, score in enumerate(scores):
        logits = logits_of(ReferenceSequence(prompt + continuation[:index]).digest, 64)
        total = math.log(sum(math.exp(value) for value in logits))
        assert score.logprob == pytest.approx(logits[continuation[index]] - total, abs=1e-6)
        assert score.top_token_id == logits.index(max(logits))
        assert score.top_logprob == pytest.approx(max(logits) - total, abs=1e-6)
    llm.scheduler.check_integrity()


def test_score_survives_a_preemption() -> None:
    class PreemptEveryThirdStep:
        def select_victims(self, step_id: int, running: Any) -> list[str]:
            return [request.request_id for request in running] if step_id % 3 == 2 else []

    disturbed = engine(
        max_num_batched_tokens=2,
        enable_prefix_caching=True,
        preemption_controller=PreemptEveryThirdStep(),
    )
    plain = engine(max_num_batched_tokens=2)
    prompt, continuation = list(range(1, 12)), list(range(12, 40))
    assert disturbed.score(prompt, continuation) == plain.score(prompt, continuation)
    assert disturbed.counters.num_preemptions > 0


def test_score_of_nothing_is_nothing() -> None:
    assert engine().score([1, 2], []) == []


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "The prompt is empty"),
        ([1] * 129, "the pool holds 128"),
        ([64], "Token id 64 at position 0 is not in"),
        ([-1], "Token id -1 at position 0 is not in"),
    ],
)
def test_a_request_that_cannot_run_ends_alone(prompt: list[int], text: str) -> None:
    outputs = engine().generate([[1, 2], prompt, [3]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].error, InfeasibleRequestError)
    assert text in str(outputs[1].error)
    assert outputs[0]["token_ids"] == reference_generate([1, 2], 12, 64)


def test_a_prompt_of_max_model_len_leaves_no_room() -> None:
    outputs = engine(max_model_len=8).generate([[1] * 8, [1] * 7], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert len(outputs[1]["token_ids"]) == 1
    assert outputs[1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_a_request_that_outgrows_the_pool_ends_by_length(num_blocks: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    [output] = engine(num_kv_blocks=num_blocks).generate([[1, 2, 3]], params, use_tqdm=False)
    capacity = num_blocks * 4
    assert output["token_ids"] == reference_generate([1, 2, 3], capacity + 1 - 3, 64)
    assert output.outputs[0].finish_reason == "length"


def test_score_of_what_cannot_fit_is_refused() -> None:
    with pytest.raises(InfeasibleRequestError, match="pool holds 128"):
        engine().score([1] * 100, [2] * 40)


def test_abort_gives_the_output_so_far() -> None:
    llm = engine()
    request_id = llm.add_request([1, 2, 3], GREEDY)
    llm.step()
    llm.step()
    output = llm.abort_request(request_id)
    assert output is not None
    assert output["token_ids"] == reference_generate([1, 2, 3], 2, 64)
    assert output.outputs[0].finish_reason == "abort"
    assert not llm.has_unfinished_requests()
    assert llm.abort_request(request_id) is None
    llm.scheduler.check_integrity()


def test_a_number_that_somebody_took_for_a_name_is_passed_over() -> None:
    llm = engine()
    llm.add_request([1, 2], GREEDY, request_id="1")
    assert [llm.add_request([3, 4 + index], GREEDY) for index in range(2)] == ["2", "3"]
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step() if output.finished}
    assert outputs.keys() == {"1", "2", "3"}


def test_request_ids_are_unique_while_in_use() -> None:
    llm = engine()
    llm.add_request([1], GREEDY, request_id="mine")
    with pytest.raises(ConfigError, match="'mine' is in use"):
        llm.add_request([1], GREEDY, request_id="mine")


def test_generate_refuses_to_mix_with_unfinished_requests() -> None:
    llm = engine()
    llm.add_request([1], GREEDY)
    with pytest.raises(ConfigError, match="unfinished"):
        llm.generate([[2]], GREEDY, use_tqdm=False)


def test_a_closed_engine_says_so() -> None:
    with engine() as llm:
        pass
    llm.close()
    with pytest.raises(EngineClosedError, match="Build a new LLM"):
        llm.add_request([1], GREEDY)


def test_text_without_a_tokenizer_is_refused() -> None:
    llm = engine(skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="Pass token ids"):
        llm.add_request("abc", GREEDY)
    assert llm.generate([[1]], GREEDY, use_tqdm=False)[0]["text"] == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_sise": 4}, "Did you mean 'block_size'"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_kv_blocks": True}, "num_kv_blocks=True"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
        ({"dtype": "int8"}, "float32"),
        ({"block_reuse_order": "lru"}, "fifo, lifo, random"),
        ({"exact_vocab_size": 16}, "32, 256"),
        ({"kv_cache_memory_bytes": 1024}, "each sizes the pool"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(**options)
    assert text in str(caught.value)
    assert caught.value.advice


def test_a_model_path_that_does_not_exist() -> None:
    with pytest.raises(ModelNotFoundError, match="/no/such/model"):
        LLM("/no/such/model")


def test_config_is_frozen() -> None:
    config = EngineConfig(model="exact")
    with pytest.raises(AttributeError):
        config.block_size = 8  # type: ignore[misc]


def test_two_engines_live_side_by_side() -> None:
    one, two = engine(block_size=4), engine(block_size=7, exact_vocab_size=200)
    one.add_request([1, 2, 3], GREEDY)
    two.add_request([1, 2, 3], GREEDY)
    outputs: list[list[int]] = [[], []]
    while one.has_unfinished_requests() or two.has_unfinished_requests():
        for index, llm in enumerate((one, two)):
            for output in llm.step():
                outputs[index] = output["token_ids"]  # type: ignore[assignment]
    assert outputs == [
        reference_generate([1, 2, 3], 12, 64),
        reference_generate([1, 2, 3], 12, 200),
    ]
