"""Work: nobody loses its blocks beyond what the others need.

A step takes victims one by one, until there is room. So without its last victim there was none: the
blocks that are free when the step is launched are fewer than those that the last one gave up and
those that it needs itself to go on, if any. If they are not, it could have kept them.

Counted from the log: blocks that no table names. How far each of several branches is, it does not
tell: they are taken to need the most that they can, with copies of shared blocks. Not judged are
victims that the plan or an urgent request asked for, single branches, steps in which anybody is
swapped or in which the harness holds blocks, and steps that are decided ahead.
"""

from __future__ import annotations

from preempt_harness.checks._conditions import steps_ahead, steps_with_held_blocks
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import Trace
from preempt_harness.record import (
    BlocksFreed,
    Header,
    PoolCounts,
    Preempted,
    StepLaunched,
    SwappedIn,
    SwappedOut,
)


def takes_victims_in_turn(header: Header) -> bool:
    """Whether victims give up their blocks in the step that takes them."""
    return not steps_ahead(header)


def check_needless(trace: Trace) -> CheckResult:
    """The last victim of each step was needed."""
    judge = _Needless(trace)
    if trace.has(Preempted):
        for event in trace.of(
            SteadySteps,
            IdleSteps,
            *TABLE_EVENTS,
            Preempted,
            SwappedIn,
            SwappedOut,
            StepLaunched,
            PoolCounts,
        ):
            if isinstance(event, SteadySteps):  # in the others nobody is preempted
                judge.take(StepLaunched(event.step))
            judge.take(event.pool if isinstance(event, SteadySteps | IdleSteps) else event)
    return judge.listing.result("work", "needless victims")


class _Needless:
    """Who went last in a step, and what was free after that."""

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._size = trace.header.block_size
        self._num_drafts = trace.header.config.get("num_speculative_tokens", 0)
        self._with_held = trace.derive(steps_with_held_blocks)
        self._num_own = trace.header.config.get("reserved_blocks", 0)
        self._num_blocks = trace.header.num_blocks
        self._tables = SchedulerTables()
        self._num_fenced = 0
        self._begin_step(-1)

    def _begin_step(self, step: int) -> None:
        self._step = step
        self._last: Preempted | None = None
        self._num_needed = self._num_given = 0
        self._is_excused = False

    def take(self, event: object) -> None:
        """The next thing that happened."""
        if isinstance(event, PoolCounts):
            self._num_fenced = event.fenced
        elif isinstance(event, Preempted):
            self._preempt(event)
        elif isinstance(event, StepLaunched):
            self._launch(event.step)
        elif isinstance(event, SwappedIn | SwappedOut):
            self._enter(event.step)
            self._is_excused = True
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
            if isinstance(event, BlocksFreed) and self._last is not None:
                is_last = request_of(event.seq) == self._last.request and event.step == self._step
                gone = [block for block in event.blocks if block not in self._tables.refs]
                self._num_given += len(gone) if is_last else 0

    def _enter(self, step: int) -> None:
        if step != self._step:
            self._begin_step(step)

    def _preempt(self, event: Preempted) -> None:
        self._enter(event.step)
        held = [
            len(lease.blocks)
            for seq, lease in self._tables.leases.items()
            if request_of(seq) == event.request
        ]
        alone = bool(event.seq)  # one branch of it, which says nothing of the others
        if event.reason != "out_of_blocks" or event.mode == "swap" or alone or not held:
            self._is_excused = True
            return
        self._last = event
        self._num_given = 0
        self._num_needed = max(0, self._most_wanted(event, len(held)) - sum(held))

    def _most_wanted(self, victim: Preempted, num_branches: int) -> int:
        """Blocks with which all of its branches can go on, copies of shared ones included."""
        tokens = max(victim.num_tokens, victim.num_computed_tokens + num_branches)
        tokens += 2 * self._num_drafts * num_branches
        # However the tokens are spread over them, each begins at most one block that it leaves.
        wanted: int = (tokens + num_branches * (self._size - 1)) // self._size
        may_share_last = victim.num_computed_tokens % (num_branches * self._size) != 0
        return wanted + (num_branches - 1 if may_share_last else 0)

    def _launch(self, step: int) -> None:
        victim = self._last
        if victim is None or step != self._step or self._is_excused or step in self._with_held:
            return
        self._last = None
        self.listing.count("victims judged")
        num_free = self._num_blocks - self._num_own - self._num_fenced - len(self._tables.refs)
        if num_free >= self._num_given + self._num_needed:
            self.listing.report(
                Code.WORK_VAIN,
                step,
                f"it is preempted for want of blocks and gives up {self._num_given}, and when the "
                f"step is launched {num_free} are free: enough for it to stay and for the "
                f"{self._num_needed} that it needs to go on",
                once=victim.request,
                request=victim.request,
            )
