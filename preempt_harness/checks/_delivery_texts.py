"""Delivery, part "texts": what the tokens say is what the user reads.

Judges each output's text by `TrialRecord.decoded`, which no engine's way from tokens to text has
touched; so it finds what is wrong alike in every run. Decodes nothing itself.

Text is held back while its last bytes may become a character, for how long is the engine's affair.
Where a number of tokens ends within a character, what is known is what they make at least and at
most; the rules hold an engine to what is certain. A stop string that contains U+FFFD is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.tables import first_difference
from preempt_harness.checks.trace import Trace
from preempt_harness.decoded import REPLACEMENT, ends_by_token
from preempt_harness.record import DecodedOutput, Header, SequenceOutput
from preempt_harness.workload import SamplingSpec

_TEXT = "text"
_BY_END = "stop_strings_by_end"
"""Capabilities, as a record's header lists them."""


def gives_text(header: Header) -> bool:
    """Whether the engine gives text at all."""
    return _TEXT in header.capabilities


def check_texts(trace: Trace) -> CheckResult:
    """Every text is its tokens' own, up to the stop string that ends it first."""
    record = trace.record
    if not record.decoded and any(result.outputs for result in record.results.values()):
        why = f"nobody has decoded the tokens of {record.header.engine}"
        return CheckResult(check="delivery", part="texts", not_observable=why)
    listing = Listing()
    for request, decoded in record.decoded.items():
        if request not in trace.specs or request not in record.results:
            continue
        sampling = trace.specs[request].sampling
        outputs = record.results[request].outputs
        for branch, (output, own) in enumerate(zip(outputs, decoded, strict=False)):
            if own is None:
                listing.count("outputs that nobody decoded")
                continue
            listing.count("texts judged")
            for code, what in _wrong(record.header, sampling, output, own):
                listing.report(code, None, what, seq=f"{request}.{branch}")
    return listing.result("delivery", "texts")


def _wrong(
    header: Header, sampling: SamplingSpec, output: SequenceOutput, own: DecodedOutput
) -> Iterator[tuple[Code, str]]:
    """The first thing that is wrong with one output."""
    mine, expected = output.text, own.text
    if _may_be_cut(header, sampling, output):
        expected = expected[: len(mine)]
    at = first_difference(mine, expected)
    if at is not None:
        yield (
            Code.DEL_TEXT,
            f"its text is not what its tokens say from character {at}: {mine[at : at + 20]!r}, "
            f"its tokens decode to {expected[at : at + 20]!r}",
        )
        return
    stop = _stop_string(output)
    if stop is not None and not own.text.startswith(stop, len(mine)):
        yield (
            Code.DEL_FINISH_REASON,
            f"it stopped at {stop!r}, but behind its text its tokens say "
            f"{own.text[len(mine) : len(mine) + 20]!r}",
        )
    elif stop is not None and stop not in sampling.stop:
        yield (
            Code.DEL_FINISH_REASON,
            f"it stopped at {stop!r}, which is none of its stop strings {list(sampling.stop)}",
        )
    elif own.settled:
        yield from _wrong_end(header, sampling, output, own, stop)


def _stop_string(output: SequenceOutput) -> str | None:
    is_string = output.finish_reason == "stop" and isinstance(output.stop_reason, str)
    return str(output.stop_reason) if is_string else None


def _may_be_cut(header: Header, sampling: SamplingSpec, output: SequenceOutput) -> bool:
    """Whether the text may end before what the tokens say does."""
    if output.finish_reason is None or _stop_string(output) is not None:
        return True
    if any(REPLACEMENT in stop for stop in sampling.stop):
        return True
    # An engine need not say which stop string it was.
    untold = output.finish_reason == "stop" and output.stop_reason is None
    return untold and bool(sampling.stop) and not ends_by_token(header, sampling, output)


def _wrong_end(
    header: Header,
    sampling: SamplingSpec,
    output: SequenceOutput,
    own: DecodedOutput,
    stop: str | None,
) -> Iterator[tuple[Code, str]]:
    """The output ends with the first stop string that a token behind `min_tokens` completes."""
    num_tokens = len(own.settled) - 1
    least = min(sampling.min_tokens, num_tokens)
    too_early, surely_free = _at_least(own.settled, least), _at_most(own, least)
    end = len(output.text) + len(stop or "")
    if stop is not None and end <= too_early:
        yield (
            Code.DEL_MIN_TOKENS,
            f"it stopped at {stop!r}, which its first {least} tokens complete, and min_tokens is "
            f"{sampling.min_tokens}",
        )
        return
    by_last = _may_be_cut(header, sampling, output) and num_tokens > 0
    passed = _at_least(own.settled, num_tokens - 1 if by_last else num_tokens)
    free = [item for item in _occurrences(own.text, sampling.stop) if item[0] > surely_free]
    if free and free[0][0] <= passed:
        first_end, start, first = free[0]
        yield (
            Code.DEL_PAST_STOP,
            f"its tokens say {first!r}, a stop string, from character {start} to {first_end}, and "
            f"do not end with it",
        )
    elif free and stop is not None and _BY_END in header.capabilities:
        first_end, start, first = free[0]
        if (first_end, start) < (end, len(output.text)):
            yield (
                Code.DEL_FINISH_REASON,
                f"it stopped at {stop!r}, which ends at character {end}; its stop string "
                f"{first!r}, from {start} to {first_end}, comes before that",
            )


def _occurrences(text: str, stops: Sequence[str]) -> list[tuple[int, int, str]]:
    """(end, start, stop string) of all there are, the first end first, of those the longest."""
    found = []
    for stop in stops:
        start = -1 if REPLACEMENT in stop else text.find(stop)
        while start >= 0:
            found.append((start + len(stop), start, stop))
            start = text.find(stop, start + 1)
    return sorted(found)


def _at_least(settled: Sequence[int | None], num_tokens: int) -> int:
    """Characters that so many tokens make at least."""
    return next((made for made in settled[num_tokens::-1] if made is not None), 0)


def _at_most(own: DecodedOutput, num_tokens: int) -> int:
    """Characters that so many tokens make at most."""
    return next((made for made in own.settled[num_tokens:] if made is not None), len(own.text))
