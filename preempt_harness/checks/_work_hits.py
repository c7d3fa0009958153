"""Work of the prefix cache: what a running request holds is not computed again for another one.

A cache that finds too little changes no output. What it must find at least is judged where nobody
can differ: the block is full, in the table of a request that runs, computed some steps ago, of
content that never stood in another block, and a token is left to be computed.

Whether an engine finds blocks that nobody holds any more is its own business, unless it promises
`keeps_freed`: then they are found until they are handed out again, and a block is not handed out
while one that follows it, and is worth nothing without it, stays. Not judged where the harness
holds blocks, since it takes some without a word, where steps are decided ahead, and of who was
swapped out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.progress import steps_ahead
from preempt_harness.checks.steady import SteadySteps
from preempt_harness.checks.tables import TABLE_EVENTS, Lease, SchedulerTables, TableEvent
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    CacheReset,
    Header,
    Preempted,
)

KEEPS_FREED = "keeps_freed"
"""The capability, as a record's header lists it."""

_KINDS = (
    SteadySteps,
    ScheduledRows,
    DeliveredRows,
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


def keeps_freed(header: Header) -> bool:
    """Whether blocks that nobody holds are to be found."""
    promised = KEEPS_FREED in header.capabilities and not steps_ahead(header)
    return promised and "squeeze" not in header.plan


def check_hits(trace: Trace) -> CheckResult:
    """Who is admitted shares the blocks in which a running request has its first tokens.

    Those that nobody holds any more as well, where the engine promises to keep them.
    """
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
        self._least_age = 2 + 2 * steps_ahead(trace.header)  # steps
        # Branches share blocks in ways of their own; what tells of prompts may skip the cache.
        self._judged = {
            f"{name}.0"
            for name, spec in trace.specs.items()
            if spec.sampling.num_sequences == 1 and spec.sampling.prompt_logprobs is None
        }
        self._tables = SchedulerTables()
        self._known: defaultdict[str, list[int]] = defaultdict(list)
        self._chains: defaultdict[str, list[int]] = defaultdict(list)  # of full blocks of known
        self._content: dict[int, tuple[int, int]] = {}  # block -> (chain value, step)
        self._places: defaultdict[int, set[int]] = defaultdict(set)  # value -> blocks, ever
        self._swapped: set[str] = set()
        # What goes on from content of before a reset may not be offered, and where that came back
        # from the host, nobody knows its age.
        self._not_offered: list[Lease] = []
        self._keeps_freed = keeps_freed(trace.header)
        self._parents: dict[int, int] = {}  # value -> of the block before
        self._evicted: dict[int, int] = {}  # value -> block, of the step at hand
        self._step = 0

    def take(self, event: object) -> None:
        """Take in the next event."""
        if self._evicted and isinstance(event, BlocksAllocated) and event.step != self._step:
            self._judge_evictions()
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
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
            if isinstance(event, BlocksFreed):
                self._free(event)
        elif isinstance(event, CacheReset):
            self._content.clear()
            self._not_offered = list(self._tables.leases.values())
        elif isinstance(event, Preempted):
            if event.mode == "swap":
                self._swapped.add(event.request)
            else:
                self._swapped.discard(event.request)

    def _allocate(self, event: BlocksAllocated) -> None:
        request = request_of(event.seq)
        begins, comes_back = event.seq not in self._tables.leases, request in self._swapped
        if begins and not comes_back and event.seq in self._judged:
            self._judge(event)
        self._tables.allocate(event)
        if begins and comes_back:
            self._not_offered.append(self._tables.leases[event.seq])
            self._swapped.discard(request)
        self._step = event.step
        for block in event.blocks[event.num_cached :]:
            value, _ = self._content.pop(block, (None, 0))
            if value is not None and self._keeps_freed:
                self._evicted[value] = block

    def _free(self, event: BlocksFreed) -> None:
        """What was computed too late to be offered, or is swapped out, need not be found.

        Nor is what branches leave.
        """
        excused = request_of(event.seq) in self._swapped or event.seq not in self._judged
        for block in event.blocks:
            _, since = self._content.get(block, (0, 0))
            if block not in self._tables.refs and (excused or since + self._least_age > event.step):
                self._content.pop(block, None)

    def _judge_evictions(self) -> None:
        """Whether a block of a step's was handed out before one that follows it."""
        evicted, self._evicted = self._evicted, {}
        for block, (value, _) in self._content.items():
            parent = self._parents.get(value)
            alone = len(self._places[value]) == 1 and block not in self._tables.refs
            if alone and parent in evicted and len(self._places[parent]) == 1:
                self.listing.report(
                    Code.WORK_CACHE_MISS,
                    self._step,
                    f"it is handed out anew while block {block}, which goes on from its content "
                    f"and is not to be found without it, stays cached",
                    once=parent,
                    block=evicted[parent],
                )

    def _judge(self, event: BlocksAllocated) -> None:
        self.listing.count("admissions judged")
        num_certain = 0
        most = (len(self._known[event.seq]) - 1) // self._size  # one token is computed at least
        for value in self._chain(event.seq)[:most]:
            if not self._is_held(value, event.step):
                break
            num_certain += 1
        if event.num_cached < num_certain:
            holder = "the pool keeps" if self._keeps_freed else "running requests hold"
            self.listing.report(
                Code.WORK_CACHE_MISS,
                event.step,
                f"it is admitted with {event.num_cached} blocks of the prefix cache, and "
                f"{holder} the first {num_certain} blocks of its tokens",
                once=event.seq,
                seq=event.seq,
            )

    def _is_held(self, value: int, step: int) -> bool:
        """Whether this content stands for some steps where it ever stood, to be found by all."""
        places = self._places.get(value, ())
        if len(places) != 1:
            return False
        (block,) = places
        found, since = self._content.get(block, (None, 0))
        if found != value or since + self._least_age > step:
            return False
        return self._keeps_freed or block in self._tables.refs

    def _compute(
        self, seqs: Sequence[str], starts: Sequence[int], ends: Sequence[int], step: int
    ) -> None:
        """Blocks that the rows fill have their content from this step on."""
        for seq, start, end in zip(seqs, starts, ends, strict=True):
            first, stop = start // self._size, end // self._size
            lease = self._tables.leases.get(seq)
            if first == stop or lease is None:
                continue
            is_offered = lease not in self._not_offered
            chain = self._chain(seq)
            for index in range(first, min(stop, len(chain), len(lease.blocks))):
                block = lease.blocks[index]
                self._places[chain[index]].add(block)
                if is_offered:
                    self._content[block] = (chain[index], step)

    def _chain(self, seq: str) -> list[int]:
        """Values of the full blocks of a sequence's known tokens."""
        known, chain, size = self._known[seq], self._chains[seq], self._size
        for index in range(len(chain), len(known) // size):
            before = chain[-1] if chain else 0
            value = hash((before, *known[index * size : (index + 1) * size]))
            self._parents[value] = before
            chain.append(value)
        return chain
