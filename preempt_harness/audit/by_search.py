"""Looks for a fault by running drawn trials: the same ones for every fault."""

from __future__ import annotations

from preempt_harness import replay
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.audit.kill import Kill, Outcome
from preempt_harness.explore.search import TrialRunner
from preempt_harness.explore.shrink import shrink, size_of
from preempt_harness.explore.strategy import SearchTask, Strategy
from preempt_harness.explore.watchdog import watched

_POLL_CPU_S = 10.0


def look_by_search(
    strategy: Strategy, adapter: EngineAdapter, task: SearchTask, *, max_shrinks: int
) -> Kill:
    """Search until the first failure, and shrink it.

    Args:
        strategy: where trials come from.
        adapter: of the engine, with a fault planted or without.
        task: model, seed and limits.
        max_shrinks: most trials that shrinking may run, 0 to leave the failure as it is.

    Returns:
        KILLED or SURVIVED; the caller knows whether there was a fault.
    """
    runner = TrialRunner(adapter, open_session=watched(adapter, _POLL_CPU_S))
    found = strategy.explore(runner, task)
    failure = found.failure
    if failure is None:
        return Kill(outcome=Outcome.SURVIVED, num_trials=found.num_trials, cpu_s=found.cpu_s)
    small = shrink(failure, runner, max_trials=max_shrinks)
    size = size_of(small)
    return Kill(
        outcome=Outcome.KILLED,
        codes=failure.codes,
        where=f"trial {found.num_trials}",
        message=failure.message,
        num_trials=found.num_trials,
        cpu_s=found.cpu_s,
        shrunk_requests=size.requests,
        shrunk_preemptions=size.preemptions,
        shrunk_tokens=size.tokens,
        replay=replay.encode(small.trial),
    )
