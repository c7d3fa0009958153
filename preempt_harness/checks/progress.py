"""Progress: the work gets done, in bounded time, in a fair order, whatever is preempted.

All bounds are formulas over the planned work and are printed with the finding. They assume what
every working scheduler grants: the oldest request is never a victim, so it computes something in
every step; and what the plan forces is paid for separately, whether it preempts or holds blocks
back: a squeeze may take from the oldest, even from the only one. Who goes first changes when a
more urgent request arrives, or a priority changes: each time one preemption is paid for, that of
who went first before. Where prefills and decodes share no step, every preemption is paid for: what
it lost is computed while the others stand still.

    t_r = ceil((P_r + n_r O_r) / c)   steps that compute request r from nothing; c = token budget
    steps <= last arrival + sum_r (t_r + O_r + 2) + preemptions * (max_r t_r + 2) + exempt
    K      = sum_r (t_r + 2) + 2      in so many steps somebody gets further than ever before

Steps in which the harness holds blocks are exempt. A preemption that is forced, or happens in them,
starts K anew. With d steps decided ahead of the one that runs, each 2 above is 2 + 2d. A step that
is decided ahead counts on all drafts under way; where these would reach the longest length L that a
request may have, it may have to wait for what becomes of them. With k drafts that concerns the
tokens behind L - d (k + 1), each of which then costs d steps more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from preempt_harness.checks._conditions import (
    mixes_steps,
    steps_ahead,
    steps_with_held_blocks,
)
from preempt_harness.checks._progress_queue import who_found_the_queue_full
from preempt_harness.checks.drafts import DraftLedger
from preempt_harness.checks.finding import CheckResult, Code, Listing
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.tables import num_blocks_for
from preempt_harness.checks.trace import (
    DeliveredRows,
    Folded,
    ScheduledRows,
    Trace,
    batches,
)
from preempt_harness.record import (
    Aborted,
    Arrived,
    EngineError,
    Finished,
    Header,
    PlanApplied,
    Preempted,
    PriorityChanged,
    Resumed,
    TrialRecord,
)
from preempt_harness.workload import RequestSpec

PREEMPT_ALL = "preempt-all"
"""How an applied plan action that preempts everybody begins."""

_BEGINNINGS = frozenset({Arrived, Finished, Aborted, Preempted})
"""What can begin the count of stalled steps anew, besides rows that go further than ever."""

_SEVERAL_STEPS = (SteadySteps, IdleSteps)

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
    return _bounds(Trace(record))


def _bounds(trace: Trace) -> StepBounds:
    specs = list(trace.specs.values())
    budget = trace.header.config.get("max_num_batched_tokens")
    chunk = budget if isinstance(budget, int) else 1
    one_by_one = bool(trace.header.config.get("branches_one_by_one"))
    units = [
        (spec, 1 if one_by_one else spec.sampling.num_sequences)
        for spec in specs
        for _ in range(spec.sampling.num_sequences if one_by_one else 1)
    ]
    times = [
        num_blocks_for(spec.num_prompt_tokens + together * spec.sampling.max_tokens, chunk)
        for spec, together in units
    ]
    places = trace.header.config.get("max_num_seqs")
    at_once = min(chunk, places) if isinstance(places, int) else chunk
    # Steps under way at a preemption are for nothing, and those behind it wait for blocks.
    spare = _SPARE + 2 * steps_ahead(trace.header)
    work = sum(times) + sum(
        spec.sampling.max_tokens * num_blocks_for(together, at_once) + spare
        for spec, together in units
    )
    work += sum(_num_waits(trace.header, spec) for spec in specs)
    last_arrival = max((spec.arrival_step for spec in specs), default=0)
    held = trace.derive(steps_with_held_blocks)
    num_paid = _num_paid_preemptions(trace, held)
    again = max(times, default=0) + spare
    exempt = len(held)
    stall = sum(time + spare for time in times) + spare
    return StepBounds(
        total=last_arrival + work + num_paid * again + exempt,
        stall=stall,
        formula=(
            f"last arrival {last_arrival} + work {work} + {num_paid} preemptions that "
            f"the plan caused or that stop the others * {again} "
            f"+ {exempt} steps with held blocks"
        ),
        stall_formula=f"sum of {sum(times)} steps of computing anew and {spare} per request",
    )


def _num_waits(header: Header, spec: RequestSpec) -> int:
    """Steps in which a request may stand still until it is known whether drafts came true.

    Only near the longest length that it may have, and where steps are decided ahead.
    """
    longest = header.config.get("max_model_len")
    drafts = header.config.get("num_speculative_tokens")
    ahead = steps_ahead(header)
    if not isinstance(longest, int) or not isinstance(drafts, int) or not drafts:
        return 0
    first = longest - ahead * (drafts + 1)  # position of a token that may have to wait
    num_tokens = min(longest, spec.num_prompt_tokens + spec.sampling.max_tokens) - first
    return ahead * max(0, min(num_tokens, spec.sampling.max_tokens))


def _num_paid_preemptions(trace: Trace, held: set[int]) -> int:
    """Preemptions that may take from the request that goes first, or stop all others."""
    preemptions = trace.of(Preempted)
    if not mixes_steps(trace.header):
        return len(preemptions)
    caused = sum(event.reason == "forced" or event.step in held for event in preemptions)
    specs = list(trace.specs.values())
    interruptions = len(trace.of(PriorityChanged)) + sum(
        any(
            other.arrival_step < spec.arrival_step and other.priority > spec.priority
            for other in specs
        )
        for spec in specs
    )
    return caused + min(len(preemptions) - caused, interruptions)


def check_steps(trace: Trace) -> CheckResult:
    """Total number of steps, and no livelock."""
    if "squeeze" in trace.header.plan and not trace.sees("PoolCounts"):
        reason = "the plan holds blocks, and without PoolCounts it cannot be seen for how long"
        return CheckResult(check="progress", part="steps", not_observable=reason)
    listing = Listing()
    bounds = _bounds(trace)
    last = trace.last_step
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
    _judge_livelock(trace, bounds, listing)
    return listing.result("progress", "steps")


def _judge_livelock(trace: Trace, bounds: StepBounds, listing: Listing) -> None:
    high_water: dict[str, int] = {}
    drafts = trace.header.config.get("num_speculative_tokens", 0)
    live: dict[str, None] = {}
    exempt = trace.derive(steps_with_held_blocks)
    stalled: set[int] = set()
    moved_in = range(0)  # steps
    ledger = DraftLedger() if drafts else None
    for event in _one_by_one(trace, live, high_water):
        rises = False
        if ledger is not None:
            assert not isinstance(event, _SEVERAL_STEPS)  # there are none with drafts
            ledger.take(event)
        if isinstance(event, SteadySteps):
            rises = _raise_high_water(event, high_water, None)
        elif isinstance(event, ScheduledRows):
            rises = _raise_high_water(event, high_water, None if ledger is None else ledger.known)
        elif drafts and isinstance(event, DeliveredRows):
            rises = True  # how many of a step's tokens were known is not always told in time
        elif type(event) in _BEGINNINGS:
            rises = _begins_anew(event, live, exempt)
        if rises or not live:
            stalled.clear()
            last = event.last_step if isinstance(event, _SEVERAL_STEPS) else event.step
            moved_in = range(event.step, last + 1)
        elif event.step not in moved_in and event.step not in exempt:
            stalled.add(event.step)
        if len(stalled) > bounds.stall:
            listing.report(
                Code.PROG_LIVELOCK,
                event.step,
                f"for {len(stalled)} steps no request has got further than ever before, K is "
                f"{bounds.stall} ({bounds.stall_formula}); live: {', '.join(live)}",
            )
            return


def _one_by_one(
    trace: Trace, live: Mapping[str, None], high_water: Mapping[str, int]
) -> Iterator[Folded]:
    """What happened, steady steps one by one unless somebody gets further in each, or all ended."""
    for event in trace.folded:
        if not live or not isinstance(event, _SEVERAL_STEPS) or _moves(event, high_water):
            yield event
        else:
            yield from batches(event.events)


def _moves(steps: SteadySteps | IdleSteps, high_water: Mapping[str, int]) -> bool:
    """Whether some row goes further than ever in the first step, and so in every one."""
    return isinstance(steps, SteadySteps) and any(
        start + length > high_water.get(seq, 0)
        for seq, start, length in zip(steps.seqs, steps.starts, steps.lengths, strict=True)
    )


def _begins_anew(event: Folded, live: dict[str, None], exempt: set[int]) -> bool:
    """Whether the event begins the count of stalled steps anew; keeps the live requests.

    What a squeeze takes is forced as well.
    """
    if isinstance(event, Arrived):
        live[event.request] = None
    elif isinstance(event, (Finished, Aborted)):
        live.pop(event.request, None)
    else:
        return isinstance(event, Preempted) and (event.reason == "forced" or event.step in exempt)
    return True


def _raise_high_water(
    rows: ScheduledRows | SteadySteps, high_water: dict[str, int], known: Mapping[str, int] | None
) -> bool:
    """Whether any row goes further than its sequence ever went.

    Args:
        rows: of a step, or of steady steps.
        high_water: sequence -> how far it went; kept.
        known: with drafts, sequence -> its known tokens: what lies beyond them is no progress.
    """
    rises = False
    for seq, end in zip(rows.seqs, rows.ends, strict=True):
        if known is not None:
            end = min(end, known[seq])
        if end > high_water.get(seq, 0):
            high_water[seq] = end
            rises = True
    return rises


def check_order(trace: Trace) -> CheckResult:
    """After a preempt-all by recompute, requests of equal priority come back in arrival order.

    Requests whose priority is changed on the way are left out. One that had come back before may
    queue behind those that were admitted before its return: engines keep the order of arrival or of
    admission, and both are fair.
    """
    listing = Listing()
    changed = {item.request for item in trace.workload.operations if item.kind == "set_priority"}
    arrival: dict[str, tuple[int, int]] = {}
    returned: set[str] = set()
    late: frozenset[str] = frozenset()
    group: list[str] = []
    waiting: set[str] = set()
    back: list[str] = []
    all_in_step: int | None = None
    for event in trace.of(Arrived, PlanApplied, Preempted, Resumed):
        if isinstance(event, Arrived):
            arrival[event.request] = (event.priority, len(arrival))
        elif isinstance(event, PlanApplied):
            if event.action.startswith(PREEMPT_ALL):
                all_in_step = event.step
                group, waiting, back = [], set(), []
                late = frozenset(returned)
        elif isinstance(event, Preempted):
            if event.request in changed:
                continue
            if event.step == all_in_step and event.reason == "forced":
                group.append(event.request)
                waiting.add(event.request)
            else:
                waiting.discard(event.request)
        else:
            returned.add(event.request)
            if event.request not in waiting:
                continue
            waiting.discard(event.request)
            back.append(event.request)
            listing.count("re-admissions judged")
            if event.request not in late:
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


def check_ends(trace: Trace) -> CheckResult:
    """Every request ends; one that can never run ends with an error, and alone."""
    listing = Listing()
    record, specs = trace.record, trace.specs
    if trace.has(EngineError):
        return listing.result("progress", "ends")
    aborted = {event.request for event in trace.of(Aborted)}
    aborted |= {item.request for item in trace.workload.operations if item.kind == "abort"}
    turned_away = {late.request for late in who_found_the_queue_full(trace) if not late.has_run}
    let_go = aborted | {event.request for event in trace.of(Finished)}
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
        elif request in turned_away and failed:
            listing.count("requests that found the queue full")
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
        elif request not in let_go and trace.sees("Finished"):
            listing.report(
                Code.PROG_UNFINISHED,
                None,
                "its user was told that it has ended, and the engine has not let it go",
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
