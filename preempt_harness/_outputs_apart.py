"""A workload as an engine sees it that runs every output of a request as a sequence of its own.

Knows requests and operations; no engine, no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from preempt_harness._admission_model import may_stop_early
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload


def apart(workload: Workload, output_lengths: Mapping[str, int]) -> tuple[Workload, dict[str, int]]:
    """A request for each output, "r0", "r0/1", "r0/2", ... for the three of "r0", and operations on
    each; beams stay together.

    Args:
        workload: what the user asks for.
        output_lengths: request -> output tokens of its longest output, where known. The others are
            as long only if nothing but a length ends them.

    Returns:
        The requests with one output each, and the lengths that are known of them.
    """
    names = {spec.id: _names(spec) for spec in workload.requests}
    requests: list[RequestSpec] = []
    lengths: dict[str, int] = {}
    for spec in workload.requests:
        own = names[spec.id]
        requests += [
            msgspec.structs.replace(spec, id=name, sampling=_alone(spec.sampling, index))
            for index, name in enumerate(own)
        ]
        if spec.id in output_lengths and (len(own) == 1 or not may_stop_early(spec)):
            lengths |= dict.fromkeys(own, output_lengths[spec.id])
    operations: list[Operation] = []
    for operation in workload.operations:
        targets = names.get(operation.request, [operation.request])
        operations += [msgspec.structs.replace(operation, request=name) for name in targets]
    return Workload(requests=requests, operations=operations), lengths


def _alone(sampling: SamplingSpec, index: int) -> SamplingSpec:
    """Of one output; noise of its own, where there is any."""
    seed = None if sampling.seed is None else sampling.seed + index
    return msgspec.structs.replace(sampling, n=1, seed=seed)


def _names(spec: RequestSpec) -> list[str]:
    if spec.sampling.beam is not None:
        return [spec.id]
    return [spec.id, *(f"{spec.id}/{index}" for index in range(1, spec.sampling.n))]
