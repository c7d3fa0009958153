"""Which computed tokens were drafts, and which of them came true. Judges nothing.

A draft is a token that a worker computed at a position whose own token was not known yet. It is
accepted when the token delivered for the position is equal, else rejected, with all drafts behind
it; so are those behind the end of their sequence, and those that were under way when it lost its
blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from preempt_harness.checks.trace import Batch, ComputedRows, DeliveredRows, ScheduledRows
from preempt_harness.record import (
    Arrived,
    BlocksFreed,
    Computed,
    Forked,
    Header,
    Scheduled,
    TokensChosen,
    TokensDelivered,
)

DRAFTED = "num_drafted_tokens"
ACCEPTED = "num_accepted_tokens"
REJECTED = "num_rejected_tokens"
DRAFT_COUNTERS = (DRAFTED, ACCEPTED, REJECTED)

DRAFT_KINDS = (
    Arrived,
    Forked,
    ScheduledRows,
    ComputedRows,
    DeliveredRows,
    TokensChosen,
    BlocksFreed,
)
"""What of a trace a ledger looks at."""


DRAFTS_LAST = "drafts_last"
"""A capability, as a record's header lists it: drafts never cost a request its blocks."""


def drafts_come_last(header: Header) -> bool:
    """Whether there are drafts, and nobody waits or goes for them."""
    return has_drafts(header) and DRAFTS_LAST in header.capabilities


def has_drafts(header: Header) -> bool:
    """Whether the engine was asked for drafts."""
    return bool(header.config.get("num_speculative_tokens"))


class WrongDraft(NamedTuple):
    """A draft in whose place another token came."""

    step: int
    seq: str
    position: int
    token_id: int
    own_token_id: int


class DraftLedger:
    """Follows all sequences of a record, by what rank 0 computed and what was delivered.

    Attributes:
        known: sequence -> number of its prompt's and delivered tokens.
        totals: drafts by the names of `DRAFT_COUNTERS`; one that waits for its position's token is
            neither accepted nor rejected.
        wrong: the first wrong draft of each step and sequence that had one.
        drafted, accepted: sequence -> how many drafts its latest step with drafts had, and how
            many of them came true so far.
    """

    def __init__(self) -> None:
        self.known: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.wrong: list[WrongDraft] = []
        self.drafted: dict[str, int] = {}
        self.accepted: Counter[str] = Counter()
        self._open: dict[str, list[int]] = {}
        self._freed: set[str] = set()  # gave up blocks since they were scheduled
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrive,
            Forked: self._fork,
            Computed: self._compute,
            TokensDelivered: self._deliver,
            TokensChosen: self._choose,
            BlocksFreed: self._free,
            Scheduled: self._schedule,
        }

    def take(self, event: Batch) -> None:
        """Take in the next event, or the rows of a step."""
        if isinstance(event, ComputedRows | DeliveredRows):
            for row in event.rows:
                self.take(row)
            return
        if isinstance(event, ScheduledRows):
            self._freed.difference_update(event.seqs)
            return
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def forget(self, seq: str) -> None:
        """The sequence begins anew: what became of its latest drafts is no longer of interest."""
        self.drafted.pop(seq, None)
        self.accepted.pop(seq, None)

    def _schedule(self, event: Scheduled) -> None:
        self._freed.discard(event.seq)

    def _arrive(self, event: Arrived) -> None:
        self.known[f"{event.request}.0"] = len(event.prompt_token_ids)

    def _fork(self, event: Forked) -> None:
        self.known[event.child] = self.known[event.parent]

    def _choose(self, event: TokensChosen) -> None:
        self.known[event.seq] += len(event.token_ids)

    def _free(self, event: BlocksFreed) -> None:
        self._reject(event.seq)
        self._freed.add(event.seq)

    def _compute(self, event: Computed) -> None:
        if event.rank or event.start + len(event.token_ids) <= self.known[event.seq]:
            return
        self._reject(event.seq)
        drafts = event.token_ids[max(0, self.known[event.seq] - event.start) :]
        self._open[event.seq] = list(drafts)
        self.totals[DRAFTED] += len(drafts)
        self.drafted[event.seq] = len(drafts)
        self.accepted[event.seq] = 0
        if event.seq in self._freed:
            self._reject(event.seq)

    def _deliver(self, event: TokensDelivered) -> None:
        for token_id in event.token_ids:
            self.known[event.seq] += 1
            drafts = self._open.get(event.seq)
            if not drafts:
                continue
            if drafts[0] == token_id:
                del drafts[0]
                self.totals[ACCEPTED] += 1
                self.accepted[event.seq] += 1
            else:
                position = self.known[event.seq] - 1
                wrong = WrongDraft(event.step, event.seq, position, drafts[0], token_id)
                self.wrong.append(wrong)
                self._reject(event.seq)

    def _reject(self, seq: str) -> None:
        self.totals[REJECTED] += len(self._open.pop(seq, ()))
