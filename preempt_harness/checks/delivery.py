"""Delivery: what reached the user, piece by piece and as a whole.

Judges the stream (`TokensDelivered`) against the results and the results against what the workload
asked for. Knows no blocks and no steps but as places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import first_difference
from preempt_harness.checks.trace import DeliveredRows, Trace
from preempt_harness.record import (
    Aborted,
    EngineError,
    Finished,
    Header,
    PlanApplied,
    RequestResult,
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
        _judge_prompt_logprobs(request, spec, result, listing)
        if record.header.batch_invariant and baseline is not None:
            _compare_prompt_logprobs(request, result, baseline, listing)
        for branch, output in enumerate(result.outputs):
            seq = f"{request}.{branch}"
            _judge_logprobs(seq, spec, output, listing)
            _judge_streamed(seq, output, result.finished, listing)
            _judge_length(seq, record.header, spec, output, listing)
            _judge_stops(seq, record.header, spec, output, listing)
            for what in _wrong_finish(record.header, spec, result, output, request in aborted):
                listing.report(Code.DEL_FINISH_REASON, None, what, seq=seq, once=seq)
            if baseline is not None and branch < len(baseline.outputs):
                cut_short = request in aborted or was_aborted(baseline) or bool(result.error)
                reference = baseline.outputs[branch]
                _compare_finish(seq, output, reference, cut_short, listing)
                if record.header.batch_invariant and not cut_short:
                    _compare_score(seq, output, reference, listing)
    return listing.result("delivery", "results")


def _aborted(trace: Trace) -> set[str]:
    """Requests that somebody aborted, by the log or, if it does not tell, by the workload."""
    if trace.sees("Aborted"):
        return {event.request for event in trace.of(Aborted)}
    asked = {item.request for item in trace.workload.operations if item.kind == "abort"}
    by_plan = {request for request in trace.specs if f"{_ABORT}{request}@" in trace.header.plan}
    return asked | by_plan


def was_aborted(reference: RequestResult) -> bool:
    """A request of the baseline was cut short: steps bring more tokens where drafts come true."""
    return any(output.finish_reason == "abort" for output in reference.outputs)


def _judge_logprobs(seq: str, spec: RequestSpec, output: SequenceOutput, listing: Listing) -> None:
    if spec.sampling.logprobs is None:
        return
    entries = output.logprobs or []
    if len(entries) != len(output.token_ids):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"log probabilities were asked for; the output has {len(output.token_ids)} tokens "
            f"and {len(entries)} entries",
            seq=seq,
        )
        return
    for index, (token_id, entry) in enumerate(zip(output.token_ids, entries, strict=True)):
        if token_id not in entry:
            listing.report(
                Code.DEL_LOGPROBS,
                None,
                f"output token {index} is {token_id}, its log probabilities are of tokens "
                f"{sorted(entry)} only",
                once=seq,
                seq=seq,
                position=spec.num_prompt_tokens + index,
            )
            return
    _judge_sum(seq, output, entries, listing)


def _judge_sum(
    seq: str, output: SequenceOutput, entries: Sequence[dict[int, float]], listing: Listing
) -> None:
    """What an engine adds up on the way is the sum of all its entries, each taken once."""
    mine = output.cumulative_logprob
    if mine is None:
        return
    chosen = [entry[token] for token, entry in zip(output.token_ids, entries, strict=True)]
    total = math.fsum(chosen)
    # Adding n numbers in float32 errs by at most (n - 1) 2**-24 of the sum of their sizes (Higham,
    # "Accuracy and Stability of Numerical Algorithms", section 4.2), and as much again may be lost
    # where each was rounded.
    noise = 2 * len(chosen) * 2.0**-24 * math.fsum(map(abs, chosen))
    if not math.isclose(mine, total, rel_tol=0.0, abs_tol=noise):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"the cumulative log probability is {mine:g}, those of its {len(chosen)} tokens add up "
            f"to {total:g}",
            seq=seq,
        )


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


def _compare_score(
    seq: str, output: SequenceOutput, baseline: SequenceOutput, listing: Listing
) -> None:
    """A batch-invariant engine ranks equal beams by equal scores."""
    if output.token_ids == baseline.token_ids and output.score != baseline.score:
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"the same tokens score {output.score}, unpreempted {baseline.score}, although the "
            f"engine claims batch invariance",
            seq=seq,
        )


def _judge_prompt_logprobs(
    request: str, spec: RequestSpec, result: RequestResult, listing: Listing
) -> None:
    """One entry a prompt token, each with its token; nothing predicts the first."""
    entries = result.prompt_logprobs
    if spec.sampling.prompt_logprobs is None or result.error or not result.finished:
        return
    # A request that was given up in its prefill has those of its beginning.
    given_up = any(output.finish_reason == "abort" for output in result.outputs)
    if entries is None or (len(entries) != spec.num_prompt_tokens and not given_up):
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"log probabilities of the prompt were asked for; it has {spec.num_prompt_tokens} "
            f"tokens and {len(entries or ())} entries",
            request=request,
        )
        return
    for index, (token_id, entry) in enumerate(zip(spec.prompt_token_ids, entries, strict=False)):
        if index and (entry is None or token_id not in entry):
            listing.report(
                Code.DEL_LOGPROBS,
                None,
                f"prompt token {index} is {token_id}, its log probabilities are of tokens "
                f"{sorted(entry or ())} only",
                request=request,
                position=index,
            )
            return


def _compare_prompt_logprobs(
    request: str, result: RequestResult, baseline: RequestResult, listing: Listing
) -> None:
    """As far as both go, they are the same."""
    mine, other = result.prompt_logprobs or [], baseline.prompt_logprobs or []
    num_both = min(len(mine), len(other))
    index = first_difference(mine[:num_both], other[:num_both])
    if index is not None:
        listing.report(
            Code.DEL_LOGPROBS,
            None,
            f"from prompt token {index} on its log probabilities are not those of the unpreempted "
            f"run, although the engine claims batch invariance",
            request=request,
            position=index,
        )


def _judge_length(
    seq: str, header: Header, spec: RequestSpec, output: SequenceOutput, listing: Listing
) -> None:
    length = len(output.token_ids)
    most = header.max_total_tokens
    if most is not None and length and spec.num_prompt_tokens + length > most:
        listing.report(
            Code.DEL_MAX_TOKENS,
            None,
            f"prompt and output are {spec.num_prompt_tokens + length} tokens, model and pool allow "
            f"{most}",
            seq=seq,
        )
    if length > spec.sampling.max_tokens:
        listing.report(
            Code.DEL_MAX_TOKENS,
            None,
            f"{length} tokens were generated, max_tokens is {spec.sampling.max_tokens}",
            seq=seq,
        )
    if output.finish_reason == "stop" and length < spec.sampling.min_tokens:
        listing.report(
            Code.DEL_MIN_TOKENS,
            None,
            f"it stopped after {length} tokens, min_tokens is {spec.sampling.min_tokens}",
            seq=seq,
        )


def _judge_stops(
    seq: str, header: Header, spec: RequestSpec, output: SequenceOutput, listing: Listing
) -> None:
    """No token that ends an output stands before its last one, but among the first min_tokens.

    Of beams nobody sees those that ended.
    """
    sampling = spec.sampling
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(header.eos_token_ids)
    if sampling.beam is not None or stops.isdisjoint(output.token_ids[:-1]):
        return
    for index, token_id in enumerate(output.token_ids[:-1]):
        if token_id in stops and index >= sampling.min_tokens:
            listing.report(
                Code.DEL_PAST_STOP,
                None,
                f"output token {index} is {token_id}, which ends it, and "
                f"{len(output.token_ids) - index - 1} more follow",
                seq=seq,
                position=spec.num_prompt_tokens + index,
            )
            return


def _wrong_finish(
    header: Header, spec: RequestSpec, result: RequestResult, output: SequenceOutput, aborted: bool
) -> Iterator[str]:
    """What is wrong with how an output ended."""
    reason = output.finish_reason
    if reason == "length":
        if not at_limit(header, spec, len(output.token_ids)):
            yield (
                f"finish reason 'length' after {len(output.token_ids)} tokens, but max_tokens is "
                f"{spec.sampling.max_tokens} and no limit of model or pool is reached"
            )
    elif reason == "stop":
        yield from _wrong_stop(header, spec, output)
    elif reason == "abort":
        if not aborted:
            yield "finish reason 'abort', but nobody aborted it"
        elif "Aborted" in header.observed and _ended_by_itself(header, spec, output):
            yield "finish reason 'abort', but with its last token it had ended by itself"
    elif reason == "error":
        if not result.error:
            yield "finish reason 'error' without an error"
    elif reason is not None:
        yield f"finish reason {reason!r} is none of 'stop', 'length', 'abort', 'error'"
    elif result.finished and not result.error:
        yield "it is finished without a finish reason"


def _ended_by_itself(header: Header, spec: RequestSpec, output: SequenceOutput) -> bool:
    """Whether the last token ends an output; of beams nobody sees that."""
    sampling, length = spec.sampling, len(output.token_ids)
    if sampling.beam is not None or not length:
        return False
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(header.eos_token_ids)
    is_stop = output.token_ids[-1] in stops and length > sampling.min_tokens
    return is_stop or length >= sampling.max_tokens


def at_limit(header: Header, spec: RequestSpec, num_output_tokens: int) -> bool:
    """Whether max_tokens, the model or the pool ends an output of the request here."""
    if num_output_tokens >= spec.sampling.max_tokens:
        return True
    total = spec.num_prompt_tokens + num_output_tokens
    if header.max_total_tokens is not None and spec.sampling.num_sequences == 1:
        return total >= header.max_total_tokens
    model = header.config.get("max_model_len")
    if isinstance(model, int) and total >= model:
        return True
    # An engine may keep one block for itself; branches share the prompt and divide the rest.
    shared = spec.num_prompt_tokens // header.block_size
    own = max(0, header.num_blocks - 1 - shared) // spec.sampling.num_sequences
    return total >= (shared + own) * header.block_size


def _wrong_stop(header: Header, spec: RequestSpec, output: SequenceOutput) -> Iterator[str]:
    sampling = spec.sampling
    last = output.token_ids[-1] if output.token_ids else None
    if last in sampling.stop_token_ids:
        return
    if any(isinstance(output.stop_reason, str) and output.stop_reason == s for s in sampling.stop):
        stop = str(output.stop_reason)
        if stop in output.text and not sampling.min_tokens:  # one before those is none
            yield f"it stopped at {stop!r}, which is still in its text"
        return
    if sampling.ignore_eos and not sampling.stop:
        yield (
            f"finish reason 'stop' at token {last}, which is none of its stop tokens "
            f"{list(sampling.stop_token_ids)}, and end-of-sequence is to be ignored"
        )
    elif (
        header.eos_token_ids
        and last not in header.eos_token_ids
        and not (sampling.stop or sampling.regex or sampling.json_schema)
    ):
        yield (
            f"finish reason 'stop' at token {last}, which is neither end-of-sequence "
            f"({', '.join(map(str, header.eos_token_ids))}) nor one of its stop tokens "
            f"{list(sampling.stop_token_ids)}"
        )


def _compare_finish(
    seq: str, output: SequenceOutput, baseline: SequenceOutput, aborted: bool, listing: Listing
) -> None:
    """Equal tokens are equal text, and end for equal reasons."""
    if aborted or output.token_ids != baseline.token_ids:
        return
    if output.text != baseline.text:
        at = first_difference(output.text, baseline.text) or 0
        listing.report(
            Code.DEL_TEXT,
            None,
            f"the same tokens are another text from character {at}: "
            f"{output.text[at : at + 20]!r}, unpreempted {baseline.text[at : at + 20]!r}",
            seq=seq,
        )
    mine = (output.finish_reason, output.stop_reason)
    other = (baseline.finish_reason, baseline.stop_reason)
    if mine != other:
        listing.report(
            Code.DEL_FINISH_REASON,
            None,
            f"the same tokens ended with (finish reason, stop reason) {mine}, unpreempted with "
            f"{other}",
            once=seq,
            seq=seq,
        )
