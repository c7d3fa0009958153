"""Work: nobody waits beside room, goes without need, or comes without room.

Drafts are a gamble: of engines that promise `drafts_last`, what they take of a step counts as room,
and who loses blocks for them loses them in vain.

For engines that promise an order (`_service_order`), since only then the next is known. Room is
counted on the safe side, with what the log tells of the step:

- blocks that were free after the step before, less all that were handed out in this one; it takes
  those for all its known tokens but what it is certain to share with running requests, beside
  others with the watermark and a run of drafts for each branch;
- tokens of the budget that nobody used;
- places by `max_num_seqs`, one for each branch that had not ended before the step.

Where an engine schedules by priority (`scheduling_policy`) and promises `evicts_for_urgent`, the
next is also let in at the cost of less urgent ones. That is judged when it waits for a second step,
since swapped blocks come free a step late. Where prefills and decodes share no step, a prompt may
have to fit in what others leave of the budget.

A step with a preemption, an action of the plan or withheld blocks admits nobody for good reasons,
and one in which a running request computes nothing lacks blocks for it. Who is swapped out needs
blocks that the log does not count, and a step that is decided ahead is decided on other figures:
neither is judged.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from preempt_harness.checks._conditions import mixes_steps, num_withheld, steps_ahead
from preempt_harness.checks._service_order import next_waiting, promises_order, service_order
from preempt_harness.checks._work_draft_room import DraftRoom
from preempt_harness.checks._work_hits import certain_hits, shares_blocks
from preempt_harness.checks.drafts import drafts_come_last
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import IdleSteps, SteadySteps
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent, num_blocks_for
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    EngineError,
    Finished,
    Header,
    PlanApplied,
    PoolCounts,
    Preempted,
    PriorityChanged,
    TokensChosen,
)

EVICTS_FOR_URGENT = "evicts_for_urgent"
"""The capability, as a record's header lists it."""


def admits_when_it_can(header: Header) -> bool:
    """Whether an engine of this configuration is held to it."""
    return promises_order(header) and not steps_ahead(header)


def _evicts_for_the_urgent(header: Header) -> bool:
    """Whether who waits takes the blocks of the less urgent."""
    by_priority = header.config.get("scheduling_policy") == "priority"
    return by_priority and EVICTS_FOR_URGENT in header.capabilities


def check_idle(trace: Trace) -> CheckResult:
    """The next in the queue is let in as soon as there is room for it."""
    judge = _Idle(trace)
    for event in trace.of(
        SteadySteps,
        IdleSteps,
        Arrived,
        CacheReset,
        *TABLE_EVENTS,
        EngineError,
        Preempted,
        PriorityChanged,
        PlanApplied,
        ScheduledRows,
        DeliveredRows,
        TokensChosen,
        PoolCounts,
        Finished,
        Aborted,
    ):
        judge.take(event)
    judge.end(trace)
    return judge.listing.result("work", "idle room")


class _Wait(NamedTuple):
    """The next in the queue was not let in.

    Attributes:
        step, request: when, and who.
        num_blocks: it takes at most.
        num_free: blocks.
        rest: of the sentence about it.
    """

    step: int
    request: str
    num_blocks: int
    num_free: int
    rest: str


class _Idle:
    """What a step had to give, and to whom."""

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._specs = trace.specs
        self._header = trace.header
        self._tables = SchedulerTables()
        self._order = service_order(trace.header)
        self._waiting: dict[str, int] = {}  # request -> blocks for all its known tokens
        self._known: dict[str, int] = {}  # of who waits
        self._victims: set[str] = set()  # their branches have no blocks, and have not ended
        self._swapped: set[str] = set()
        self._ended: Counter[str] = Counter()  # branches
        self._pool: PoolCounts | None = None  # after the step before
        self._may_share: list[_Wait] = []  # there was room but for what they may share
        self._kept_out = ""  # who was the next in the step before, if evictions had let it in
        self._drafts = DraftRoom(trace.header) if drafts_come_last(trace.header) else None
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_taken = self._num_tokens = 0
        self._computing: set[str] = set()
        self._is_excused = False
        self._is_disturbed = False  # by more than evictions for the more urgent
        self._is_planned = False  # the plan, or an error, has a part in it
        # Who was let in beside how many others, and how many blocks were in use then.
        self._admissions: list[tuple[BlocksAllocated, int, int]] = []
        self._num_given_up = 0  # blocks that victims of the step left to others
        self._short: list[str] = []  # preempted for want of blocks
        self._ended_now: Counter[str] = Counter()
        if self._drafts is not None:
            self._drafts.begin_step(self._tables)

    def take(self, event: object) -> None:
        """The next thing that happened."""
        if self._drafts is not None:
            self._drafts.take(event, self._tables)
        if isinstance(event, DeliveredRows | TokensChosen):
            return
        if isinstance(event, ScheduledRows):
            self._num_tokens += event.num_tokens
            self._computing.update(map(request_of, event.seqs))
        elif isinstance(event, PoolCounts):
            self._end_step(event.step, event)
        elif isinstance(event, SteadySteps | IdleSteps):
            self._take_several(event)
        elif isinstance(event, TableEvent):
            self._take_blocks(event)
        elif isinstance(event, Arrived):
            self._order.take(event)
            self._known[event.request] = len(event.prompt_token_ids)
            self._waiting[event.request] = self._blocks(len(event.prompt_token_ids))
        elif isinstance(event, Preempted):
            if event.reason == "priority":
                self._judge_eviction(event)
            elif event.reason == "out_of_blocks":
                self._short.append(event.request)
            self._order.take(event)
            self._is_excused = True
            self._is_disturbed |= event.reason != "priority"
            self._victims.add(event.request)
            num_branches = self._num_branches(event.request)
            self._known[event.request] = event.num_tokens
            self._waiting[event.request] = self._blocks(event.num_tokens) + num_branches - 1
            if event.mode == "swap":
                self._swapped.add(event.request)
            else:
                self._swapped.discard(event.request)
        elif isinstance(event, PriorityChanged | CacheReset):
            self._order.take(event)
        elif isinstance(event, Finished | Aborted):
            self._order.take(event)
            self._waiting.pop(event.request, None)
        else:  # an action of the plan, or an error
            self._is_excused = self._is_disturbed = self._is_planned = True

    def _take_blocks(self, event: TableEvent) -> None:
        self._tables.follow(event)
        if isinstance(event, BlocksAllocated):
            self._num_taken += len(event.blocks)
            request = request_of(event.seq)
            self._order.admit(request)
            if self._waiting.pop(request, None) is not None:
                others = {request_of(seq) for seq in self._tables.leases} - {request}
                self._admissions.append((event, len(others), len(self._tables.refs)))
            self._victims.discard(request)
            self._swapped.discard(request)
        elif isinstance(event, BlocksFreed):
            request = request_of(event.seq)
            if request in self._victims and not self._victims & self._swapped:
                self._num_given_up += sum(block not in self._tables.refs for block in event.blocks)
            if event.seq not in self._tables.leases and request not in self._victims:
                self._ended_now[request] += 1

    def _take_several(self, event: SteadySteps | IdleSteps) -> None:
        """Nobody comes or goes in them, so the first two stand for all."""
        for step in (event.step, event.last_step)[: 1 + (event.last_step > event.step)]:
            if isinstance(event, SteadySteps):
                self._num_tokens += sum(event.lengths)
                self._computing.update(map(request_of, event.seqs))
            self._end_step(step, event.pool)

    def _end_step(self, step: int, pool: PoolCounts) -> None:
        before, self._pool = self._pool, pool
        withheld = any(num_withheld(self._header, item) for item in (before, pool) if item)
        if not self._is_disturbed and before is not None and not withheld:
            self._judge_admissions(pool)
        excused = self._is_excused or before is None or withheld
        kept_out = ""
        if not excused and self._waiting and before is not None:
            kept_out = self._judge(step, before)
        self._judge_kept_out(step, kept_out)
        self._is_planned |= withheld
        if self._short and self._drafts is not None:
            self._judge_want(step, self._drafts)
        self._ended += self._ended_now
        self._begin_step()

    def _judge(self, step: int, before: PoolCounts) -> str:
        """Returns the next in the queue if it waits only for the less urgent."""
        request = next_waiting(self._order)
        holding = {request_of(seq) for seq in self._tables.leases}
        if (
            request is None
            or request in self._swapped
            or self._waiting.keys() - self._order.waiting
        ):
            return ""
        if not holding - self._computing:
            self._judge_wait(step, request, before)
        return request if self._is_kept_out(request, holding, before) else ""

    def _judge_wait(self, step: int, request: str, before: PoolCounts) -> None:
        """Whether there is room for the next in the queue, or would be without drafts."""
        running = self._computing  # some have ended since
        self.listing.count("waits judged")
        config = self._header.config
        num_free = before.free + before.cached - self._num_taken
        num_blocks = self._waiting[request] + (self._num_spare(request) if running else 0)
        places = self._num_branches(request) + sum(map(self._num_branches, running))
        budget, most = config.get("max_num_batched_tokens"), config.get("max_num_seqs")
        if not isinstance(budget, int) or not isinstance(most, int) or places > most:
            return
        if self._num_tokens + self._least_chunk(request) <= budget:
            wait = _Wait(
                step,
                request,
                num_blocks,
                num_free,
                f"{places} of {most} places would be taken, and {self._num_tokens} of {budget} "
                "tokens are computed",
            )
            if num_blocks <= num_free:
                self._report_wait(wait)
                return
            if running:
                self._may_share.append(wait)
        drafts = self._drafts
        if drafts is None or self._admissions:  # they leave room for one
            return
        num_known = self._num_tokens - drafts.num_tokens
        if num_known + self._least_chunk(request) <= budget and (
            num_blocks <= num_free + drafts.num_blocks
        ):
            self.listing.report(
                Code.WORK_DRAFTS,
                step,
                f"it waits, and is the next, and drafts have its room: it takes {num_blocks} "
                f"blocks at most, {num_free} are free and {drafts.num_blocks} were taken for "
                f"drafts, which are {drafts.num_tokens} of the {self._num_tokens} tokens computed "
                f"(of {budget})",
                once=request,
                request=request,
            )

    def _report_wait(self, wait: _Wait, num_shared: int = 0) -> None:
        shared = f", of which it shares {num_shared}" if num_shared else ""
        self.listing.report(
            Code.WORK_IDLE,
            wait.step,
            f"it waits, and is the next, in a step with room for it: {wait.num_free} blocks are "
            f"free and it takes {wait.num_blocks} at most{shared}, {wait.rest}",
            once=wait.request,
            request=wait.request,
        )

    def end(self, trace: Trace) -> None:
        """All is taken in: find whom a part of what it takes would have been shared with."""
        if not self._may_share or not shares_blocks(self._header):
            return
        waits = [(wait.step, wait.request) for wait in self._may_share]
        for wait, num_shared in zip(self._may_share, certain_hits(trace, waits), strict=True):
            if wait.num_blocks - num_shared <= wait.num_free:
                self._report_wait(wait, num_shared)

    def _least_chunk(self, request: str) -> int:
        """Tokens of it that a step with others takes in at least.

        Where drafts may come first, a step may keep tokens for a run of them.
        """
        if self._computing and not mixes_steps(self._header):
            return self._known[request]
        return 1 if self._drafts is not None else 1 + self._num_drafts

    def _is_kept_out(self, request: str, holding: set[str], before: PoolCounts) -> bool:
        """Whether there is room for it if all that are less urgent go.

        Each branch of the others may take a block more, one for a copy and one until swapped blocks
        are free, and a run of drafts.
        """
        config, (priority, _) = self._header.config, self._order.waiting[request]
        running = self._order.running
        less_urgent = {name for name in holding if name in running and running[name][0] > priority}
        most = config.get("max_num_seqs")
        if not less_urgent or not _evicts_for_the_urgent(self._header):
            return False
        others = (holding | self._computing) - less_urgent
        kept: set[int] = set()
        given: set[int] = set()
        for seq, lease in self._tables.leases.items():
            (given if request_of(seq) in less_urgent else kept).update(lease.blocks)
        num_free = before.free + before.cached + len(given - kept) - self._num_taken
        num_branches = sum(map(self._num_branches, others))
        num_blocks = self._waiting[request] + self._num_spare(request) + 3 * num_branches
        num_blocks += num_branches * self._blocks(self._num_drafts)
        places = self._num_branches(request) + num_branches
        return isinstance(most, int) and places <= most and num_blocks <= num_free

    def _judge_kept_out(self, step: int, request: str) -> None:
        """Find who is kept out by the less urgent for the second step in a row."""
        before, self._kept_out = self._kept_out, request
        if request and request == before:
            self.listing.report(
                Code.PROG_ORDER,
                step,
                f"it waits for the second step in which less urgent requests run, whose blocks and "
                f"places would do for it (priority {self._order.waiting[request][0]})",
                once=request,
                request=request,
            )

    def _judge_admissions(self, pool: PoolCounts) -> None:
        """Whether those that were let in left enough to those beside whom they were.

        What is still to be copied to the host counts as left.
        """
        watermark = self._num_watermark_blocks()
        num_reserved = pool.held - num_withheld(self._header, pool)
        for event, num_others, num_used in self._admissions:
            self.listing.count("admissions judged")
            num_left = pool.num_blocks - num_used - num_reserved
            if num_others and num_left < watermark:
                request = request_of(event.seq)
                self.listing.report(
                    Code.WORK_CROWDED,
                    event.step,
                    f"it is let in beside {num_others} others and leaves {num_left} blocks free; "
                    f"the watermark is {watermark}",
                    once=request,
                    request=request,
                )

    def _judge_want(self, step: int, drafts: DraftRoom) -> None:
        """Whether somebody lost blocks in a step in which drafts take some, or just before it."""
        self.listing.count("steps short of blocks judged")
        num_blocks = drafts.num_blocks
        if not self._is_planned:
            num_blocks += drafts.num_granted
        if num_blocks:
            for request in self._short:
                self.listing.report(
                    Code.WORK_DRAFTS,
                    step,
                    f"it is preempted for want of blocks, and {num_blocks} blocks are taken for "
                    "drafts in the same step, or behind the step before",
                    once=request,
                    request=request,
                )

    def _judge_eviction(self, event: Preempted) -> None:
        """Whether the more urgent one, the next in the queue, fits beside all that run.

        Each of their branches may take a block more in this step, and one for a copy. What victims
        before it gave up is room, unless it is still to be copied to the host.
        """
        before, most = self._pool, self._header.config.get("max_num_seqs")
        newcomer = next_waiting(self._order)
        if self._is_disturbed or before is None or newcomer is None:
            return
        if num_withheld(self._header, before):
            return
        running = {request_of(seq) for seq in self._tables.leases}
        num_branches = sum(map(self._num_branches, running))
        places = self._num_branches(newcomer) + num_branches
        num_free = before.free + before.cached + self._num_given_up - self._num_taken
        num_blocks = self._waiting[newcomer] + self._num_spare(newcomer) + 2 * num_branches
        self.listing.count("evictions judged")
        if newcomer in self._swapped or not isinstance(most, int):
            return
        if places <= most and num_blocks <= num_free:
            self.listing.report(
                Code.WORK_VAIN,
                event.step,
                f"it is preempted for {newcomer}, which fits beside it: {num_free} blocks are "
                f"free, and it and all that run take {num_blocks} at most",
                once=event.request,
                request=event.request,
            )

    def _num_spare(self, request: str) -> int:
        """Blocks that an admission beside others leaves free, at most.

        Where drafts come last, one output takes no more than a run of drafts that ends before its
        last token, which nobody drafts for.
        """
        num_branches = self._num_branches(request)
        num_blocks = num_branches * self._blocks(self._num_drafts)
        spec = self._specs.get(request)
        if self._drafts is not None and spec is not None and spec.sampling.num_sequences == 1:
            known = self._known[request]
            last = max(known, spec.num_prompt_tokens + spec.sampling.max_tokens - 1)
            end = min(known + self._num_drafts, last)
            num_blocks = self._blocks(end) - self._blocks(known)
        return self._num_watermark_blocks() + num_blocks

    @property
    def _num_drafts(self) -> int:
        number = self._header.config.get("num_speculative_tokens", 0)
        assert isinstance(number, int)
        return number

    def _num_watermark_blocks(self) -> int:
        watermark = self._header.config.get("watermark", 0)
        assert isinstance(watermark, int | float)
        return int(watermark * self._header.num_blocks)

    def _num_branches(self, request: str) -> int:
        """Those that have not ended."""
        spec = self._specs.get(request)
        count = 1 if spec is None else spec.sampling.num_sequences
        if spec is not None and spec.sampling.beam is not None:
            return count  # its beams come and go, and it keeps their places
        return max(1, count - self._ended[request])

    def _blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self._header.block_size)
