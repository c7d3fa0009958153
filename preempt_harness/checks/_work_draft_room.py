"""What the drafts of a step take of it: tokens of the budget, and blocks."""

from __future__ import annotations

from collections import Counter

from preempt_harness.checks.tables import SchedulerTables, num_blocks_for
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows
from preempt_harness.record import Arrived, BlocksAllocated, Forked, Header, TokensChosen


class DraftRoom:
    """What the drafts of a step take.

    Attributes:
        num_tokens: that are computed as drafts.
        num_blocks: that were handed out in this step and hold nothing but drafts.
        granted: sequence -> blocks that it was given behind its tokens of the step before: an
            engine whose drafts are written before they are scheduled hands them out then.
    """

    def __init__(self, header: Header) -> None:
        self.num_tokens = self.num_blocks = 0
        self._block_size = header.block_size
        self._known: Counter[str] = Counter()  # tokens of the prompt, and those that were chosen
        self._num_held: dict[str, int] = {}  # blocks, before the step
        self.granted: Counter[str] = Counter()
        self._granted_now: Counter[str] = Counter()
        self._given: set[str] = set()  # who was given tokens in this step

    def begin_step(self, tables: SchedulerTables) -> None:
        self.num_tokens = self.num_blocks = 0
        self._num_held = {seq: len(lease.blocks) for seq, lease in tables.leases.items()}
        self.granted, self._granted_now = self._granted_now, Counter()
        self._given.clear()

    def num_granted_in_vain(self, tables: SchedulerTables) -> int:
        """Blocks granted in the step before, for which their sequences know no tokens yet."""
        total = 0
        for seq, num_granted in self.granted.items():
            if seq in tables.leases:
                num_needed = num_blocks_for(self._known[seq], self._block_size)
                num_more = len(tables.leases[seq].blocks) - num_needed
                total += max(0, min(num_granted, num_more))
        return total

    def take(self, event: object, tables: SchedulerTables) -> None:
        """The next thing that happened; the tables are as before it."""
        if isinstance(event, ScheduledRows):
            for seq, end in zip(event.seqs, event.ends, strict=True):
                self._schedule(seq, end, tables)
        elif isinstance(event, DeliveredRows):
            for seq, token_ids in zip(event.seqs, event.token_ids, strict=True):
                self._known[seq] += len(token_ids)
            self._given.update(event.seqs)
        elif isinstance(event, BlocksAllocated):
            if event.seq in self._given:
                self._granted_now[event.seq] += len(event.blocks)
        elif isinstance(event, TokensChosen):
            self._known[event.seq] += len(event.token_ids)
        elif isinstance(event, Arrived):
            self._known[f"{event.request}.0"] = len(event.prompt_token_ids)
        elif isinstance(event, Forked):
            self._known[event.child] = self._known[event.parent]

    def _schedule(self, seq: str, end: int, tables: SchedulerTables) -> None:
        known = self._known[seq]
        if end <= known:
            return
        self.num_tokens += end - known
        num_own = max(num_blocks_for(known, self._block_size), self._num_held.get(seq, 0))
        lease = tables.leases.get(seq)
        if lease is not None:
            self.num_blocks += max(0, len(lease.blocks) - num_own)
