"""Structured output: inside the language at every token, whatever happens to the request."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_model import engine, generate_one

from preempt_engine import SamplingParams, StructuredOutputsParams
from preempt_engine.errors import ConfigError, InfeasibleRequestError

pytest.importorskip("xgrammar")

PROMPT = [3, 4, 5, 6]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "n", "flags"],
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=80)
preemptions = st.lists(st.integers(1, 60), max_size=8, unique=True)


def structured(**kind: object) -> SamplingParams:
    """Greedy parameters with a grammar."""
    return replace(GREEDY, structured_outputs=StructuredOutputsParams(**kind))  # type: ignore[arg-type]


@settings(max_examples=25)
@given(preempt_at=preemptions, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 9))
def test_the_same_json_under_preemption(
    preempt_at: list[int], temperature: float, seed: int
) -> None:
    params = replace(structured(json=SCHEMA), temperature=temperature, seed=seed)
    output = generate_one(engine(preempt_at), PROMPT, params).outputs[0]
    assert output.finish_reason == "stop"
    value = json.loads(output.text)
    assert list(value) == ["name", "n", "flags"]
    assert re.fullmatch("[a-z]{1,8}", value["name"])
    assert 0 <= value["n"] <= 99
    assert all(isinstance(flag, bool) for flag in value["flags"])
    assert output.token_ids == generate_one(engine(), PROMPT, params)["token_ids"]


@settings(max_examples=25)
@given(preempt_at=preemptions, regex=st.sampled_from(["[a-f]{2,6}x", "(ab|cd)+z", "[0-9]{5}"]))
def test_a_text_that_matches_the_expression(preempt_at: list[int], regex: str) -> None:
    output = generate_one(engine(preempt_at), PROMPT, structured(regex=regex)).outputs[0]
    if output.finish_reason == "stop":
        assert re.fullmatch(regex, output.text)
    else:
        assert len(output.text) == 80
    assert output.text == generate_one(engine(), PROMPT, structured(regex=regex))["text"]


def test_it_goes_with_penalties_and_bad_words() -> None:
    params = replace(structured(regex="[ab]{6}"), repetition_penalty=9.0, bad_words=["aa"])
    text = generate_one(engine([2, 4]), PROMPT, params, preempted=True)["text"]
    assert re.fullmatch("[ab]{6}", str(text))
    assert "aa" not in text


@pytest.mark.parametrize(
    "kind", [{"regex": "[a"}, {"json": "{"}, {"json": {"type": 3}}], ids=["regex", "text", "type"]
)
def test_a_malformed_grammar_ends_its_request_alone(kind: dict[str, object]) -> None:
    params = [structured(**kind), GREEDY]
    wrong, other = engine().generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert isinstance(wrong.error, InfeasibleRequestError)
    assert "cannot be compiled" in str(wrong.error)
    assert other.error is None


def test_a_complete_text_that_must_go_on_is_an_error() -> None:
    params = replace(structured(regex="[ab]{2}"), min_tokens=5)
    output = generate_one(engine(), PROMPT, params)
    assert len(output["token_ids"]) == 2
    assert "by min_tokens and structured_outputs" in str(output.error)


@pytest.mark.parametrize("kind", [{}, {"json": "{}", "regex": "a"}])
def test_exactly_one_language_is_given(kind: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        StructuredOutputsParams(**kind)  # type: ignore[arg-type]


def test_ignoring_the_end_contradicts_a_grammar() -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        replace(structured(regex="a"), ignore_eos=True)


def test_without_a_tokenizer_or_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine(skip_tokenizer_init=True).add_request(PROMPT, structured(regex="a"))
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"preempt-harness\[grammar\]"):
        engine().add_request(PROMPT, structured(regex="a"))
