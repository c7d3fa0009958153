"""The unpreempted run that outputs are compared with, made once per configuration and workload.

A baseline is a trial like any other: with room, without a plan, and judged by every check. One that
was preempted, or that has findings, is no baseline, and its problems say why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from preempt_harness.adapters.protocol import DerivesBranches, EngineAdapter, EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.checks import run_checks
from preempt_harness.errors import HarnessError
from preempt_harness.record import Baseline, Preempted, RequestResult, TrialRecord
from preempt_harness.trial import Trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

RunTrial = Callable[[Trial], TrialRecord]
BaselineKind = Literal["same-config", "solo"]


class BaselineError(HarnessError, ValueError):
    """A baseline of this kind would not be one."""


class BaselineStore:
    """Baselines of one session, by what they depend on.

    Args:
        run: runs a trial on the adapter that it names.
    """

    def __init__(self, run: RunTrial) -> None:
        self._run = run
        self._known: dict[bytes, Baseline] = {}
        self.num_runs = 0

    def get(
        self,
        settings: EngineSettings,
        workload: Workload,
        adapter: EngineAdapter,
        kind: BaselineKind = "same-config",
    ) -> Baseline:
        """The baseline of a workload under these settings, whatever their block count.

        Nothing is drafted or decided ahead in it, and no queue is limited: that this changes no
        output is part of the comparison.

        Args:
            settings, workload, adapter: of the trial that is compared.
            kind: "same-config" runs the workload as it is, with room; "solo" runs each request,
                and each of its branches, alone and without prefix caching, so that no mistake in
                sharing can be in both.

        Raises:
            BaselineError: a request cannot run alone and give the same output.
        """
        workload = undisturbed(workload)
        settings = msgspec.structs.replace(
            settings, speculative_config=None, async_scheduling=0, max_waiting_requests=None
        )
        if kind == "solo":
            uncached = msgspec.structs.replace(settings, enable_prefix_caching=False)
            return combined(
                {
                    request.id: [
                        self._one(uncached, Workload(requests=[alone]), adapter)
                        for alone in requests_alone(request, adapter)
                    ]
                    for request in workload.requests
                }
            )
        return self._one(settings, workload, adapter)

    def _one(
        self, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
    ) -> Baseline:
        roomy = Trial(
            engine=adapter.name,
            settings=unpreempted_settings(settings, workload, adapter),
            workload=workload,
        )
        key = msgspec.msgpack.encode((roomy.engine, roomy.settings, roomy.workload))
        if key not in self._known:
            self.num_runs += 1
            self._known[key] = as_baseline(self._run(roomy))
        return self._known[key]


def roomy_settings(
    settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> EngineSettings:
    """The settings with so many blocks that nobody is preempted for want of one."""
    room = KVBudget.roomy(workload, adapter.admission_model(settings))
    return msgspec.structs.replace(settings, num_blocks=room.num_blocks)


def unpreempted_settings(
    settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> EngineSettings:
    """Room as above; and where the more urgent may take another's place, a place for everybody."""
    if settings.scheduling_policy == "priority":
        sequences = sum(request.sampling.num_sequences for request in workload.requests)
        places = max(settings.max_num_seqs, sequences)
        settings = msgspec.structs.replace(settings, max_num_seqs=places)
    return roomy_settings(settings, workload, adapter)


def undisturbed(workload: Workload) -> Workload:
    """The workload without aborts, and with plain cache resets only.

    A request that is aborted is compared with the beginning of its whole output. A reset of running
    requests preempts by design; the plain one makes the same content unfindable for later ones.
    """
    return msgspec.structs.replace(
        workload,
        operations=[
            msgspec.structs.replace(operation, kind="reset_prefix_cache")
            if operation.kind == "reset_running_requests"
            else operation
            for operation in workload.operations
            if operation.kind != "abort"
        ],
    )


def requests_alone(request: RequestSpec, adapter: EngineAdapter) -> list[RequestSpec]:
    """The request as if it were the first and only one; one request for each of its branches.

    Beams are no branches: what one does depends on the others.

    Raises:
        BaselineError: alone it would not give the same output, since its noise depends on how many
            arrived before it, or on a rule for branches that the engine does not have.
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0
    if not greedy and sampling.seed is None:
        raise BaselineError(
            f"Request {request.id} samples without a seed, so alone it gives another output.",
            'Give it a seed, or use baseline="same-config".',
        )
    samplings: list[SamplingSpec | None] = [sampling]
    if sampling.n > 1 and greedy:
        samplings = [msgspec.structs.replace(sampling, n=1)] * sampling.n
    elif sampling.n > 1:
        derive = adapter.branch_sampling if isinstance(adapter, DerivesBranches) else _no_rule
        samplings = [derive(sampling, branch) for branch in range(sampling.n)]
    if None in samplings:
        raise BaselineError(
            f"Engine {adapter.name} has no rule by which a branch of {request.id} could run alone.",
            'Use baseline="same-config", or n=1.',
        )
    return [
        msgspec.structs.replace(request, arrival_step=0, sampling=alone)
        for alone in samplings
        if alone is not None
    ]


def _no_rule(sampling: SamplingSpec, branch: int) -> SamplingSpec | None:
    return None


def combined(parts: Mapping[str, Sequence[Baseline]]) -> Baseline:
    """One baseline of runs that had one request each.

    Args:
        parts: request -> its run, or one run for each of its branches.
    """
    every = [part for several in parts.values() for part in several]
    return Baseline(
        kind="solo",
        results={
            name: _joined([part.results[name] for part in several if name in part.results])
            for name, several in parts.items()
        },
        num_preemptions=sum(part.num_preemptions for part in every),
        problems=[problem for part in every for problem in part.problems],
    )


def _joined(branches: Sequence[RequestResult]) -> RequestResult:
    """One result with the outputs of all."""
    if not branches:
        return RequestResult(outputs=[], finished=False)
    return msgspec.structs.replace(
        branches[0],
        outputs=[output for branch in branches for output in branch.outputs],
        finished=all(branch.finished for branch in branches),
    )


def output_lengths(baseline: Baseline) -> dict[str, int]:
    """Request -> tokens of its longest output, for the requests that ran to their own end."""
    return {
        request: max(len(output.token_ids) for output in result.outputs)
        for request, result in baseline.results.items()
        if result.finished and result.outputs
    }


def as_baseline(record: TrialRecord) -> Baseline:
    """Judge an unpreempted run and keep what comparisons need of it."""
    report = run_checks(record)
    return Baseline(
        kind="same-config",
        results=record.results,
        num_preemptions=sum(isinstance(event, Preempted) for event in record.events),
        problems=[str(finding) for finding in report.findings],
    )
