"""Speculation with real models: bitwise the same output, drafts from the text or from a model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.errors import ConfigError
from preempt_engine.models.config import ModelConfig, resolve_model
from preempt_harness.checkpoints import resolve_model_name

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PHRASE = [5, 9, 13, 21]
PROMPTS = [(PHRASE * 6)[: 14 + 3 * i] for i in range(3)]
FAMILIES = ("llama", "opt", "qwen3")


def build(family: str, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_kv_blocks": 64,
        "deterministic": True,
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 64,
        "poison": True,
        "debug_worker_state": True,
    }
    path = str(resolve_model_name(f"tiny-{family}"))
    return LLM(path, speculative_config=speculative, **(settings | options))


def draft_model(family: str, **more: Any) -> dict[str, Any]:
    path = str(resolve_model_name(f"tiny-{family}"))
    return {"method": "draft_model", "model": path, "num_speculative_tokens": 3, **more}


def run(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    names = [llm.add_request(prompt, params) for prompt in PROMPTS]
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()
    return [outputs[name] for name in names]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_is_the_same_with_drafts_and_preemption(family: str) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=1, ignore_eos=True),
    ]
    with build(family, None) as llm:
        plain = [run(llm, one) for one in params]
    methods = (
        {"method": "ngram", "num_speculative_tokens": 3},
        draft_model(family),
        draft_model(family, num_hidden_layers=1),
    )
    for speculative in methods:
        with build(family, speculative) as llm:
            llm.hold_blocks(64 - 13)
            for one, expected in zip(params, plain, strict=True):
                outputs = run(llm, one)
                assert [item.outputs for item in outputs] == [item.outputs for item in expected]
            assert llm.counters.num_preemptions > 0
            assert llm.counters.num_drafted_tokens > 0


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_right_about_itself(family: str, preemption_mode: str) -> None:
    """Its own KV is dropped, swapped and rebuilt with the target's, so that no draft is wrong."""
    params = SamplingParams(temperature=1.0, seed=2, n=2, max_tokens=20, ignore_eos=True)
    options = {"preemption_mode": preemption_mode, "swap_space_blocks": 64, "num_kv_blocks": 24}
    with build(family, draft_model(family), **options) as llm:
        run(llm, params)
        counters = llm.counters
    assert counters.num_preemptions > 0
    assert counters.num_accepted_tokens > 0
    assert counters.num_rejected_tokens == 0


def test_a_truncated_model_is_right_sometimes() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with build("llama", draft_model("llama", num_hidden_layers=1)) as llm:
        run(llm, params)
        assert llm.counters.num_accepted_tokens > 0
        assert llm.counters.num_rejected_tokens > 0


def test_a_model_is_truncated_to_as_many_layers_as_it_has_at_most() -> None:
    config = ModelConfig.from_directory(resolve_model(str(resolve_model_name("tiny-llama"))))
    short = config.truncated(1)
    assert (short.num_hidden_layers, len(short.layer_windows)) == (1, 1)
    with pytest.raises(ConfigError, match="the checkpoint has"):
        config.truncated(config.num_hidden_layers + 1)


@pytest.mark.slow
def test_a_draft_model_beside_two_ranks() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with build("llama", None, tensor_parallel_size=2) as llm:
        plain = run(llm, params)
    with build("llama", draft_model("llama"), tensor_parallel_size=2, num_kv_blocks=13) as llm:
        drafted = run(llm, params)
        assert llm.counters.num_preemptions > 0
        assert llm.counters.num_drafted_tokens > 0
    assert [item.outputs for item in drafted] == [item.outputs for item in plain]


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "scripted", "num_speculative_tokens": 2}, 'method="scripted" with model'),
        (
            {"method": "draft_model", "model": "exact", "num_speculative_tokens": 2},
            "the draft model's vocab_size is",
        ),
        (draft_model("llama", num_hidden_layers=99), "num_hidden_layers=99"),
    ],
)
def test_a_method_that_cannot_draft_for_the_model_is_refused(
    speculative: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build("llama", speculative)
