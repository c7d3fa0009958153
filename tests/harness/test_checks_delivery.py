"""Delivery: every code is found when planted, and a clean run has none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from fake_engine import run_fake
from fake_trials import make_workload

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.checks import Code, Finding, run_checks
from preempt_harness.faults import Fault, plant
from preempt_harness.faults.fault import Patch
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import (
    Aborted,
    EngineError,
    Finished,
    PlanApplied,
    RequestResult,
    SequenceOutput,
    StreamedOutput,
    TokensDelivered,
    TrialRecord,
)
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

replace = msgspec.structs.replace


def delivery(record: TrialRecord) -> list[Finding]:
    return list(run_checks(record, ["delivery"]).findings)


def codes(record: TrialRecord) -> list[Code]:
    return [finding.code for finding in delivery(record)]


@pytest.fixture
def record() -> TrialRecord:
    """Two requests of six output tokens, r0 with log probabilities."""
    workload = make_workload([6, 9], max_tokens=6)
    first, second = workload.requests
    first = replace(first, sampling=SamplingSpec(max_tokens=6, logprobs=0))
    made = run_fake(Workload(requests=[first, second]), num_blocks=8)
    assert delivery(made) == []
    return made


def pieces(record: TrialRecord, seq: str) -> list[int]:
    """Indices of the sequence's deliveries."""
    return [
        index
        for index, event in enumerate(record.events)
        if isinstance(event, TokensDelivered) and event.seq == seq
    ]


def change_output(record: TrialRecord, request: str, **changes: object) -> None:
    result = record.results[request]
    record.results[request] = replace(result, outputs=[replace(result.outputs[0], **changes)])


def change_sampling(record: TrialRecord, **changes: object) -> None:
    """Of r1, in the workload that the record says was run."""
    record.header.workload["requests"][1]["sampling"].update(changes)


# The stream ---------------------------------------------------------------------------------------


def test_repeated_piece_is_found_at_its_place(record: TrialRecord) -> None:
    index = pieces(record, "r1.0")[2]
    record.events.insert(index, record.events[index])
    finding = delivery(record)[0]
    assert finding.code == Code.DEL_TOKEN_REPEATED
    assert (finding.request, finding.sequence) == ("r1", "r1.0")
    assert finding.position == 3
    assert f"tokens {record.events[index].token_ids} are delivered" in finding.message


def test_lost_piece_is_found_at_its_place(record: TrialRecord) -> None:
    del record.events[pieces(record, "r1.0")[2]]
    finding = delivery(record)[0]
    assert (finding.code, finding.position) == (Code.DEL_TOKEN_LOST, 2)


def test_two_generations_spliced_are_found(record: TrialRecord) -> None:
    for index in pieces(record, "r1.0")[3:]:
        record.events[index] = replace(record.events[index], token_ids=[0])
    finding = delivery(record)[0]
    assert (finding.code, finding.position) == (Code.DEL_TOKEN_CHANGED, 3)


def test_text_that_does_not_add_up_is_found(record: TrialRecord) -> None:
    index = pieces(record, "r1.0")[1]
    record.events[index] = replace(record.events[index], text="?")
    assert codes(record) == [Code.DEL_TEXT]


def test_token_without_log_probability_is_found(record: TrialRecord) -> None:
    index = pieces(record, "r0.0")[1]
    record.events[index] = replace(record.events[index], logprobs=[])
    finding = delivery(record)[0]
    assert (finding.code, finding.step) == (Code.DEL_LOGPROBS, record.events[index].step)


@pytest.mark.parametrize("end", [Finished, Aborted])
def test_token_after_the_end_is_found(record: TrialRecord, end: type) -> None:
    last = pieces(record, "r1.0")[-1]
    step = record.events[last].step
    event = Finished(step, "r1", "length") if end is Finished else Aborted(step, "r1")
    record.events.insert(last, event)
    assert Code.DEL_LATE in codes(record)


def test_token_after_an_abort_of_the_plan_is_found_where_it_takes_effect_at_once(
    record: TrialRecord,
) -> None:
    last = pieces(record, "r1.0")[-1]
    event = PlanApplied(record.events[last].step, "abort:r1@step=5", "r1")
    record.events.insert(last, event)
    record.header = replace(record.header, capabilities=[])
    assert codes(record) == []
    record.header = replace(record.header, capabilities=["stepped"])
    assert codes(record) == [Code.DEL_LATE]
    record.events[last + 1] = replace(record.events[last + 1], token_ids=[], text="held back")
    assert Code.DEL_LATE not in codes(record)


def test_pieces_without_their_log_probabilities_are_found(record: TrialRecord) -> None:
    indices = pieces(record, "r0.0")
    record.events[indices[2]] = replace(record.events[indices[2]], logprobs=None)
    (finding,) = delivery(record)
    assert (finding.code, finding.position) == (Code.DEL_LOGPROBS, 6 + 2)
    assert finding.step == record.events[indices[-1]].step
    for index in indices:  # a stream that never carries any is another engine's way
        record.events[index] = replace(record.events[index], logprobs=None)
    assert codes(record) == []


def test_tokens_of_an_unknown_request_are_found(record: TrialRecord) -> None:
    record.events.append(TokensDelivered(9, "r7.0", [1]))
    assert codes(record) == [Code.DEL_UNKNOWN]


# Results ------------------------------------------------------------------------------------------


def test_missing_result_is_found_unless_the_engine_crashed(record: TrialRecord) -> None:
    del record.results["r1"]
    assert codes(record) == [Code.DEL_NO_RESULT]
    record.events.append(EngineError(9, "signal", "killed"))
    assert codes(record) == []


def test_result_of_an_unknown_request_is_found(record: TrialRecord) -> None:
    record.results["r7"] = record.results["r1"]
    assert Code.DEL_UNKNOWN in codes(record)


def test_result_with_too_few_log_probabilities_is_found(record: TrialRecord) -> None:
    output = record.results["r0"].outputs[0]
    assert output.logprobs is not None
    change_output(record, "r0", logprobs=output.logprobs[:-1])
    assert codes(record) == [Code.DEL_LOGPROBS]


def test_log_probabilities_without_the_chosen_token_are_found(record: TrialRecord) -> None:
    output = record.results["r0"].outputs[0]
    assert output.logprobs is not None
    change_output(record, "r0", logprobs=[*output.logprobs[:-1], {99: -1.0}])
    finding = delivery(record)[0]
    assert (finding.code, finding.position) == (Code.DEL_LOGPROBS, 6 + 5)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_sum_of_log_probabilities_with_a_token_lost_or_twice_is_found(
    record: TrialRecord, times: int
) -> None:
    output = record.results["r0"].outputs[0]
    each = [{token: -0.1 * (index + 1)} for index, token in enumerate(output.token_ids)]
    for index, entry in zip(pieces(record, "r0.0"), each, strict=True):
        record.events[index] = replace(record.events[index], logprobs=[entry])
    rounding = 1e-8
    first = each[0][output.token_ids[0]]
    total = sum(sum(entry.values()) for entry in each) + (times - 1) * first + rounding
    change_output(record, "r0", logprobs=each, cumulative_logprob=total)
    assert codes(record) == ([] if times == 1 else [Code.DEL_LOGPROBS])


@pytest.mark.parametrize("share", [0.9, -0.9, 1.1, -1.1])
def test_a_sum_of_log_probabilities_may_be_off_by_what_float32_loses(
    record: TrialRecord, share: float
) -> None:
    output = record.results["r0"].outputs[0]
    each = [{token: -1.0} for token in output.token_ids]
    for index, entry in zip(pieces(record, "r0.0"), each, strict=True):
        record.events[index] = replace(record.events[index], logprobs=[entry])
    total = -6.0 + share * 2 * 6 * 2.0**-24 * 6.0
    change_output(record, "r0", logprobs=each, cumulative_logprob=total)
    assert codes(record) == ([] if abs(share) < 1 else [Code.DEL_LOGPROBS])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (None, "6 tokens and 0 entries"),
        ([None, {1: -1.0}], "6 tokens and 2 entries"),
        ([None, *({token: -1.0} for token in (0, 0, 0, 0, 0))], "prompt token 1 is"),
    ],
)
def test_log_probabilities_of_a_prompt_that_are_not_its_own_are_found(
    record: TrialRecord, entries: list[dict[int, float] | None] | None, words: str
) -> None:
    spec = record.header.workload["requests"][0]
    spec["sampling"]["prompt_logprobs"] = 0
    whole = [None, *({token: -1.0} for token in spec["prompt_token_ids"][1:])]
    record.baseline = None
    record.results["r0"] = replace(record.results["r0"], prompt_logprobs=whole)
    assert codes(record) == []
    record.results["r0"] = replace(record.results["r0"], prompt_logprobs=entries)
    (finding,) = delivery(record)
    assert finding.code == Code.DEL_LOGPROBS
    assert words in finding.message


def test_log_probabilities_of_a_prompt_that_differ_from_the_baselines_are_found(
    record: TrialRecord,
) -> None:
    assert record.baseline is not None
    spec = record.header.workload["requests"][0]
    spec["sampling"]["prompt_logprobs"] = 0
    whole = [None, *({token: -1.0} for token in spec["prompt_token_ids"][1:])]
    for results, last in ((record.results, -1.0), (record.baseline.results, -2.0)):
        entries = [*whole[:-1], {spec["prompt_token_ids"][-1]: last}]
        results["r0"] = replace(results["r0"], prompt_logprobs=entries)
    record.header = replace(record.header, batch_invariant=False)
    assert codes(record) == []
    record.header = replace(record.header, batch_invariant=True)
    (finding,) = delivery(record)
    assert (finding.code, finding.position) == (Code.DEL_LOGPROBS, 5)


def test_another_text_of_the_same_tokens_is_found(record: TrialRecord) -> None:
    index = pieces(record, "r1.0")[-1]
    text = record.results["r1"].outputs[0].text
    change_output(record, "r1", text=f"{text}?")
    record.events[index] = replace(record.events[index], text=f"{record.events[index].text}?")
    (finding,) = delivery(record)
    assert finding.code == Code.DEL_TEXT
    assert "unpreempted" in finding.message


def test_more_tokens_than_max_tokens_are_found(record: TrialRecord) -> None:
    change_sampling(record, max_tokens=5)
    assert codes(record) == [Code.DEL_MAX_TOKENS]


def test_stop_before_min_tokens_is_found(record: TrialRecord) -> None:
    last = record.results["r1"].outputs[0].token_ids[-1]
    change_sampling(record, min_tokens=7, stop_token_ids=[last], max_tokens=9)
    change_output(record, "r1", finish_reason="stop")
    record.baseline = None
    assert codes(record) == [Code.DEL_MIN_TOKENS]


def test_output_that_goes_on_behind_a_stop_token_is_found(record: TrialRecord) -> None:
    ids = record.results["r1"].outputs[0].token_ids
    index = next(i for i in range(1, len(ids) - 1) if ids.index(ids[i]) == i)
    change_sampling(record, stop_token_ids=[ids[index]])
    assert codes(record) == [Code.DEL_PAST_STOP]
    change_sampling(record, stop_token_ids=[ids[index]], min_tokens=index + 1)
    assert codes(record) == []


def test_output_that_goes_on_behind_end_of_sequence_is_found(record: TrialRecord) -> None:
    ids = record.results["r1"].outputs[0].token_ids
    record.header = replace(record.header, eos_token_ids=[ids[0]])
    assert codes(record) == []
    change_sampling(record, ignore_eos=False)
    assert codes(record) == [Code.DEL_PAST_STOP]


def test_stop_at_another_token_than_end_of_sequence_is_found(record: TrialRecord) -> None:
    ids = record.results["r1"].outputs[0].token_ids
    record.baseline = None
    change_sampling(record, ignore_eos=False)
    change_output(record, "r1", finish_reason="stop")
    assert codes(record) == []  # which tokens end a sequence is not known
    record.header = replace(record.header, eos_token_ids=[ids[-1] + 1])
    assert codes(record) == [Code.DEL_FINISH_REASON]
    assert ids[-1] not in ids[:-1]
    record.header = replace(record.header, eos_token_ids=[ids[-1]])
    assert codes(record) == []


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda record: change_output(record, "r1", finish_reason="stop"), "none of its stop"),
        (lambda record: change_output(record, "r1", finish_reason="abort"), "nobody aborted"),
        (lambda record: change_output(record, "r1", finish_reason="error"), "without an error"),
        (lambda record: change_output(record, "r1", finish_reason="done"), "is none of"),
        (lambda record: change_output(record, "r1", finish_reason=None), "without a finish"),
        (lambda record: change_sampling(record, max_tokens=9), "no limit"),
    ],
)
def test_wrong_finish_reason_is_found(
    record: TrialRecord, plant: Callable[[TrialRecord], None], words: str
) -> None:
    plant(record)
    record.baseline = None
    found = delivery(record)
    assert [finding.code for finding in found] == [Code.DEL_FINISH_REASON]
    assert words in found[0].message


def test_other_stop_reason_than_the_baselines_is_found(record: TrialRecord) -> None:
    change_sampling(record, stop_token_ids=[record.results["r1"].outputs[0].token_ids[-1]])
    change_output(record, "r1", finish_reason="stop")
    found = delivery(record)
    assert [finding.code for finding in found] == [Code.DEL_FINISH_REASON]
    assert "unpreempted" in found[0].message


def outcome(
    sampling: SamplingSpec, output: SequenceOutput, *, max_total_tokens: int | None = None
) -> list[Code]:
    """Codes for one request that got `output`."""
    spec = RequestSpec(id="r0", prompt_token_ids=[1, 2], sampling=sampling)
    made = run_fake(make_workload([2], max_tokens=1))
    made.header = replace(
        made.header,
        workload=Workload(requests=[spec]).to_builtins(),
        observed=[],
        max_total_tokens=max_total_tokens,
    )
    made.results = {"r0": RequestResult(outputs=[output], finished=True)}
    made.baseline = None
    return codes(made)


def test_stop_string_is_cut_from_the_text() -> None:
    sampling = SamplingSpec(stop=("<5>",))
    cut = SequenceOutput(token_ids=[4, 5], text="<4>", finish_reason="stop", stop_reason="<5>")
    assert outcome(sampling, cut) == []
    assert outcome(sampling, replace(cut, text="<4><5>")) == [Code.DEL_FINISH_REASON]
    early = replace(sampling, min_tokens=2)  # one that ended before those is none
    assert outcome(early, replace(cut, text="<5><4>")) == []


def test_end_of_sequence_may_stop_a_request_that_does_not_ignore_it() -> None:
    output = SequenceOutput(token_ids=[4, 0], finish_reason="stop")
    assert outcome(SamplingSpec(ignore_eos=False), output) == []
    assert outcome(SamplingSpec(ignore_eos=True), output) == [Code.DEL_FINISH_REASON]


def test_model_or_pool_may_end_a_request_by_length() -> None:
    output = SequenceOutput(token_ids=[4] * 6, finish_reason="length")
    assert outcome(SamplingSpec(max_tokens=9), output, max_total_tokens=8) == []
    assert outcome(SamplingSpec(max_tokens=9), output, max_total_tokens=9) == [
        Code.DEL_FINISH_REASON
    ]


@pytest.mark.parametrize(("num_outputs", "is_full"), [(9, False), (10, True)])
def test_branches_divide_what_the_pool_has_beyond_the_full_blocks_of_the_prompt(
    num_outputs: int, is_full: bool
) -> None:
    """Of 10 blocks of 4 one may be kept and 3 are the prompt's: 3 more for each of two branches."""
    sampling = SamplingSpec(n=2, temperature=1.0, max_tokens=99)
    made = run_fake(make_workload([2], max_tokens=1))
    made.header = replace(
        made.header,
        workload=Workload(
            requests=[RequestSpec(id="r0", prompt_token_ids=[1] * 14, sampling=sampling)]
        ).to_builtins(),
        observed=[],
        num_blocks=10,
        block_size=4,
        max_total_tokens=24,  # of a request of one branch, so not what is judged by
    )
    output = SequenceOutput(token_ids=[4] * num_outputs, finish_reason="length")
    made.results = {"r0": RequestResult(outputs=[output, output], finished=True)}
    made.baseline = None
    found = [finding.code for finding in delivery(made)]
    assert found == ([] if is_full else [Code.DEL_FINISH_REASON] * 2)


def test_other_tokens_may_be_another_text_and_end_otherwise(record: TrialRecord) -> None:
    """Whether they may be other tokens is for another check."""
    assert record.baseline is not None
    other = replace(record.baseline.results["r1"].outputs[0], text="?", finish_reason="stop")
    longer = replace(other, token_ids=[*other.token_ids, 9])
    record.baseline.results["r1"] = replace(record.baseline.results["r1"], outputs=[longer])
    assert codes(record) == []
    record.baseline.results["r1"] = replace(
        record.baseline.results["r1"], outputs=[replace(other, finish_reason="length")]
    )
    assert codes(record) == [Code.DEL_TEXT]


@pytest.mark.parametrize("given_up", [True, False])
def test_who_is_given_up_in_its_prefill_has_the_beginning_of_its_prompts_log_probabilities(
    record: TrialRecord, given_up: bool
) -> None:
    spec = record.header.workload["requests"][0]
    spec["sampling"]["prompt_logprobs"] = 0
    record.baseline = None
    beginning = [None, *({token: -1.0} for token in spec["prompt_token_ids"][1:3])]
    result = replace(record.results["r0"], prompt_logprobs=beginning)
    if given_up:
        record.events.append(Aborted(99, "r0"))
        spec["sampling"]["max_tokens"] += 1  # it had not ended
        result = replace(result, outputs=[replace(result.outputs[0], finish_reason="abort")])
    record.results["r0"] = result
    assert codes(record) == ([] if given_up else [Code.DEL_LOGPROBS])


def test_aborted_request_may_have_any_prefix_and_no_result() -> None:
    workload = make_workload([6, 9], max_tokens=6)
    aborted = Workload(
        requests=workload.requests, operations=[Operation(kind="abort", step=3, request="r1")]
    )
    record = run_fake(aborted, num_blocks=8)
    assert any(isinstance(event, Aborted) for event in record.events)
    assert codes(record) == []
    del record.results["r1"]
    assert codes(record) == []


@pytest.mark.parametrize(
    ("change", "is_found"),
    [({}, True), ({"max_tokens": 9}, False), ({"max_tokens": 9, "stops": True}, True)],
)
def test_who_had_ended_by_itself_was_not_aborted(
    record: TrialRecord, change: dict[str, object], is_found: bool
) -> None:
    change = dict(change)
    change_output(record, "r1", finish_reason="abort")
    if change.pop("stops", False):
        change["stop_token_ids"] = [record.results["r1"].outputs[0].token_ids[-1]]
    change_sampling(record, **change)
    record.header = replace(record.header, observed=[*record.header.observed, "Aborted"])
    record.events.append(Aborted(99, "r1"))
    record.baseline = None
    found = run_checks(record, ["delivery"]).findings
    assert any("had ended by itself" in finding.message for finding in found) == is_found


def test_black_box_engine_is_judged_by_its_results_only(record: TrialRecord) -> None:
    record.header = replace(record.header, observed=[])
    report = run_checks(record, ["delivery"])
    assert report.not_observable == {"delivery/stream": "fake does not show TokensDelivered"}
    assert report.of("delivery")[1].counted == {"results judged": 2}


# The sum, the score and the stream of an output ---------------------------------------------------


def test_a_sum_of_log_probabilities_that_began_again_is_found(record: TrialRecord) -> None:
    output = record.results["r0"].outputs[0]
    assert output.logprobs is not None
    entries = [{token_id: -0.1 * (1 + index)} for index, token_id in enumerate(output.token_ids)]
    values = [next(iter(entry.values())) for entry in entries]
    record.baseline = None
    change_output(record, "r0", logprobs=entries, cumulative_logprob=sum(values))
    for index, entry in zip(pieces(record, "r0.0"), entries, strict=True):
        record.events[index] = replace(record.events[index], logprobs=[entry])
    assert codes(record) == []
    change_output(record, "r0", cumulative_logprob=sum(values[3:]))
    (found,) = delivery(record)
    assert (found.code, found.sequence) == (Code.DEL_LOGPROBS, "r0.0")
    assert "add up to" in found.message


def test_another_score_of_the_same_beam_is_found(record: TrialRecord) -> None:
    assert record.baseline is not None
    reference = record.baseline.results["r1"]
    record.baseline.results["r1"] = replace(
        reference, outputs=[replace(reference.outputs[0], score=-1.5)]
    )
    change_output(record, "r1", score=-1.5)
    assert codes(record) == []
    change_output(record, "r1", score=-1.25)
    (found,) = delivery(record)
    assert found.code == Code.DEL_LOGPROBS
    assert "score -1.25" in found.message
    record.header = replace(record.header, batch_invariant=False)
    assert codes(record) == []


def streamed(record: TrialRecord, **changes: object) -> list[Code]:
    """Codes where r1's stream is its output but for the changes."""
    output = record.results["r1"].outputs[0]
    whole = StreamedOutput(token_ids=output.token_ids, text=output.text, num_ends=1)
    change_output(record, "r1", streamed=replace(whole, **changes))
    return codes(record)


def test_a_stream_that_is_not_the_output_is_found(record: TrialRecord) -> None:
    output = record.results["r1"].outputs[0]
    token_ids, text = output.token_ids, output.text
    assert streamed(record) == []
    assert streamed(record, token_ids=token_ids[:3] + token_ids) == [Code.DEL_TOKEN_REPEATED]
    assert streamed(record, token_ids=token_ids[:2] + token_ids[3:]) == [Code.DEL_TOKEN_LOST]
    assert streamed(record, text=text + "?") == [Code.DEL_TEXT]
    assert streamed(record, num_logprobs=len(token_ids)) == []
    assert streamed(record, num_logprobs=len(token_ids) - 1) == [Code.DEL_LOGPROBS]
    assert streamed(record, num_ends=2) == [Code.DEL_FINISH_REASON]
    assert streamed(record, num_ends=0) == [Code.DEL_FINISH_REASON]
    assert streamed(record, late_steps=[4, 7]) == [Code.DEL_LATE]


def test_the_embedded_engine_is_read_as_a_stream_too() -> None:
    harness = PreemptHarness(EmbeddedAdapter(), {"block_size": 2})
    workload = harness.workload(requests=3, prompt_tokens=9, max_tokens=8)
    result = harness.run(workload, "tight")
    result.assert_preempted()
    result.assert_clean()
    for request in result.record.results.values():
        (output,) = request.outputs
        assert output.streamed is not None
        assert output.streamed.token_ids == output.token_ids
        assert output.streamed.num_ends == 1
        assert output.streamed.late_steps == []


def test_a_step_that_gives_tokens_and_does_not_return_their_output_is_noted() -> None:
    forgets = Fault(
        name="forgets",
        mechanism="a step tells of nobody",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                "preempt_engine.delivery:Delivery.deliver",
                "return list(outputs.values())",
                "return [output for output in outputs.values() if output.finished]",
            ),
        ),
    )
    harness = PreemptHarness(EmbeddedAdapter(), {"block_size": 2})
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=4)
    with plant(forgets):
        settings = replace(harness.settings(), num_blocks=40)
        trial = Trial(engine="embedded", settings=settings, workload=workload)
        record = run_trial(trial, EmbeddedAdapter())
    (output,) = record.results["r0"].outputs
    assert output.streamed is not None
    assert output.streamed.late_steps == [0, 1, 2]
    assert output.streamed.token_ids == output.token_ids
