"""Work of the prefix cache: what a running request holds is not computed again for another one.

A cache that finds too little changes no output. What it must find at least is judged where nobody
can differ: the block is full, in the table of a request that runs, computed some steps ago, of
content that never stood in another block, and a token is left to be computed.

Whether an engine finds blocks that nobody holds any more is its own business, unless it promises
to (`lasting_cache`): then a block counts until it is handed out again, or may have been withheld,
and every branch of a request is judged, also when it comes back. Not so where steps are decided
ahead: what was computed last may have been lost with the request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.progress import steps_ahead, steps_with_held_blocks
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

LASTING_CACHE = "lasting_cache"
"""The capability, as a record's header lists it."""

_KINDS = (
    SteadySteps,
    ScheduledRows,
    DeliveredRows,
    *TABLE_EVENTS,
    Arrived,
    CacheReset,
    Preempted,
    TokensChosen,
)


def shares_blocks(header: Header) -> bool:
    """Whether hits are judged: with drafts, engines leave the last block out."""
    return bool(header.config.get("enable_prefix_caching")) and not header.config.get(
        "num_speculative_tokens"
    )


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
    """

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._size = trace.header.block_size
        num_ahead = steps_ahead(trace.header)
        self._least_age = 2 + 2 * num_ahead  # steps
        self._whose = "running requests hold"
        self._lasts = LASTING_CACHE in trace.header.capabilities and not num_ahead
        self._held_steps: Set[int] = frozenset()
        if self._lasts:
            self._whose = "running requests, and blocks that were not handed out since, hold"
            self._held_steps = trace.derive(steps_with_held_blocks)
        # Branches share blocks in ways of their own; what tells of prompts may skip the cache.
        self._judged = {
            name
            for name, spec in trace.specs.items()
            if (self._lasts or spec.sampling.num_sequences == 1)
            and spec.sampling.prompt_logprobs is None
        }
        self._tables = SchedulerTables()
        self._known: defaultdict[str, list[int]] = defaultdict(list)
        self._chains: defaultdict[str, list[int]] = defaultdict(list)  # of full blocks of known
        self._content: dict[int, tuple[int, int]] = {}  # block -> (chain value, step)
        self._places: defaultdict[int, set[int]] = defaultdict(set)  # value -> blocks, ever
        self._left: dict[int, int] = {}  # block -> step in which its last holder gave it up
        self._swapped: set[str] = set()
        self._back: dict[str, int] = {}  # request -> step in which it came back from the host
        # What goes on from content of before a reset may not be offered, and where that came back
        # from the host, nobody knows its age.
        self._not_offered: set[str] = set()  # sequences

    def take(self, event: object) -> None:
        """Take in the next event."""
        if isinstance(event, ScheduledRows):
            self._compute(event.seqs, event.starts, event.ends, event.step)
        elif isinstance(event, SteadySteps):
            for seq, token_ids in zip(event.delivered_seqs, event.delivered_ids(), strict=True):
                self._known[seq] += token_ids
            self._compute(event.seqs, event.starts, event.ends, event.last_step)
        elif isinstance(event, DeliveredRows):
            for seq, ids in zip(event.seqs, event.token_ids, strict=True):
                self._known[seq] += ids
        elif isinstance(event, Arrived):
            self._known[f"{event.request}.0"] = list(event.prompt_token_ids)
        elif isinstance(event, BlocksAllocated):
            self._allocate(event)
        elif isinstance(event, TokensChosen):
            self._known[event.seq] += event.token_ids
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
            if isinstance(event, Forked):
                self._fork(event)
            elif isinstance(event, BlocksFreed):
                left = (block for block in event.blocks if block not in self._tables.refs)
                self._left.update(dict.fromkeys(left, event.step))
        elif isinstance(event, CacheReset):
            self._content.clear()
            if self._lasts:  # and nothing else does: where it stood before does not matter
                self._places.clear()
            self._not_offered = set(self._tables.leases)
        elif isinstance(event, Preempted):
            if event.mode == "swap":
                self._swapped.add(event.request)
            else:
                self._swapped.discard(event.request)

    def _fork(self, event: Forked) -> None:
        """The child knows what its parent does, and offers what that would."""
        self._known[event.child] = list(self._known[event.parent])
        self._chains[event.child] = list(self._chains[event.parent])
        if event.parent in self._not_offered:
            self._not_offered.add(event.child)

    def _allocate(self, event: BlocksAllocated) -> None:
        request = request_of(event.seq)
        begins = event.seq not in self._tables.leases
        if request in self._swapped:
            self._swapped.discard(request)
            self._back[request] = event.step
        comes_back = self._back.get(request) == event.step  # with all its branches
        if begins and not comes_back and request in self._judged:
            self._judge(event)
        self._tables.allocate(event)
        if begins and comes_back:
            self._not_offered.add(event.seq)
        elif begins:
            self._not_offered.discard(event.seq)
        for block in event.blocks[event.num_cached :]:
            self._content.pop(block, None)

    def _judge(self, event: BlocksAllocated) -> None:
        self.listing.count("admissions judged")
        num_certain = 0
        most = (len(self._known[event.seq]) - 1) // self._size  # one token is computed at least
        for value in self._chain(event.seq)[:most]:
            if not self._is_held(value, event.step):
                break
            num_certain += 1
        if event.num_cached < num_certain:
            self.listing.report(
                Code.WORK_CACHE_MISS,
                event.step,
                f"it is admitted with {event.num_cached} blocks of the prefix cache, and "
                f"{self._whose} the first {num_certain} blocks of its tokens",
                once=event.seq,
                seq=event.seq,
            )

    def _is_held(self, value: int, step: int) -> bool:
        """Whether the cache has had this content for some steps, in the place where it ever stood.

        That is a block in the table of a running request, or one that lasts.
        """
        places = self._places.get(value, ())
        if len(places) != 1:
            return False
        (block,) = places
        found, since = self._content.get(block, (None, 0))
        if found != value or since + self._least_age > step:
            return False
        return block in self._tables.refs or (self._lasts and not self._may_be_held(block, step))

    def _may_be_held(self, block: int, step: int) -> bool:
        """Whether the harness may have taken the block since nobody has it."""
        first = self._left.get(block, 0)
        return any(held in self._held_steps for held in range(first, step + 1))

    def _compute(
        self, seqs: Sequence[str], starts: Sequence[int], ends: Sequence[int], step: int
    ) -> None:
        """Blocks that the rows fill have their content from this step on."""
        for seq, start, end in zip(seqs, starts, ends, strict=True):
            first, stop = start // self._size, end // self._size
            lease = self._tables.leases.get(seq)
            if first == stop or lease is None or seq in self._not_offered:
                continue
            chain = self._chain(seq)
            for index in range(first, min(stop, len(chain), len(lease.blocks))):
                block = lease.blocks[index]
                self._content[block] = (chain[index], step)
                self._places[chain[index]].add(block)

    def _chain(self, seq: str) -> list[int]:
        """Values of the full blocks of a sequence's known tokens."""
        known, chain, size = self._known[seq], self._chains[seq], self._size
        for index in range(len(chain), len(known) // size):
            before = chain[-1] if chain else 0
            chain.append(hash((before, *known[index * size : (index + 1) * size])))
        return chain
