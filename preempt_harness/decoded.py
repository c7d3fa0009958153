"""Has the adapter decode what an engine gave: the text that its token ids are.

Owns which tokens have text and how much of it each of them settles; judges nothing. The engine's
own way from tokens to text, which goes token by token, takes no part in it.
"""

from __future__ import annotations

from preempt_harness.adapters.protocol import DecodesTokens, EngineAdapter, EngineSettings
from preempt_harness.record import DecodedOutput, Header, SequenceOutput, TrialRecord
from preempt_harness.workload import SamplingSpec, Workload

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode_outputs(
    record: TrialRecord, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> dict[str, list[DecodedOutput | None]]:
    """Request -> its outputs as text, for `TrialRecord.decoded`; empty if nobody can decode.

    Args:
        record: with results.
        settings: of the trial.
        workload: what was run.
        adapter: of the engine.
    """
    if not isinstance(adapter, DecodesTokens):
        return {}
    decoded = {}
    for request in workload.requests:
        result = record.results.get(request.id)
        if result is not None:
            decoded[request.id] = [
                _decode(adapter, settings, record.header, request.sampling, output)
                for output in result.outputs
            ]
    if not any(output is not None for outputs in decoded.values() for output in outputs):
        return {}
    return decoded


def ends_by_token(header: Header, sampling: SamplingSpec, output: SequenceOutput) -> bool:
    """Whether the output's last token ended it, and so is no part of its text."""
    if output.finish_reason != "stop" or isinstance(output.stop_reason, str):
        return False
    if not output.token_ids:
        return False
    last = output.token_ids[-1]
    is_eos = not sampling.ignore_eos and last in header.eos_token_ids
    return is_eos or last in sampling.stop_token_ids


def _decode(
    adapter: DecodesTokens,
    settings: EngineSettings,
    header: Header,
    sampling: SamplingSpec,
    output: SequenceOutput,
) -> DecodedOutput | None:
    token_ids = output.token_ids[: -1 if ends_by_token(header, sampling, output) else None]
    text = adapter.decode(settings, token_ids)
    if text is None:
        return None
    settled: list[int | None] = []
    if sampling.stop:
        beginnings = (adapter.decode(settings, token_ids[:n]) for n in range(len(token_ids) + 1))
        settled = [_settled(beginning, text) for beginning in beginnings]
    return DecodedOutput(text=text, settled=settled)


def _settled(beginning: str | None, text: str) -> int | None:
    """Characters that a beginning of the tokens makes, None if more tokens may change them."""
    if beginning is None or beginning.endswith(REPLACEMENT) or not text.startswith(beginning):
        return None
    return len(beginning)
