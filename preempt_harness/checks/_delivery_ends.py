"""Delivery: how outputs end, and whether they had to.

Judges lengths, stop tokens and finish reasons of results against what the workload asked for, what
model and pool allow, and the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator

from preempt_harness.checks.finding import Code, Listing
from preempt_harness.checks.tables import first_difference
from preempt_harness.record import Header, RequestResult, SequenceOutput
from preempt_harness.workload import RequestSpec


def was_aborted(reference: RequestResult) -> bool:
    """A request of the baseline was cut short: steps bring more tokens where drafts come true."""
    return any(output.finish_reason == "abort" for output in reference.outputs)


def judge_length(
    seq: str, header: Header, spec: RequestSpec, output: SequenceOutput, listing: Listing
) -> None:
    """No longer than model, pool and workload allow, and no shorter than it asked for."""
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


def judge_stops(
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


def wrong_finish(
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


def compare_finish(
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
