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
        num_granted: that were handed out behind the tokens of the step before, and hold none of
            them: an engine that writes drafts before it schedules them does that.
    """

    def __init__(self, header: Header) -> None:
        self.num_tokens = self.num_blocks = self.num_granted = 0
        self._block_size = header.block_size
        self._known: Counter[str] = Counter()  # tokens of the prompt, and those that were chosen
        self._num_held: dict[str, int] = {}  # blocks, before the step
        self._given: set[str] = set()  # who was given tokens in this step
        self._granted: Counter[str] = Counter()  # sequence -> blocks since then

    def begin_step(self, tables: SchedulerTables) -> None:
        self.num_tokens = self.num_blocks = 0
        self._num_held = {seq: len(lease.blocks) for seq, lease in tables.leases.items()}
        self.num_granted = sum(
            min(num_granted, max(0, self._num_held[seq] - self._num_needed(seq)))
            for seq, num_granted in self._granted.items()
            if seq in self._num_held
        )
        self._granted.clear()
        self._given.clear()

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
                self._granted[event.seq] += len(event.blocks)
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
        num_own = max(self._num_needed(seq), self._num_held.get(seq, 0))
        lease = tables.leases.get(seq)
        if lease is not None:
            self.num_blocks += max(0, len(lease.blocks) - num_own)

    def _num_needed(self, seq: str) -> int:
        return num_blocks_for(self._known[seq], self._block_size)
