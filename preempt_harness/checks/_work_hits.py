"""Work of the prefix cache: what a running request holds is not computed again for another one.

A cache that finds too little changes no output. What it must find at least is judged where nobody
can differ: the block is full, in the table of a request that runs, computed some steps ago, of
content that never stood in another block, and a token is left to be computed.

Whether an engine finds what came back from the host, and blocks that nobody holds any more, is its
own business, unless it promises that (`keeps_freed_blocks`). Then a block that was given up some
steps after it was filled is found until it is handed out again, and none is handed out while
another is kept that is found through it alone: ends of prefixes go before their beginnings. Where
blocks were withheld that is not judged, since nothing tells which they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from preempt_harness.checks._conditions import steps_ahead, steps_with_held_blocks
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    Forked,
    Header,
    Preempted,
    TokensChosen,
)

KEEPS_FREED_BLOCKS = "keeps_freed_blocks"
"""The capability, as a record's header lists it."""

_NOT_OFFERED = -1  # in place of a number of resets
_MAYBE = 1 << 60  # in place of a step: nobody knows whether it can be found

_KINDS = (
    SteadySteps,
    ScheduledRows,
    DeliveredRows,
    TokensChosen,
    *TABLE_EVENTS,
    Arrived,
    CacheReset,
    Preempted,
)


def shares_blocks(header: Header) -> bool:
    """Whether hits are judged: with drafts, engines leave the last block out."""
    return bool(header.config.get("enable_prefix_caching")) and not header.config.get(
        "num_speculative_tokens"
    )


def certain_hits(trace: Trace, admissions: Sequence[tuple[int, str]]) -> list[int]:
    """How many blocks requests are certain to share with running ones, were they let in.

    Args:
        trace: of a record that `shares_blocks`.
        admissions: (step, request), by step.

    Returns:
        Blocks for each; 0 for requests of which nothing is certain.
    """
    hits = _Hits(trace, keeps=False)
    found: list[int] = []
    for event in trace.of(*_KINDS):
        # Who arrives and what is forgotten in a step comes before anybody is let in.
        begins = isinstance(event, Arrived | CacheReset)
        while len(found) < len(admissions) and admissions[len(found)][0] + begins <= event.step:
            step, request = admissions[len(found)]
            found.append(hits.num_certain(f"{request}.0", step))
        hits.take(event)
    return found + [0] * (len(admissions) - len(found))


def check_hits(trace: Trace) -> CheckResult:
    """Who is admitted shares the blocks in which a running request has its first tokens."""
    judge = _Hits(trace)
    for event in trace.of(*_KINDS):
        judge.take(event)
    return judge.listing.result("work", "hits")


class _Hits:
    """Follows which content stands where.

    Args:
        trace: of a record with prefix caching.
        keeps: what nobody holds counts, too, where the engine promises to keep it.
    """

    def __init__(self, trace: Trace, *, keeps: bool = True) -> None:
        self.listing = Listing()
        self._size = trace.header.block_size
        self._least_age = 2 + 2 * steps_ahead(trace.header)  # steps
        # Branches share blocks in ways of their own; what tells of prompts may skip the cache.
        self._promises = KEEPS_FREED_BLOCKS in trace.header.capabilities
        self._keeps = keeps and self._promises and not _withholds(trace)
        self._judged = {
            name
            for name, spec in trace.specs.items()
            if (self._keeps or spec.sampling.num_sequences == 1)
            and spec.sampling.prompt_logprobs is None
        }
        self._tables = SchedulerTables()
        self._known: defaultdict[str, list[int]] = defaultdict(list)
        self._chains: defaultdict[str, list[int]] = defaultdict(list)  # of full blocks of known
        self._content: dict[int, tuple[int, int]] = {}  # block -> (chain value, step)
        # Value -> blocks that got it, since the last time that none had it.
        self._places: defaultdict[int, set[int]] = defaultdict(set)
        self._kept: set[int] = set()  # blocks with content that nobody holds
        self._built_on: defaultdict[int, set[int]] = defaultdict(set)  # value -> those that follow
        # Blocks that are computed before their tokens are known: sequence -> (index, block).
        self._ahead: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._swapped: set[str] = set()
        self._returned: set[str] = set()  # sequences, which compute nothing since
        # What goes on from content of before a reset may not be offered.
        self._num_resets = 0
        self._begun: dict[str, int] = {}  # sequence -> resets before its content was begun

    def take(self, event: object) -> None:
        """Take in the next event."""
        if isinstance(event, ScheduledRows):
            lengths = [end - start for start, end in zip(event.starts, event.ends, strict=True)]
            self._compute(event, lengths)
        elif isinstance(event, SteadySteps):
            for seq, token_ids in zip(event.delivered_seqs, event.delivered_ids(), strict=True):
                self._learn(seq, token_ids)
            self._compute(event, event.lengths)
        elif isinstance(event, DeliveredRows):
            for seq, ids in zip(event.seqs, event.token_ids, strict=True):
                self._learn(seq, ids)
        elif isinstance(event, TokensChosen):
            self._learn(event.seq, event.token_ids)
        elif isinstance(event, Arrived):
            self._known[f"{event.request}.0"] = list(event.prompt_token_ids)
        elif isinstance(event, BlocksAllocated):
            self._allocate(event)
        elif isinstance(event, BlocksFreed):
            self._free(event)
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
            if isinstance(event, Forked):
                self._known[event.child] = list(self._known[event.parent])
                self._chains[event.child] = list(self._chains[event.parent])
                self._begun[event.child] = self._begun.get(event.parent, 0)
        elif isinstance(event, CacheReset):
            self._content.clear()
            self._places.clear()
            self._kept.clear()
            self._num_resets += 1
        elif isinstance(event, Preempted):
            if event.mode == "swap":
                self._swapped.add(event.request)
            else:
                self._swapped.discard(event.request)

    def _allocate(self, event: BlocksAllocated) -> None:
        request = request_of(event.seq)
        begins, comes_back = event.seq not in self._tables.leases, request in self._swapped
        if begins and not comes_back and request in self._judged:
            self._judge(event)
        self._tables.allocate(event)
        if begins and comes_back:
            self._returned.add(event.seq)
            if not self._promises:
                self._begun[event.seq] = _NOT_OFFERED
        elif begins:
            self._returned.discard(event.seq)
            self._begun[event.seq] = self._num_resets
        for block in event.blocks[event.num_cached :]:
            if block in self._kept:
                self._judge_eviction(event, block)
            self._forget(block)
        if begins and comes_back:
            self._bring_back(event)
        self._kept.difference_update(event.blocks)

    def _bring_back(self, event: BlocksAllocated) -> None:
        """What comes from the host may be offered before anything is computed."""
        for block, value in zip(event.blocks, self._chain(event.seq), strict=False):
            self._content.setdefault(block, (value, _MAYBE))
            self._places[value].add(block)

    def _free(self, event: BlocksFreed) -> None:
        self._tables.free(event)
        if not self._keeps:
            return
        for block in event.blocks:
            if block not in self._tables.refs and block in self._content:
                _, since = self._content[block]
                if since + self._least_age <= event.step:  # else it may not have been offered
                    self._kept.add(block)

    def _forget(self, block: int) -> None:
        """The block is handed out; when no other has its content, it may come to stand anywhere."""
        value, _ = self._content.pop(block, (None, 0))
        if value is None:
            return
        places = self._places[value]
        if not any(self._content.get(other, (None, 0))[0] == value for other in places):
            places.clear()

    def _judge(self, event: BlocksAllocated) -> None:
        self.listing.count("admissions judged")
        num_certain = self.num_certain(event.seq, event.step)
        if event.num_cached < num_certain:
            where = "running requests or the cache" if self._keeps else "running requests"
            self.listing.report(
                Code.WORK_CACHE_MISS,
                event.step,
                f"it is admitted with {event.num_cached} blocks of the prefix cache, and {where} "
                f"hold the first {num_certain} blocks of its tokens",
                once=event.seq,
                seq=event.seq,
            )

    def num_certain(self, seq: str, step: int) -> int:
        """How many blocks the sequence is certain to share when it is let in."""
        if request_of(seq) not in self._judged:
            return 0
        most = (len(self._known[seq]) - 1) // self._size  # one token is computed at least
        for index, value in enumerate(self._chain(seq)[:most]):
            if not self._is_held(value, step):
                return index
        return max(0, min(most, len(self._chain(seq))))

    def _judge_eviction(self, event: BlocksAllocated, block: int) -> None:
        """Whether a block that is handed out takes others with it, which are kept."""
        self.listing.count("evictions judged")
        value, _ = self._content[block]
        if self._only_place(value) != block:
            return
        for follower in self._built_on.get(value, ()):
            end = self._only_place(follower)
            if end is not None and end in self._kept:
                self.listing.report(
                    Code.WORK_CACHE_MISS,
                    event.step,
                    f"the prefix cache gives up block {block} and keeps block {end}, which is "
                    "found through it alone",
                    once=event.seq,
                    seq=event.seq,
                    block=block,
                )

    def _is_held(self, value: int, step: int) -> bool:
        """Whether it is certain that the content is found."""
        block = self._only_place(value)
        if block is None or self._content[block][1] + self._least_age > step:
            return False
        return block in self._tables.refs or block in self._kept

    def _only_place(self, value: int) -> int | None:
        """The block with this content, if it never stood in another one."""
        places = self._places.get(value, ())
        if len(places) != 1:
            return None
        (block,) = places
        found, _ = self._content.get(block, (None, 0))
        return block if found == value else None

    def _compute(self, rows: ScheduledRows | SteadySteps, lengths: Sequence[int]) -> None:
        """Blocks that the rows fill, so many tokens a step, have their content from then on."""
        for seq, start, end, length in zip(rows.seqs, rows.starts, rows.ends, lengths, strict=True):
            first, stop = start // self._size, end // self._size
            if seq in self._returned:  # what it brought back is offered with what it computes
                self._returned.discard(seq)
                first = 0
            lease = self._tables.leases.get(seq)
            if first == stop or lease is None or self._begun.get(seq) != self._num_resets:
                continue
            chain = self._chain(seq)
            for index in range(first, min(stop, len(chain), len(lease.blocks))):
                block, last = lease.blocks[index], (index + 1) * self._size - 1
                self._content[block] = (chain[index], rows.step + max(0, last - start) // length)
                self._places[chain[index]].add(block)
                if index:
                    self._built_on[chain[index - 1]].add(chain[index])
            for index in range(max(first, len(chain)), min(stop, len(lease.blocks))):
                self._ahead[seq].append((index, lease.blocks[index]))

    def _learn(self, seq: str, token_ids: Sequence[int]) -> None:
        """More tokens are known, with which blocks may be full that were computed before."""
        self._known[seq] += token_ids
        if seq not in self._ahead:
            return
        chain, unsettled = self._chain(seq), []
        for index, block in self._ahead.pop(seq):
            if index < len(chain):
                self._places[chain[index]].add(block)
            else:
                unsettled.append((index, block))
        if unsettled:
            self._ahead[seq] = unsettled

    def _chain(self, seq: str) -> list[int]:
        """Values of the full blocks of a sequence's known tokens."""
        known, chain, size = self._known[seq], self._chains[seq], self._size
        for index in range(len(chain), len(known) // size):
            before = chain[-1] if chain else 0
            chain.append(hash((before, *known[index * size : (index + 1) * size])))
        return chain


def _withholds(trace: Trace) -> bool:
    """Whether the harness held blocks at any time."""
    return bool(trace.derive(steps_with_held_blocks))
