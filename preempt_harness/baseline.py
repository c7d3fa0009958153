"""The unpreempted run that outputs are compared with, made once per configuration and workload.

A baseline is a trial like any other: with room, without a plan, and judged by every check. One that
was preempted, or that has findings, is no baseline, and its problems say why.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.checks import run_checks
from preempt_harness.record import Baseline, Preempted, TrialRecord
from preempt_harness.trial import Trial
from preempt_harness.workload import Workload

RunTrial = Callable[[Trial], TrialRecord]


class BaselineStore:
    """Baselines of one session, by what they depend on.

    Args:
        run: runs a trial on the adapter that it names.
    """

    def __init__(self, run: RunTrial) -> None:
        self._run = run
        self._known: dict[bytes, Baseline] = {}
        self.num_runs = 0

    def get(self, settings: EngineSettings, workload: Workload, adapter: EngineAdapter) -> Baseline:
        """The baseline of a workload under these settings, whatever their block count.

        Nothing is drafted or decided ahead in it: that this changes no output is part of the
        comparison.
        """
        settings = msgspec.structs.replace(settings, speculative_config=None, async_scheduling=0)
        roomy = Trial(
            engine=adapter.name,
            settings=roomy_settings(settings, workload, adapter),
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
    """The settings with so many blocks that nobody is preempted.

    The budget counts one sequence a request; each further one needs at most as much again.
    """
    room = KVBudget.roomy(workload, adapter.admission_model(settings))
    most = max((request.sampling.num_sequences for request in workload.requests), default=1)
    return msgspec.structs.replace(settings, num_blocks=room.num_blocks * most)


def output_lengths(baseline: Baseline) -> dict[str, int]:
    """Request -> output tokens, for the requests that the baseline ran to their own end."""
    return {
        request: len(result.outputs[0].token_ids)
        for request, result in baseline.results.items()
        if result.finished and result.outputs and result.outputs[0].finish_reason != "abort"
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
