"""The list of checks, and running them over a record.

A part of a check whose input is not observed says NOT OBSERVABLE with the reason. Nothing passes
in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from preempt_harness.admission import Simulation
from preempt_harness.checks import (
    _accounting_counters,
    _accounting_gauges,
    _accounting_pool,
    _accounting_reset,
    _accounting_schedule,
    _accounting_worker,
    _delivery_texts,
    _progress_precedence,
    _progress_queue,
    _service_order,
    _work_ahead,
    _work_drafts,
    _work_hits,
    _work_idle,
    _work_needless,
    _work_overrun,
    _work_standstill,
    _work_swap,
    _work_undrafted,
    crash,
    delivery,
    kvsan,
    prediction,
    progress,
    tokens,
    work,
)
from preempt_harness.checks.finding import CheckResult, Finding, why_not_observed
from preempt_harness.checks.tokens import Tolerance
from preempt_harness.checks.trace import Trace
from preempt_harness.record import Header, TrialRecord


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What checks need beyond the record.

    Attributes:
        tolerance: for near ties; None allows exact equality only.
        verify: how KVSan reads.
        expected_preemptions: natural preemptions of the clean engine on this workload, if known.
        prediction: what the engine's own rules lead to, where they can be played.
    """

    tolerance: Tolerance | None = None
    verify: kvsan.Verify = "incremental"
    expected_preemptions: int | None = None
    prediction: Simulation | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a check, or several that are judged in one go.

    Attributes:
        check: the check's name.
        part: this part's name, "" if the check has one only.
        needs: event types without which it is not judged at all.
        applies: whether a record has what it is about; where not, nothing is missing.
        judge: the part itself.
    """

    check: str
    part: str = ""
    needs: frozenset[str] = frozenset()
    applies: Callable[[Header], bool] = lambda header: True
    judge: Callable[[Trace, CheckOptions], tuple[CheckResult, ...]]

    def run(self, trace: Trace, options: CheckOptions) -> tuple[CheckResult, ...]:
        """Judge, or say why not."""
        if not self.applies(trace.header):
            return ()
        if not trace.sees(*self.needs):
            reason = why_not_observed(trace.header, self.needs)
            return (CheckResult(check=self.check, part=self.part, not_observable=reason),)
        return self.judge(trace, options)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What all checks said of one record.

    Attributes:
        results: one per part, in the order of the list of checks.
    """

    results: tuple[CheckResult, ...] = field(default=())

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, in the order of the checks."""
        return tuple(finding for result in self.results for finding in result.findings)

    @property
    def not_observable(self) -> dict[str, str]:
        """Check or check/part -> why it could not judge."""
        return {
            result.name: result.not_observable
            for result in self.results
            if result.not_observable is not None
        }

    @property
    def counted(self) -> dict[str, int]:
        """Figures by "check/part: name"."""
        return {
            f"{result.name}: {name}": value
            for result in self.results
            for name, value in result.counted.items()
        }

    def of(self, check: str) -> tuple[CheckResult, ...]:
        """Results of one check's parts."""
        return tuple(result for result in self.results if result.check == check)


def run_checks(
    record: TrialRecord,
    checks: Iterable[str] | None = None,
    options: CheckOptions | None = None,
) -> CheckReport:
    """Judge a record.

    Args:
        record: of a trial, live or read from a log.
        checks: names out of `CHECK_NAMES`; None runs all.
        options: what checks need beyond the record.

    Raises:
        ValueError: a name is no check's.
    """
    wanted = set(CHECK_NAMES if checks is None else checks)
    unknown = wanted - set(CHECK_NAMES)
    if unknown:
        raise ValueError(
            f"unknown checks: {', '.join(sorted(unknown))}; known: {', '.join(CHECK_NAMES)}"
        )
    chosen = options if options is not None else CheckOptions()
    trace = Trace(record)
    return CheckReport(
        results=tuple(
            result for part in PARTS if part.check in wanted for result in part.run(trace, chosen)
        )
    )


def _plain(
    judge: Callable[[Trace], CheckResult],
) -> Callable[[Trace, CheckOptions], tuple[CheckResult, ...]]:
    return lambda trace, options: (judge(trace),)


PARTS = (
    Part(check="crash", judge=_plain(crash.check_crash)),
    Part(
        check="kvsan",
        judge=lambda trace, options: kvsan.kvsan_parts(trace, options.verify),
    ),
    Part(
        check="tokens",
        judge=lambda trace, options: (tokens.check_tokens(trace, options.tolerance),),
    ),
    Part(
        check="delivery",
        part="stream",
        needs=frozenset({"TokensDelivered"}),
        judge=_plain(delivery.check_stream),
    ),
    Part(check="delivery", part="results", judge=_plain(delivery.check_results)),
    Part(
        check="delivery",
        part="texts",
        applies=_delivery_texts.gives_text,
        judge=_plain(_delivery_texts.check_texts),
    ),
    Part(
        check="accounting",
        part="pool counts",
        needs=frozenset({"PoolCounts"}),
        judge=_plain(_accounting_pool.check_pool_counts),
    ),
    Part(
        check="accounting",
        part="pool state",
        needs=frozenset({"PoolState"}),
        judge=_plain(_accounting_pool.check_pool_state),
    ),
    Part(
        check="accounting",
        part="counters",
        needs=frozenset({"Counters"}),
        judge=_plain(_accounting_counters.check_counters),
    ),
    Part(
        check="accounting",
        part="gauges",
        needs=frozenset({"Counters", "PoolState"}),
        judge=_plain(_accounting_gauges.check_gauges),
    ),
    Part(
        check="accounting",
        part="worker view",
        needs=frozenset({"Scheduled", "Computed", "StepDone"}),
        judge=_plain(_accounting_worker.check_worker_view),
    ),
    Part(
        check="accounting",
        part="worker tables",
        needs=frozenset({"Computed", "BlocksAllocated", "BlocksFreed"}),
        judge=_plain(_accounting_worker.check_worker_tables),
    ),
    Part(
        check="accounting",
        part="preemptions",
        needs=frozenset(
            {
                "Arrived",
                "BlocksAllocated",
                "BlocksFreed",
                "Preempted",
                "Resumed",
                "Scheduled",
                "StepDone",
                "TokensDelivered",
            }
        ),
        judge=_plain(_accounting_schedule.check_preemptions),
    ),
    Part(
        check="accounting",
        part="limits",
        needs=frozenset({"Scheduled"}),
        judge=_plain(_accounting_schedule.check_limits),
    ),
    Part(
        check="progress",
        part="steps",
        needs=frozenset({"Arrived", "Scheduled", "Preempted", "Finished"}),
        judge=_plain(progress.check_steps),
    ),
    Part(
        check="progress",
        part="order",
        needs=frozenset({"Arrived", "Preempted", "Resumed"}),
        judge=_plain(progress.check_order),
    ),
    Part(
        check="progress",
        part="precedence",
        needs=frozenset({"Arrived", "BlocksAllocated", "Finished", "Preempted"}),
        applies=_service_order.promises_order,
        judge=_plain(_progress_precedence.check_precedence),
    ),
    Part(check="progress", part="ends", judge=_plain(progress.check_ends)),
    Part(
        check="progress",
        part="queue",
        needs=frozenset({"Arrived", "BlocksAllocated", "Preempted", "Resumed", "Finished"}),
        applies=_progress_queue.has_queue_limit,
        judge=_plain(_progress_queue.check_queue),
    ),
    Part(
        check="work",
        part="recompute",
        needs=frozenset({"Arrived", "Scheduled", "Preempted", "TokensDelivered"}),
        judge=_plain(work.check_recompute),
    ),
    Part(
        check="work",
        part="preemptions",
        needs=frozenset({"Preempted"}),
        judge=lambda trace, options: (work.check_preemptions(trace, options.expected_preemptions),),
    ),
    Part(
        check="work",
        part="victims",
        needs=frozenset({"BlocksAllocated", "BlocksFreed", "Preempted"}),
        judge=_plain(work.check_vain),
    ),
    Part(
        check="work",
        part="idle room",
        needs=frozenset(
            {"Arrived", "BlocksAllocated", "BlocksFreed", "PoolCounts", "Preempted", "Scheduled"}
        ),
        applies=_work_idle.admits_when_it_can,
        judge=_plain(_work_idle.check_idle),
    ),
    Part(
        check="work",
        part="standstill",
        needs=frozenset(
            {
                *("Arrived", "BlocksAllocated", "BlocksFreed", "PoolCounts", "Preempted"),
                *("Scheduled", "TokensDelivered"),
            }
        ),
        applies=_work_idle.admits_when_it_can,
        judge=_plain(_work_standstill.check_standstill),
    ),
    Part(
        check="work",
        part="ahead",
        needs=frozenset(
            {
                *("Arrived", "BlocksAllocated", "BlocksFreed", "PoolCounts", "Preempted"),
                *("Scheduled", "TokensDelivered"),
            }
        ),
        applies=_work_ahead.decides_ahead_in_order,
        judge=_plain(_work_ahead.check_ahead),
    ),
    Part(
        check="work",
        part="swaps",
        needs=frozenset({"BlocksAllocated", "BlocksFreed", "Preempted", "SwappedOut", "SwappedIn"}),
        applies=_work_swap.swaps_by_itself,
        judge=_plain(_work_swap.check_swaps),
    ),
    Part(
        check="work",
        part="prediction",
        needs=frozenset({"Preempted", "Scheduled"}),
        judge=lambda trace, options: (
            ()
            if options.prediction is None
            else (prediction.check_prediction(trace, options.prediction),)
        ),
    ),
    Part(
        check="work",
        part="bytes",
        needs=frozenset({"BlocksAllocated", "BlocksFreed", "Scheduled", "StepDone", "StepSent"}),
        applies=lambda header: header.num_ranks > 1 or "StepSent" in header.observed,
        judge=_plain(work.check_bytes),
    ),
    Part(
        check="accounting",
        part="resets",
        judge=lambda trace, options: _accounting_reset.resets_parts(trace),
    ),
    Part(
        check="work",
        part="own drafts",
        needs=frozenset({"Arrived", "Computed", "TokensDelivered"}),
        applies=_work_drafts.drafts_for_itself,
        judge=_plain(_work_drafts.check_own_drafts),
    ),
    Part(
        check="work",
        part="withheld drafts",
        needs=frozenset(
            {
                *("Arrived", "BlocksAllocated", "BlocksFreed", "PoolCounts", "Preempted"),
                *("Scheduled", "TokensDelivered"),
            }
        ),
        applies=_work_undrafted.drafts_when_it_can,
        judge=_plain(_work_undrafted.check_undrafted),
    ),
    Part(
        check="work",
        part="hits",
        needs=frozenset(
            {"Arrived", "BlocksAllocated", "BlocksFreed", "Scheduled", "TokensDelivered"}
        ),
        applies=_work_hits.shares_blocks,
        judge=_plain(_work_hits.check_hits),
    ),
    Part(
        check="work",
        part="needless victims",
        needs=frozenset({"BlocksAllocated", "BlocksFreed", "Preempted", "StepLaunched"}),
        applies=_work_needless.takes_victims_in_turn,
        judge=_plain(_work_needless.check_needless),
    ),
    Part(
        check="work",
        part="overrun",
        needs=frozenset({"Scheduled"}),
        applies=_work_overrun.counts_tokens,
        judge=_plain(_work_overrun.check_overrun),
    ),
)

CHECK_NAMES = tuple(dict.fromkeys(part.check for part in PARTS))
