"""Delivery: what reached the user, piece by piece and as a whole.

Judges the stream (`TokensDelivered`) against the results and the results against what the workload
asked for. Knows no blocks and no steps but as places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from preempt_harness.checks._delivery_ends import (
    compare_finish,
    judge_length,
    judge_stops,
    was_aborted,
    wrong_finish,
)
from preempt_harness.checks._delivery_logprobs import (
    compare_prompt_logprobs,
    compare_score,
    judge_logprobs,
    judge_prompt_logprobs,
)
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import first_difference
from preempt_harness.checks.trace import DeliveredRows, Trace
from preempt_harness.record import (
    Aborted,
    EngineError,
    Finished,
    PlanApplied,
    SequenceOutput,
    TokensDelivered,
)
from preempt_harness.workload import RequestSpec

STEPPED = "stepped"
"""The capability, as a record's header lists it."""

_ABORT = "abort:"
"""How an action of a plan begins that aborts a request."""

_TO_BE_ABORTED = "to be aborted"


def check_stream(trace: Trace) -> CheckResult:
    """Every token once and in order, and nothing after the end."""
    listing = Listing()
    streams: dict[str, list[TokensDelivered]] = {}
    ended: dict[str, str] = {}
    # Where nothing happens between steps, an abort takes effect at once.
    at_once = STEPPED in trace.header.capabilities
    for event in trace.of(SteadySteps, DeliveredRows, Finished, Aborted, PlanApplied):
        if isinstance(event, DeliveredRows | SteadySteps):
            for seq, row, others in _pieces(event):
                stream = streams.get(seq)
                if stream is None:
                    stream = streams[seq] = []
                if ended or row.logprobs is not None or not stream:
                    _judge_row(row, stream, trace.specs, ended, listing)
                stream.append(row)
                stream += others
        elif not isinstance(event, PlanApplied):
            ended[event.request] = "finished" if isinstance(event, Finished) else "aborted"
        elif at_once and event.action.startswith(_ABORT):
            ended.setdefault(event.request, _TO_BE_ABORTED)
    crashed = trace.has(EngineError)
    for request, result in trace.record.results.items():
        for branch, output in enumerate(result.outputs):
            seq = f"{request}.{branch}"
            listing.count("streams judged")
            # A dead engine cannot hand over what it had just delivered.
            if not (crashed and not result.finished):
                known = streams.get(seq, []) if request in trace.specs else []
                _compare(seq, known, output, listing)
                if known:
                    num_prompt_tokens = trace.specs[request].num_prompt_tokens
                    _compare_streamed_logprobs(seq, known, output, num_prompt_tokens, listing)
    return listing.result("delivery", "stream")


def _pieces(
    event: DeliveredRows | SteadySteps,
) -> Iterator[tuple[str, TokensDelivered, Sequence[TokensDelivered]]]:
    """Sequence, its next piece, and pieces after it of which there is no more to say than of it."""
    if isinstance(event, DeliveredRows):
        for row in event.rows:
            yield row.seq, row, ()
    else:
        for index, seq in enumerate(event.delivered_seqs):
            first, *others = event.delivered(index)
            yield seq, first, others


def _judge_row(
    row: TokensDelivered,
    before: list[TokensDelivered],
    specs: dict[str, RequestSpec],
    ended: dict[str, str],
    listing: Listing,
) -> None:
    """One piece of a stream, whose earlier pieces are `before`."""
    request = request_of(row.seq)
    if request not in specs:
        listing.report(
            Code.DEL_UNKNOWN,
            row.step,
            f"tokens {row.token_ids} are delivered, but the workload has no such request",
            once=row.seq,
            seq=row.seq,
        )
        return
    # Text that was held back comes with the abort, in a piece without tokens.
    if request in ended and (row.token_ids or ended[request] != _TO_BE_ABORTED):
        num_before = sum(len(piece.token_ids) for piece in before)
        listing.report(
            Code.DEL_LATE,
            row.step,
            f"tokens {row.token_ids} are delivered after the request was {ended[request]}",
            once=row.seq,
            seq=row.seq,
            position=specs[request].num_prompt_tokens + num_before,
        )
    if row.logprobs is not None and len(row.logprobs) != len(row.token_ids):
        listing.report(
            Code.DEL_LOGPROBS,
            row.step,
            f"{len(row.token_ids)} tokens are delivered with {len(row.logprobs)} entries of "
            f"log probabilities",
            once=row.seq,
            seq=row.seq,
        )


def _compare(
    seq: str, stream: list[TokensDelivered], output: SequenceOutput, listing: Listing
) -> None:
    token_ids = list(chain.from_iterable([piece.token_ids for piece in stream]))
    last_step = stream[-1].step if stream else 0
    index = first_difference(token_ids, output.token_ids)
    if index is not None:
        code, what = _name_difference(token_ids, output.token_ids, index)
        steps = [piece.step for piece in stream for _ in piece.token_ids]
        step = steps[index] if index < len(steps) else last_step
        listing.report(code, step, what, seq=seq, position=index)
        return
    text = "".join([piece.text for piece in stream])
    at = first_difference(text, output.text)
    if at is not None:
        listing.report(
            Code.DEL_TEXT,
            last_step,
            f"the text pieces add up to something else than the output's text from character "
            f"{at}: {text[at : at + 20]!r} where the output has "
            f"{output.text[at : at + 20]!r}",
            seq=seq,
        )


def _compare_streamed_logprobs(
    seq: str,
    stream: list[TokensDelivered],
    output: SequenceOutput,
    num_prompt_tokens: int,
    listing: Listing,
) -> None:
    """Where pieces carry log probabilities, they add up to the output's; some engines' never do."""
    if output.logprobs is None or len(output.logprobs) != len(output.token_ids):
        return  # the latter is a finding of its own
    if all(piece.logprobs is None for piece in stream):
        return
    entries = list(chain.from_iterable([piece.logprobs or () for piece in stream]))
    index = first_difference(entries, output.logprobs)
    if index is not None:
        listing.report(
            Code.DEL_LOGPROBS,
            stream[-1].step,
            f"the pieces carry {len(entries)} entries of log probabilities, the output has "
            f"{len(output.logprobs)}; they differ from output index {index} on",
            seq=seq,
            position=num_prompt_tokens + index,
        )


def _name_difference(streamed: list[int], final: list[int], index: int) -> tuple[Code, str]:
    surplus = len(streamed) - len(final)
    if surplus > 0 and streamed[index + surplus :] == final[index:]:
        extra = streamed[index : index + surplus]
        return Code.DEL_TOKEN_REPEATED, (
            f"tokens {extra} are delivered at output index {index} in addition to the output's "
            f"{len(final)} tokens"
        )
    if surplus < 0 and streamed[index:] == final[index - surplus :]:
        lost = final[index : index - surplus]
        return Code.DEL_TOKEN_LOST, (
            f"tokens {lost} of the output, from index {index}, were never delivered"
        )
    return Code.DEL_TOKEN_CHANGED, (
        f"from output index {index} the delivered tokens are {streamed[index : index + 8]}, the "
        f"output's are {final[index : index + 8]}"
    )


def check_results(trace: Trace) -> CheckResult:
    """Every request has a result, as long and as complete as it asked for."""
    listing = Listing()
    record, specs = trace.record, trace.specs
    crashed = trace.has(EngineError)
    aborted = _aborted(trace)
    for request in record.results:
        if request not in specs:
            listing.report(
                Code.DEL_UNKNOWN,
                None,
                "there is a result, but the workload has no such request",
                request=request,
            )
    for request, spec in specs.items():
        result = record.results.get(request)
        if result is None or (not result.outputs and not result.error):
            if not crashed and request not in aborted:
                listing.report(
                    Code.DEL_NO_RESULT, None, "the request has no result", request=request
                )
            continue
        listing.count("results judged")
        baseline = record.baseline.results.get(request) if record.baseline else None
        judge_prompt_logprobs(request, spec, result, listing)
        if record.header.batch_invariant and baseline is not None:
            compare_prompt_logprobs(request, result, baseline, listing)
        for branch, output in enumerate(result.outputs):
            seq = f"{request}.{branch}"
            judge_logprobs(seq, spec, output, listing)
            _judge_streamed(seq, output, result.finished, listing)
            judge_length(seq, record.header, spec, output, listing)
            judge_stops(seq, record.header, spec, output, listing)
            for what in wrong_finish(record.header, spec, result, output, request in aborted):
                listing.report(Code.DEL_FINISH_REASON, None, what, seq=seq, once=seq)
            if baseline is not None and branch < len(baseline.outputs):
                cut_short = request in aborted or was_aborted(baseline) or bool(result.error)
                reference = baseline.outputs[branch]
                compare_finish(seq, output, reference, cut_short, listing)
                if record.header.batch_invariant and not cut_short:
                    compare_score(seq, output, reference, listing)
    return listing.result("delivery", "results")


def _aborted(trace: Trace) -> set[str]:
    """Requests that somebody aborted, by the log or, if it does not tell, by the workload."""
    if trace.sees("Aborted"):
        return {event.request for event in trace.of(Aborted)}
    asked = {item.request for item in trace.workload.operations if item.kind == "abort"}
    by_plan = {request for request in trace.specs if f"{_ABORT}{request}@" in trace.header.plan}
    return asked | by_plan


def _judge_streamed(seq: str, output: SequenceOutput, finished: bool, listing: Listing) -> None:
    """What was streamed is the output: nothing twice, nothing left out, and one end."""
    streamed = output.streamed
    if streamed is None:
        return
    listing.count("streamed outputs judged")
    index = first_difference(streamed.token_ids, output.token_ids)
    at = first_difference(streamed.text, output.text)
    if index is not None:
        code, what = _name_difference(streamed.token_ids, output.token_ids, index)
        listing.report(code, None, f"as a stream, {what}", seq=seq, position=index)
    elif at is not None:
        listing.report(
            Code.DEL_TEXT,
            None,
            f"the stream's text is another than the output's from character {at}: "
            f"{streamed.text[at : at + 20]!r}, the output has {output.text[at : at + 20]!r}",
            seq=seq,
        )
    elif streamed.num_logprobs is not None and streamed.num_logprobs != len(streamed.token_ids):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"{len(streamed.token_ids)} tokens are streamed with {streamed.num_logprobs} entries "
            f"of log probabilities",
            seq=seq,
        )
    elif finished and streamed.num_ends != 1:
        listing.report(
            Code.DEL_FINISH_REASON, None, f"its stream ends {streamed.num_ends} times", seq=seq
        )
    elif streamed.late_steps:
        listing.report(
            Code.DEL_LATE,
            streamed.late_steps[0],
            f"the step gave it tokens and did not return its output, so that whoever streams it "
            f"is told later; so did {len(streamed.late_steps) - 1} other steps",
            seq=seq,
        )
