"""Progress: the work gets done, in bounded time, in a fair order, whatever is preempted.

All bounds are formulas over the planned work and are printed with the finding. They assume what
every working scheduler grants: the oldest request is never a victim, so it computes something in
every step; and what the plan forces is paid for separately.

    t_r = ceil((P_r + O_r) / c)       steps that compute request r from nothing; c = token budget
    steps <= last arrival + sum_r (t_r + O_r + 2) + forced preemptions * (max_r t_r + 2) + exempt
    K      = sum_r (t_r + 2) + 2      in so many steps somebody gets further than ever before

Steps in which the harness holds blocks are exempt. A forced preemption starts K anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from preempt_harness.checks.delivery import read_workload, workload_of
from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.tables import num_blocks_for
from preempt_harness.record import (
    Aborted,
    Arrived,
    EngineError,
    Finished,
    Header,
    PlanApplied,
    PoolCounts,
    Preempted,
    Resumed,
    Scheduled,
    TrialRecord,
)
from preempt_harness.workload import RequestSpec

PREEMPT_ALL = "preempt-all"
"""How an applied plan action that preempts everybody begins."""

_SPARE = 2  # steps: one for the preempting step, which admits nobody, one in flight


@dataclass(frozen=True, kw_only=True)
class StepBounds:
    """Bounds of one record, in steps.

    Attributes:
        total: no trial takes longer.
        stall: K; nobody gets further for so long only in a livelock.
        formula: `total` with its numbers.
        stall_formula: `stall` with its numbers.
    """

    total: int
    stall: int
    formula: str
    stall_formula: str


def step_bounds(record: TrialRecord) -> StepBounds:
    """Bounds by formula over the planned work of a record.

    Where an engine schedules each branch for itself, each counts like a request.
    """
    specs = list(workload_of(record).values())
    budget = record.header.config.get("max_num_batched_tokens")
    chunk = budget if isinstance(budget, int) else 1
    one_by_one = bool(record.header.config.get("branches_one_by_one"))
    units = [
        (spec, 1 if one_by_one else spec.sampling.num_sequences)
        for spec in specs
        for _ in range(spec.sampling.num_sequences if one_by_one else 1)
    ]
    times = [
        num_blocks_for(spec.num_prompt_tokens + spec.sampling.max_tokens, chunk)
        for spec, _ in units
    ]
    places = record.header.config.get("max_num_seqs")
    at_once = min(chunk, places) if isinstance(places, int) else chunk
    work = sum(times) + sum(
        spec.sampling.max_tokens * num_blocks_for(together, at_once) + _SPARE
        for spec, together in units
    )
    last_arrival = max((spec.arrival_step for spec in specs), default=0)
    forced = sum(
        isinstance(event, Preempted) and event.reason == "forced" for event in record.events
    )
    again = max(times, default=0) + _SPARE
    exempt = len(_exempt_steps(record))
    stall = sum(time + _SPARE for time in times) + _SPARE
    return StepBounds(
        total=last_arrival + work + forced * again + exempt,
        stall=stall,
        formula=(
            f"last arrival {last_arrival} + work {work} + {forced} forced preemptions * {again} "
            f"+ {exempt} steps with held blocks"
        ),
        stall_formula=f"sum of {sum(times)} steps of computing anew and {_SPARE} per request",
    )


def check_steps(record: TrialRecord) -> CheckResult:
    """Total number of steps, and no livelock."""
    if "squeeze" in record.header.plan and "PoolCounts" not in record.header.observed:
        reason = "the plan holds blocks, and without PoolCounts it cannot be seen for how long"
        return CheckResult(check="progress", part="steps", not_observable=reason)
    listing = Listing()
    bounds = step_bounds(record)
    exempt = _exempt_steps(record)
    last = max((event.step for event in record.events), default=0)
    listing.count("steps", last + 1)
    listing.count("step bound", bounds.total)
    listing.count("stall bound K", bounds.stall)
    if last + 1 > bounds.total:
        listing.report(
            Code.PROG_STEP_BOUND,
            last,
            f"the trial takes {last + 1} steps, its planned work at most {bounds.total} "
            f"({bounds.formula})",
        )
    _judge_livelock(record, bounds, exempt, listing)
    return listing.result("progress", "steps")


def _exempt_steps(record: TrialRecord) -> set[int]:
    """Steps in which the harness held blocks: nobody is blamed for standing still."""
    return {event.step for event in record.events if isinstance(event, PoolCounts) and event.held}


def _judge_livelock(
    record: TrialRecord, bounds: StepBounds, exempt: set[int], listing: Listing
) -> None:
    high_water: dict[str, int] = {}
    live: dict[str, None] = {}
    stalled: set[int] = set()
    moved_in = -1
    for event in record.events:
        rises = False
        if isinstance(event, Scheduled):
            rises = event.end > high_water.get(event.seq, 0)
            high_water[event.seq] = max(event.end, high_water.get(event.seq, 0))
        elif isinstance(event, Arrived):
            live[event.request] = None
            rises = True
        elif isinstance(event, Finished | Aborted):
            live.pop(event.request, None)
            rises = True
        elif isinstance(event, Preempted):
            rises = event.reason == "forced"
        if rises or not live:
            stalled.clear()
            moved_in = event.step
        elif event.step != moved_in and event.step not in exempt:
            stalled.add(event.step)
        if len(stalled) > bounds.stall:
            listing.report(
                Code.PROG_LIVELOCK,
                event.step,
                f"for {len(stalled)} steps no request has got further than ever before, K is "
                f"{bounds.stall} ({bounds.stall_formula}); live: {', '.join(live)}",
            )
            return


def check_order(record: TrialRecord) -> CheckResult:
    """After a preempt-all by recompute, requests of equal priority come back in arrival order.

    Requests whose priority is changed on the way are left out.
    """
    listing = Listing()
    operations = read_workload(record).operations
    changed = {item.request for item in operations if item.kind == "set_priority"}
    arrival: dict[str, tuple[int, int]] = {}
    group: list[str] = []
    waiting: set[str] = set()
    back: list[str] = []
    all_in_step: int | None = None
    for event in record.events:
        if isinstance(event, Arrived):
            arrival[event.request] = (event.priority, len(arrival))
        elif isinstance(event, PlanApplied) and event.action.startswith(PREEMPT_ALL):
            all_in_step = event.step
            group, waiting, back = [], set(), []
        elif isinstance(event, Preempted):
            if event.request in changed:
                continue
            if event.step == all_in_step and event.reason == "forced":
                group.append(event.request)
                waiting.add(event.request)
            else:
                waiting.discard(event.request)
        elif isinstance(event, Resumed) and event.request in waiting:
            waiting.discard(event.request)
            back.append(event.request)
            listing.count("re-admissions judged")
            _judge_order(event, group, back, arrival, listing)
    return listing.result("progress", "order")


def _judge_order(
    event: Resumed,
    group: list[str],
    back: list[str],
    arrival: dict[str, tuple[int, int]],
    listing: Listing,
) -> None:
    priority, index = arrival.get(event.request, (0, 0))
    for other in back[:-1]:
        other_priority, other_index = arrival.get(other, (0, 0))
        if other_priority == priority and other_index > index:
            listing.report(
                Code.PROG_ORDER,
                event.step,
                f"of {', '.join(group)}, preempted together, it arrived before {other} and is "
                f"admitted again after it",
                once=event.request,
                request=event.request,
            )


def check_ends(record: TrialRecord) -> CheckResult:
    """Every request ends; one that can never run ends with an error, and alone."""
    listing = Listing()
    specs = workload_of(record)
    if any(isinstance(event, EngineError) for event in record.events):
        return listing.result("progress", "ends")
    aborted = {event.request for event in record.events if isinstance(event, Aborted)}
    operations = read_workload(record).operations
    aborted |= {item.request for item in operations if item.kind == "abort"}
    for request, spec in specs.items():
        if request in aborted:
            continue
        listing.count("requests judged")
        result = record.results.get(request)
        failed = result is not None and (
            bool(result.error) or any(out.finish_reason == "error" for out in result.outputs)
        )
        why = why_infeasible(record.header, spec)
        if why is not None and not failed:
            listing.report(
                Code.PROG_INFEASIBLE,
                None,
                f"it can never run ({why}), and did not end with an error",
                request=request,
            )
        elif why is None and failed and _can_end_well(record.header, spec):
            listing.report(
                Code.PROG_UNDUE_ERROR,
                None,
                f"it could run to its end, and ended with the error "
                f"{'' if result is None else result.error!r}",
                request=request,
            )
        elif why is None and not (result is not None and (result.finished or failed)):
            listing.report(
                Code.PROG_UNFINISHED,
                None,
                "nobody aborted it, and it has not ended when the trial has",
                request=request,
            )
    return listing.result("progress", "ends")


def why_infeasible(header: Header, spec: RequestSpec) -> str | None:
    """Why a request can never give a token, None when it can."""
    needed = num_blocks_for(spec.num_prompt_tokens, header.block_size)
    if needed > header.num_blocks:
        return f"its prompt needs {needed} blocks, the pool has {header.num_blocks}"
    most = header.config.get("max_model_len")
    if isinstance(most, int) and spec.num_prompt_tokens > most:
        return f"its prompt has {spec.num_prompt_tokens} tokens, max_model_len is {most}"
    return None


def _can_end_well(header: Header, spec: RequestSpec) -> bool:
    """Whether prompt and whole output fit in a pool of which an engine may keep one block."""
    total = spec.num_prompt_tokens + spec.sampling.max_tokens
    most = header.config.get("max_model_len")
    if isinstance(most, int) and total > most:
        return False
    return num_blocks_for(total, header.block_size) < header.num_blocks
