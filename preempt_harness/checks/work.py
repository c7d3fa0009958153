"""Work: the right output at a price. Tokens computed twice, needless preemptions, bytes to workers.

A step's message may grow with what is new in it, never with the context. Bound, in bytes:

    64 + sum over sequences named (48 + len(name)) + 5 * ids

ids are token ids and block ids that the worker does not have yet: all of a sequence's when it is
admitted, otherwise one per scheduled token and one per new block; and pairs of ids to copy. 64 is
the frame, 48 the flags and up to five numbers of a sequence, 5 the longest msgpack form of a 32-bit
number. Because short contexts hide in that bound, messages with equal work are compared as well:
between steps of one rank that schedule the same number of sequences, one token each, and nothing
new, only the width of three numbers per sequence (1 to 5 bytes each) may change.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

from preempt_harness.checks._accounting_counters import TalliedTrial
from preempt_harness.checks._conditions import steps_ahead, steps_with_held_blocks
from preempt_harness.checks.drafts import drafts_come_last, has_drafts
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import SchedulerTables, num_blocks_for
from preempt_harness.checks.trace import (
    Batch,
    DeliveredRows,
    ScheduledRows,
    Trace,
    batches,
)
from preempt_harness.record import (
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksPoisoned,
    BlocksReplaced,
    Forked,
    PlanApplied,
    Preempted,
    PriorityChanged,
    Scheduled,
    StepDone,
    StepSent,
    SwappedIn,
    SwappedOut,
    TokensChosen,
)

FRAME_BYTES = 64
SEQUENCE_BYTES = 48
ID_BYTES = 5
WIDTH_BYTES = 12
"""Three numbers of a sequence, each 1 to 5 bytes wide."""


def check_recompute(trace: Trace) -> CheckResult:
    """Only what a preemption lost is computed twice."""
    listing = Listing()
    tally = trace.derive(TalliedTrial).tally
    for name in ("num_recomputed_tokens", "num_generated_tokens", "num_preemptions"):
        listing.count(name, tally.values[name])
    again, lost = _computed_again(trace)
    for request, count in again.items():
        if count > lost[request]:
            listing.report(
                Code.WORK_RECOMPUTE,
                None,
                f"{count} positions of known tokens are computed again, but its preemptions lost "
                f"{lost[request]} only",
                request=request,
            )
    return listing.result("work", "recompute")


def _computed_again(trace: Trace) -> tuple[dict[str, int], Counter[str]]:
    """What was computed twice, and what preemptions lost.

    Positions beyond the known tokens are drafts, and may be computed again.

    Returns:
        Request -> tokens scheduled at positions that had been computed with their known token, and
        request -> most such positions that its preemptions by recompute can have lost.
    """
    known: defaultdict[str, int] = defaultdict(int)
    settled: defaultdict[str, int] = defaultdict(int)
    again: dict[str, int] = {}
    lost: Counter[str] = Counter()
    for event in _steps_that_go_on(trace, settled):
        if isinstance(event, SteadySteps):
            for seq in event.delivered_seqs:
                known[seq] += event.num_steps - 1
            for seq, end in zip(event.seqs, event.ends, strict=True):
                if not settled[seq]:
                    again.setdefault(request_of(seq), 0)
                settled[seq] = max(settled[seq], min(end, known[seq]))
            for seq in event.delivered_seqs:
                known[seq] += 1
        elif isinstance(event, ScheduledRows):
            for seq, start, end in zip(event.seqs, event.starts, event.ends, strict=True):
                before = settled[seq]
                if not before:
                    again.setdefault(request_of(seq), 0)
                elif start < before:
                    again[request_of(seq)] += max(0, min(end, before) - start)
                if end > before:
                    settled[seq] = max(before, min(end, known[seq]))
        elif isinstance(event, DeliveredRows):
            for seq, token_ids in zip(event.seqs, event.token_ids, strict=True):
                known[seq] += len(token_ids)
        elif isinstance(event, Arrived):
            known[f"{event.request}.0"] = len(event.prompt_token_ids)
        elif isinstance(event, TokensChosen):
            known[event.seq] += len(event.token_ids)
        elif isinstance(event, Forked):
            known[event.child] = known[event.parent]
            settled[event.child] = settled[event.parent]
        elif event.mode != "swap":
            for seq, count in settled.items():
                if request_of(seq) == event.request:
                    lost[event.request] += count
    return again, lost


def _steps_that_go_on(trace: Trace, settled: Mapping[str, int]) -> Iterator[Any]:
    """What concerns work, steady steps one by one unless they begin behind all that is settled."""
    kinds = (ScheduledRows, DeliveredRows, TokensChosen, Forked, Arrived, Preempted)
    for event in trace.of(SteadySteps, *kinds):
        if isinstance(event, SteadySteps) and not all(
            settled[seq] <= start for seq, start in zip(event.seqs, event.starts, strict=True)
        ):
            yield from (batch for batch in batches(event.events) if isinstance(batch, kinds))
        else:
            yield event


def check_preemptions(trace: Trace, expected: int | None = None) -> CheckResult:
    """No request is preempted more often than others can need blocks, nobody in vain.

    A natural preemption of r hands r's blocks to another request, which needs each of its own
    blocks once per admission; so r is preempted at most once per block of the others, and once more
    by itself, in each of their stays. A squeeze takes blocks as another request would, and begins
    new stays like a forced preemption. While it lasts, a request of several sequences may come in
    again and again, and go before all of them can go on, and so may any whose drafts take blocks as
    its tokens do: that is not counted.

    Args:
        expected: natural preemptions of the clean engine on the same workload, if known.
    """
    listing = Listing()
    specs = trace.specs
    size = trace.header.block_size
    blocks = {
        request: num_blocks_for(spec.num_prompt_tokens + spec.sampling.max_tokens, size)
        for request, spec in specs.items()
    }
    natural: Counter[str] = Counter()
    forced = 0
    held = trace.derive(steps_with_held_blocks)
    greedy_drafts = has_drafts(trace.header) and not drafts_come_last(trace.header)
    for event in trace.of(Preempted, PlanApplied):
        if isinstance(event, Preempted):
            spec = specs.get(event.request)
            grows_at_once = greedy_drafts or (spec is not None and spec.sampling.num_sequences > 1)
            if event.reason != "forced" and not (grows_at_once and event.step in held):
                natural[event.request] += 1
            forced += event.reason == "forced"
        else:
            forced += event.action.startswith("squeeze")
    total = sum(natural.values())
    listing.count("natural preemptions", total)
    listing.count("forced preemptions", forced)
    for request, count in natural.items():
        others = sum(blocks.values()) - blocks.get(request, 0)
        bound = (others + 1) * (1 + forced)
        if count > bound:
            listing.report(
                Code.WORK_PREEMPTIONS,
                None,
                f"it is preempted {count} times by lack of blocks, at most {bound} can be needed "
                f"({others} blocks of the others + 1, times 1 + {forced} forced preemptions and "
                f"squeezes)",
                request=request,
            )
    if expected is not None and total > expected:
        listing.report(
            Code.WORK_PREEMPTIONS,
            None,
            f"{total} preemptions by lack of blocks, the clean engine needs {expected}",
        )
    return listing.result("work", "preemptions")


@dataclass(slots=True)
class _Taking:
    """Who lost and who got blocks in one step."""

    victims: dict[str, bool] = field(default_factory=dict)  # request -> it needed a block itself
    displaced: set[str] = field(default_factory=set)  # victims for a more urgent request
    takers: set[str] = field(default_factory=set)
    admitted: set[str] = field(default_factory=set)  # takers that had nothing before

    def take(self, request: str, is_new: bool) -> None:
        """The request gets blocks."""
        self.takers.add(request)
        if is_new:
            self.admitted.add(request)


def check_vain(trace: Trace) -> CheckResult:
    """A victim of a lack of blocks makes room: somebody gets blocks in the same step.

    A victim for a more urgent request makes room for one that waits, which gets its first blocks.
    A request that needs a block and is the least urgent itself is its own victim; nobody gains.
    It needs slots for the token after those that are computed or on their way, and for its drafts.
    Where blocks are swapped out, freed ones may be withheld until they are copied, so that they are
    had in the next step, unless whoever they are for is taken away before, by the plan, by the user
    or for others in turn, somebody more urgent than the victim comes in that step and waits for
    more, the harness withholds blocks in it, or the others use up its token budget. What several
    branches of one victim needed, copies of shared blocks included, the log does not tell; such a
    victim is taken to have needed a block. Nor is a scheduler judged that decides ahead: a victim's
    blocks come free when the steps under way are done, and by then whoever needed them may have
    ended.
    """
    listing = Listing()
    if steps_ahead(trace.header) or not trace.has(Preempted):
        return listing.result("work", "victims")
    tables = SchedulerTables()
    steps: dict[int, _Taking] = {}
    swapping: set[int] = set()
    num_drafts = trace.header.config.get("num_speculative_tokens", 0)
    for event in trace.of(
        Arrived,
        BlocksAllocated,
        BlocksFreed,
        BlocksReplaced,
        Forked,
        SwappedOut,
        Aborted,
        PlanApplied,
        Preempted,
        PriorityChanged,
    ):
        if isinstance(event, BlocksAllocated):
            held = tables.leases.get(event.seq)
            is_new = held is None or not held.blocks
            tables.allocate(event)
            steps.setdefault(event.step, _Taking()).take(request_of(event.seq), is_new)
            if event.step - 1 in swapping:
                steps[event.step - 1].take(request_of(event.seq), is_new)
        elif isinstance(event, SwappedOut):
            steps.setdefault(event.step, _Taking())
            swapping.add(event.step)
        elif isinstance(event, Arrived) and event.step - 1 in swapping:
            before = steps[event.step - 1]
            victims = [trace.specs[name] for name in before.displaced if name in trace.specs]
            if any(event.priority < spec.priority for spec in victims):
                before.take(f"{event.request}, more urgent", is_new=True)
        if _takes_away(event) and event.step - 1 in swapping:
            # Whoever it is, the victim too: another order of urgency may leave nobody to come.
            steps[event.step - 1].take(f"{event.request}, from outside", is_new=True)
        if isinstance(event, Preempted) and event.reason != "forced":
            lease = tables.leases.get(f"{event.request}.0")
            room = len(lease.blocks) * trace.header.block_size if lease is not None else 0
            taking = steps.setdefault(event.step, _Taking())
            branches = sum(request_of(seq) == event.request for seq in tables.leases)
            wanted = max(event.num_tokens, event.num_computed_tokens + 1) + num_drafts
            taking.victims[event.request] = branches > 1 or wanted > room
            if event.reason == "priority":
                taking.displaced.add(event.request)
        elif isinstance(event, BlocksFreed | BlocksReplaced | Forked):
            tables.follow(event)
    for step, taking in steps.items():
        nobody_gains = not taking.takers - taking.victims.keys()
        nobody_comes = not taking.admitted - taking.victims.keys()
        for request, needed in taking.victims.items():
            if request in taking.displaced:
                if nobody_comes and not (step in swapping and _is_closed(trace, step + 1)):
                    what = "it is preempted for a more urgent request, and nobody is let in"
                    listing.report(Code.WORK_VAIN, step, what, request=request)
            elif nobody_gains and not needed:
                what = "it is preempted for want of blocks, and nobody gets a block in this step"
                listing.report(Code.WORK_VAIN, step, what, request=request)
    return listing.result("work", "victims")


def _is_closed(trace: Trace, step: int) -> bool:
    """Whether nobody could be let in: the step computes as many tokens as it may, or the harness
    withholds blocks."""
    if step in trace.derive(steps_with_held_blocks):
        return True
    budget = trace.header.config.get("max_num_batched_tokens")
    rows = (event for event in trace.record.events if event.step == step)
    num_tokens = sum(row.end - row.start for row in rows if isinstance(row, Scheduled))
    return isinstance(budget, int) and num_tokens >= budget


def _takes_away(event: Batch) -> TypeGuard[Preempted | Aborted | PlanApplied | PriorityChanged]:
    """Whether a request that was to get blocks may not need them, or not find them, any more."""
    if isinstance(event, PlanApplied):
        return event.action.startswith("squeeze")
    return isinstance(event, Aborted | PriorityChanged | Preempted)


def check_bytes(trace: Trace) -> CheckResult:
    """What a step sends to a worker grows with what is new, not with the context."""
    judge = _Bytes(steps_ahead(trace.header))
    for event in trace.batches:
        judge.take(event)
    return judge.listing.result("work", "bytes")


@dataclass(slots=True)
class _Message:
    """What one step has to tell a worker."""

    names: set[str] = field(default_factory=set)  # scheduled
    news: set[str] = field(default_factory=set)  # dropped or forked; may be scheduled as well
    num_scheduled: int = 0
    num_ids: int = 0
    steady: bool = True  # one token per sequence, nothing admitted, dropped, granted or copied


class _Bytes:
    def __init__(self, num_ahead: int) -> None:
        self.listing = Listing()
        self._known: Counter[str] = Counter()
        self._admitted: set[str] = set()
        self._drafted: set[str] = set()  # some of their ids may have to be cut off again
        self._new_blocks: Counter[str] = Counter()  # granted, and told when it is scheduled
        self._untold: set[str] = set()  # dropped or forked since the last message
        # The same of messages before; a step that is decided ahead tells of it later.
        self._late: deque[set[str]] = deque(maxlen=1 + num_ahead)
        # Blocks by which a sequence grew, in the steps in which it was scheduled; told likewise.
        self._late_blocks: defaultdict[str, deque[int]] = defaultdict(
            partial(deque, maxlen=num_ahead)
        )
        self._messages: dict[int, _Message] = {}
        self._sent: dict[int, list[StepSent]] = {}
        self._least: dict[tuple[int, int], StepSent] = {}

    def take(self, event: Batch) -> None:
        message = self._messages.setdefault(event.step, _Message())
        if isinstance(event, Arrived):
            self._known[f"{event.request}.0"] = len(event.prompt_token_ids)
        elif isinstance(event, DeliveredRows):
            for seq, token_ids in zip(event.seqs, event.token_ids, strict=True):
                self._known[seq] += len(token_ids)
        elif isinstance(event, TokensChosen):
            self._known[event.seq] += len(event.token_ids)
        elif isinstance(event, BlocksAllocated):
            self._new_blocks[event.seq] += len(event.blocks)
        elif isinstance(event, BlocksFreed):
            self._untold.add(event.seq)
            self._admitted.discard(event.seq)
            self._new_blocks.pop(event.seq, None)
            self._late_blocks.pop(event.seq, None)
        elif isinstance(event, Forked):
            self._known[event.child] = self._known[event.parent]
            self._untold.add(event.child)
        elif isinstance(event, Preempted | Aborted):
            # One that was swapped out may lose its host blocks, and no event says so.
            self._untold |= {seq for seq in self._known if request_of(seq) == event.request}
        elif isinstance(event, ScheduledRows):
            for seq, start, end in zip(event.seqs, event.starts, event.ends, strict=True):
                self._schedule(seq, start, end, message)
        elif isinstance(event, BlocksPoisoned):
            message.num_ids += len(event.blocks)
            message.steady = False
        elif isinstance(event, BlocksCopied | SwappedOut | SwappedIn):
            message.num_ids += 2 * len(event.pairs)
            message.steady = False
        elif isinstance(event, StepSent):
            first = event.step not in self._sent
            self._sent.setdefault(event.step, []).append(event)
            if first:
                self._late.append(self._untold)
                self._untold = set()
                message.news |= set().union(*self._late)
                message.steady &= not message.news
        elif isinstance(event, StepDone):
            for sent in self._sent.pop(event.step, []):
                self._judge(sent, message)
            self._messages.pop(event.step, None)

    def _schedule(self, seq: str, start: int, end: int, message: _Message) -> None:
        num_tokens = end - start
        message.names.add(seq)
        message.num_scheduled += 1
        granted, late = self._new_blocks.pop(seq, 0), self._late_blocks[seq]
        num_blocks = granted + sum(late)
        message.num_ids += num_blocks
        late.append(granted if seq in self._admitted else 0)
        message.steady &= num_tokens == 1 and not num_blocks and seq not in self._drafted
        self._drafted.discard(seq)
        if end > self._known[seq]:
            self._drafted.add(seq)
        if seq not in self._admitted:
            self._admitted.add(seq)
            message.num_ids += max(self._known[seq], end)
            message.steady = False
        else:
            message.num_ids += num_tokens

    def _judge(self, sent: StepSent, message: _Message) -> None:
        self.listing.count("messages judged")
        self.listing.count("bytes", sent.num_bytes)
        names = sum(SEQUENCE_BYTES + len(name) for name in [*message.names, *message.news])
        bound = FRAME_BYTES + names + ID_BYTES * message.num_ids
        if sent.num_bytes > bound:
            self.listing.report(
                Code.WORK_BYTES,
                sent.step,
                f"{sent.num_bytes} bytes are sent to rank {sent.rank}; {len(message.names)} "
                f"sequences and {message.num_ids} new ids need at most {bound}",
                once=sent.rank,
                rank=sent.rank,
            )
            return
        if not message.steady:
            return
        key = (sent.rank, message.num_scheduled)
        least = self._least.setdefault(key, sent)
        if sent.num_bytes < least.num_bytes:
            self._least[key] = sent
        allowed = least.num_bytes + WIDTH_BYTES * message.num_scheduled
        if sent.num_bytes > allowed:
            self.listing.report(
                Code.WORK_BYTES,
                sent.step,
                f"{sent.num_bytes} bytes are sent to rank {sent.rank} for one token each of "
                f"{message.num_scheduled} sequences; step {least.step} needed {least.num_bytes} "
                f"for the same, so the message grows with the context",
                once=sent.rank,
                rank=sent.rank,
            )
