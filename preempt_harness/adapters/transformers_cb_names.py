"""Names and ends of sequences in transformers' continuous batching. Imports no engine."""

from __future__ import annotations

from typing import Any

from preempt_harness.workload import RequestSpec

_CHILD = "__child#"  # between a request's name and the number of a further output


def sequence_name(engine_id: str) -> str:
    """The record's name of a sequence; the engine calls the outputs of "r0" "r0", "r0__child#0"."""
    request, _, child = engine_id.partition(_CHILD)
    return f"{request}.{int(child) + 1 if child else 0}"


def request_name(engine_id: str) -> str:
    """The request of a sequence."""
    return engine_id.partition(_CHILD)[0]


def engine_ids(request: str, num_outputs: int) -> list[str]:
    """Inverse of `sequence_name`: the engine's names for all outputs of a request."""
    return [request, *(f"{request}{_CHILD}{index}" for index in range(num_outputs - 1))]


def finish_reason(output: Any, spec: RequestSpec) -> str:
    """Why an output ended; the engine does not say."""
    if output.error is not None:
        return "error"
    stopped = output.generated_tokens[-1:] and output.generated_tokens[-1] in stop_ids(spec)
    return "stop" if stopped else "length"


def stop_ids(spec: RequestSpec) -> list[int]:
    """Token ids that end a request."""
    return list(spec.sampling.stop_token_ids)
