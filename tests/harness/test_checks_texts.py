"""Texts are what tokens decode to, up to the stop string that ends them; every rule both ways."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness import record as records
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import DecodesTokens
from preempt_harness.checks import Code, run_checks
from preempt_harness.decoded import decode_outputs
from preempt_harness.faults.catalogue import select_faults
from preempt_harness.faults.fault import Fault, Patch
from preempt_harness.faults.patching import plant
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import DecodedOutput, SequenceOutput, TrialRecord
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

replace = msgspec.structs.replace

ADAPTER = EmbeddedAdapter()
BY_END = "stop_strings_by_end"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def made(
    words: list[str], *, settled: list[int | None] | None = None, **output: Any
) -> TrialRecord:
    """One request whose tokens are these words; `output` and `sampling` say what it gave."""
    sampling = {"max_tokens": len(words), **output.pop("sampling", {})}
    capabilities = ["text", *output.pop("capabilities", [BY_END])]
    workload = make_workload([6], max_tokens=len(words))
    record = run_fake(workload, num_blocks=8)
    record.header = replace(record.header, capabilities=capabilities)
    record.header.workload["requests"][0]["sampling"].update(sampling)
    text = "".join(words)
    given = {"text": text, "finish_reason": "length", **output}
    token_ids = list(range(len(words)))
    record.results["r0"] = replace(
        record.results["r0"], outputs=[SequenceOutput(token_ids, **given)]
    )
    if settled is None and sampling.get("stop"):
        settled = list(accumulate(map(len, words), initial=0))
    record.decoded = {"r0": [DecodedOutput(text, settled or [])]}
    return record


def codes(record: TrialRecord) -> list[Code]:
    (result,) = (part for part in run_checks(record, ["delivery"]).results if part.part == "texts")
    assert result.not_observable is None
    return [finding.code for finding in result.findings]


def stopped(text: str, at: str, *stops: str, **sampling: Any) -> dict[str, Any]:
    """An output that ended at a stop string."""
    return {
        "text": text,
        "finish_reason": "stop",
        "stop_reason": at,
        "sampling": {"stop": list(stops or (at,)), **sampling},
    }


# What the text is ---------------------------------------------------------------------------------


def test_a_text_that_its_tokens_say_is_sound() -> None:
    assert codes(made(["one ", "two ", "three"])) == []


@pytest.mark.parametrize("text", ["one two thre", "one  two three", "one two three.", ""])
def test_another_text_is_found(text: str) -> None:
    assert codes(made(["one ", "two ", "three"], text=text)) == [Code.DEL_TEXT]


def test_an_output_that_was_cut_off_may_lack_the_end() -> None:
    unfinished: dict[str, Any] = {"finish_reason": None}
    assert codes(made(["one ", "two"], text="one t", **unfinished)) == []
    assert codes(made(["one ", "two"], text="one d", **unfinished)) == [Code.DEL_TEXT]
    assert codes(made(["one ", "two"], text="one t", finish_reason="abort")) == [Code.DEL_TEXT]


def test_a_stop_that_is_not_told_may_cut() -> None:
    untold: dict[str, Any] = {"text": "one t", "finish_reason": "stop"}
    assert codes(made(["one ", "two"], **untold, sampling={"stop": ["wo"]})) == []
    assert codes(made(["one ", "two"], **untold)) == [Code.DEL_TEXT]


# Where it stops -----------------------------------------------------------------------------------


def test_a_text_that_ends_before_its_stop_string_is_sound() -> None:
    assert codes(made(["one ", "two ", "three"], **stopped("one two th", "re"))) == []


def test_a_stop_string_that_is_not_there_is_found() -> None:
    record = made(["one ", "two ", "three"], **stopped("one two th", "er"))
    assert codes(record) == [Code.DEL_FINISH_REASON]


def test_a_stop_string_that_was_not_asked_for_is_found() -> None:
    record = made(["one ", "two ", "three"], **stopped("one two th", "re", "four"))
    assert codes(record) == [Code.DEL_FINISH_REASON]


@pytest.mark.parametrize(
    "output",
    [
        {"sampling": {"stop": ["wo"]}},
        {"sampling": {"stop": ["ee"]}},  # within the last token
        stopped("one two th", "re", "re", "two"),
        stopped("one ", "two"),  # a token after it
    ],
)
def test_going_on_behind_a_stop_string_is_found(output: dict[str, Any]) -> None:
    assert codes(made(["one ", "two ", "three"], **output)) == [Code.DEL_PAST_STOP]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_min_tokens_free_those_that_they_complete(min_tokens: int) -> None:
    sampling = {"stop": ["wo"], "min_tokens": min_tokens}
    expected = [Code.DEL_PAST_STOP] if min_tokens < 2 else []
    assert codes(made(["one ", "two ", "three"], sampling=sampling)) == expected


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_a_stop_string_among_min_tokens_ends_nothing(min_tokens: int) -> None:
    record = made(["one ", "two "], **stopped("one t", "wo", min_tokens=min_tokens))
    assert codes(record) == ([Code.DEL_MIN_TOKENS] if min_tokens >= 2 else [])


def test_an_incomplete_character_leaves_both_ends_open() -> None:
    """The second token ends within a character: what it makes may be told a token later."""
    words, settled = ["ab", "cd", "é", "f"], [0, 2, None, 5, 6]
    on = {"stop": ["cd"]}
    assert codes(made(words, settled=settled, sampling=on)) == [Code.DEL_PAST_STOP]
    assert codes(made(words, settled=settled, sampling={**on, "min_tokens": 2})) == []
    late = stopped("ab", "cd", min_tokens=2)
    assert codes(made(words[:3], settled=settled[:4], **late)) == []
    early = stopped("ab", "cd", min_tokens=3)
    assert codes(made(words[:3], settled=settled[:4], **early)) == [Code.DEL_MIN_TOKENS]


def test_a_stop_string_of_no_character_is_not_judged() -> None:
    words = ["ab", UNKNOWN, "cd"]
    assert codes(made(words, sampling={"stop": [UNKNOWN]})) == []


# Which of several ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "at", "sound"),
    [("x", "abc", True), ("xa", "bc", False), ("xab", "cd", False), ("xab", "c", False)],
)
def test_the_first_end_counts_and_then_the_longest(text: str, at: str, sound: bool) -> None:
    output = stopped(text, at, "cd", "c", "bc", "abc")
    assert codes(made(["x", "abcd"], **output)) == ([] if sound else [Code.DEL_FINISH_REASON])
    assert codes(made(["x", "abcd"], capabilities=[], **output)) == []


# Who decodes --------------------------------------------------------------------------------------


def test_nobody_who_decodes_is_told() -> None:
    record = made(["one"], text="two")
    record.decoded = {}
    report = run_checks(record, ["delivery"])
    assert "nobody has decoded" in report.not_observable["delivery/texts"]
    record.header = replace(record.header, capabilities=[])  # it gives no text at all
    assert run_checks(record, ["delivery"]).not_observable == {}


def test_an_output_that_nobody_could_decode_is_counted() -> None:
    record = made(["one"], text="two")
    record.decoded = {"r0": [None]}
    assert codes(record) == []
    counted = run_checks(record, ["delivery"]).counted
    assert counted["delivery/texts: outputs that nobody decoded"] == 1


def test_a_record_keeps_what_was_decoded() -> None:
    record = made(["one ", "two"], settled=[0, None, 7], text="another")
    record.decoded["r1"] = [None]
    digest = record.digest()
    again = records.from_lines(records.to_lines(record))
    assert again.decoded == record.decoded
    record.decoded = {}
    assert record.digest() == digest


class Words:
    """Decodes like an adapter; the second half of a character is id 1."""

    def decode(self, settings: Any, token_ids: list[int]) -> str | None:
        if 9 in token_ids:
            return None
        halves = "".join("<" if token_id == 0 else ">" for token_id in token_ids)
        return halves.replace("<>", "é").replace("<", UNKNOWN).replace(">", UNKNOWN)


@pytest.mark.parametrize(
    ("sampling", "token_ids", "expected"),
    [
        ({}, [0, 1], DecodedOutput("é")),
        ({"stop": ("é",)}, [0, 1, 0], DecodedOutput("é" + UNKNOWN, [0, None, 1, None])),
        ({"stop_token_ids": (0,)}, [0, 1, 0], DecodedOutput("é")),
        ({"ignore_eos": False}, [0, 1, 1], DecodedOutput("é")),
        ({}, [0, 1, 1], DecodedOutput("é" + UNKNOWN)),
        ({}, [0, 9], None),
    ],
)
def test_what_is_decoded(
    sampling: dict[str, Any], token_ids: list[int], expected: DecodedOutput | None
) -> None:
    """Without a token that ended it, and how much each number of tokens settles."""
    record = made(["one"])
    record.header = replace(record.header, eos_token_ids=[1])
    output = SequenceOutput(token_ids, finish_reason="stop")
    record.results["r0"] = replace(record.results["r0"], outputs=[output, SequenceOutput([0, 1])])
    spec = RequestSpec(id="r0", prompt_token_ids=[1], sampling=SamplingSpec(**sampling))
    settings = PreemptHarness(ADAPTER).settings()
    decoder: Any = Words()
    decoded = decode_outputs(record, settings, Workload(requests=[spec]), decoder)
    assert decoded["r0"][0] == expected
    nobody: Any = object()
    assert decode_outputs(record, settings, Workload(requests=[spec]), nobody) == {}


# The embedded engine ------------------------------------------------------------------------------


def test_the_embedded_adapter_decodes() -> None:
    assert isinstance(ADAPTER, DecodesTokens)
    settings = PreemptHarness(ADAPTER).settings()
    assert ADAPTER.decode(settings, [0, 1, 32]) == '!"A'
    assert ADAPTER.decode(settings, [64]) is None
    assert ADAPTER.decode(settings, [-1]) is None
    assert ADAPTER.decode(replace(settings, options={"skip_tokenizer_init": True}), [0]) is None


@pytest.mark.parametrize(("model", "num_workloads"), [("exact", 6), ("tiny-llama", 2)])
def test_clean_texts_with_stop_strings_are_sound(model: str, num_workloads: int) -> None:
    """Stop strings out of the outputs themselves; tiny-llama's are full of halves of characters."""
    harness, source, ended = PreemptHarness(ADAPTER, {"model": model}), Random(0), 0
    for seed in range(num_workloads):
        workload = harness.workload(
            requests=3, prompt_tokens=(5, 9), max_tokens=16, temperature=1.5, seed=seed
        )
        plain = harness.run(workload, "roomy", block_size=4, expect_preemption=False)
        requests = []
        for request in workload.requests:
            text = plain.record.results[request.id].outputs[0].text
            at = source.randrange(len(text) - 3)
            stops = (text[at : at + source.choice((1, 2, 3))], text[at + 1 : at + 3])
            sampling = replace(request.sampling, stop=stops, min_tokens=source.choice((0, 0, 4, 8)))
            requests.append(replace(request, sampling=sampling))
        result = harness.run(
            Workload(requests=requests), plan="preempt:r0@out=3:recompute", block_size=4
        )
        result.assert_clean()
        assert result.report.counted["delivery/texts: texts judged"] == 3
        ended += sum(
            isinstance(r.outputs[0].stop_reason, str) for r in result.record.results.values()
        )
    assert ended


@pytest.mark.parametrize(
    ("target", "old", "new", "most"),
    [
        ("push", "if text.endswith(_REPLACEMENT):", "if not text:", None),
        ("_push_incomplete", "- num_incomplete)", "+ num_incomplete)", None),
        ("flush", "text[self._num_returned :]", "text[self._num_returned + 1 :]", None),
        ("_push_incomplete", "num_held = len(text) -", "num_held = len(text) +", 1),
    ],
    ids=["told at once", "told too far", "lost at the end", "told again"],
)
def test_halves_of_characters_in_every_run_are_found(
    target: str, old: str, new: str, most: int | None
) -> None:
    """Bytes that never become a character, all the time; both runs give the same text.

    One such byte alone never makes a character: the engine's window of tokens is cut.
    """
    patch = Patch(f"preempt_engine.detokenizer:TextDecoder.{target}", old, new)
    fault = Fault(name="text", mechanism="", source="", expected=("DEL",), patches=(patch,))
    harness = PreemptHarness(ADAPTER, {"model": "tiny-llama"})
    settings, ids = harness.settings(), range(harness.vocab_size)
    halves = [one for one in ids if ADAPTER.decode(settings, [one]) == UNKNOWN][:most]
    workload = harness.workload(
        requests=3,
        prompt_tokens=(5, 9),
        max_tokens=40,
        temperature=1.5,
        seed=1,
        logit_bias=tuple((one, 4.0 if most is None else 40.0) for one in halves),
    )
    plan = "preempt:r0@out=3:recompute"
    harness.run(workload, plan=plan, block_size=4).assert_clean()
    with plant(fault):
        result = PreemptHarness(ADAPTER, {"model": "tiny-llama"}).run(
            workload, plan=plan, block_size=4
        )
    assert {finding.code for finding in result.findings} == {Code.DEL_TEXT}


@pytest.mark.parametrize("fault", select_faults("texts/*"), ids=lambda fault: fault.name)
def test_faults_that_every_run_shares_are_found(fault: Fault) -> None:
    """In an unpreempted run and its baseline, which agree."""
    harness = PreemptHarness(ADAPTER)
    workload = harness.workload(requests=1, prompt_tokens=5, max_tokens=16)
    (request,) = workload.requests
    (output,) = harness.run(workload, "roomy", expect_preemption=False).record.results.values()
    text = output.outputs[0].text
    at = next(index for index in range(8, 14) if text.index(text[index]) == index)
    sampling = {
        "held-text-lost-at-the-end": {"stop": (text[-2:] + "~",)},
        "stop-string-counts-at-min-tokens": {"stop": (text[at],), "min_tokens": at + 1},
        "stop-string-in-pieces-missed": {"stop": (text[at - 1 : at + 1],)},
        "shortest-of-the-stop-strings": {"stop": (text[at - 1 : at + 1], text[at])},
    }[fault.name]
    request = replace(request, sampling=replace(request.sampling, **sampling))
    asked = Workload(requests=[request])
    harness.run(asked, "roomy", expect_preemption=False).assert_clean()
    with plant(fault) as planted:
        result = PreemptHarness(ADAPTER).run(asked, "roomy", expect_preemption=False)
    assert planted.num_reached
    (finding,) = result.findings
    assert finding.code.startswith("DEL")
    assert result.record.baseline is not None
    assert result.record.baseline.results == result.record.results
