"""Work: who could have drafts has some.

Drafts that are not there cost steps, and nothing else tells of them. So a row of the newest token
alone is wrong where drafts were to be had and there was room for one:

- the step before gave the sequence that token, and it kept its blocks since;
- its method has a guess: a draft model and a script always, n-grams where the shortest end of the
  text that is looked for stands earlier in it;
- another token may come behind the draft, and so may those that are decided ahead, whose positions
  lie in a block that it has already;
- the step leaves tokens of the budget unused, nobody waits, and nobody goes without.

For engines that promise an order, as others have reasons of their own. Branches may need copies
first, so requests of several are not judged; nor is a step with a preemption, an action of the
plan, an error or withheld blocks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from preempt_harness.checks._conditions import steps_ahead
from preempt_harness.checks._service_order import promises_order
from preempt_harness.checks.finding import CheckResult, Code, Listing, request_of
from preempt_harness.checks.tables import TABLE_EVENTS, SchedulerTables, TableEvent
from preempt_harness.checks.trace import DeliveredRows, ScheduledRows, Trace
from preempt_harness.record import (
    Aborted,
    Arrived,
    EngineError,
    Finished,
    Header,
    PlanApplied,
    PoolCounts,
    Preempted,
    PriorityChanged,
)

_ALWAYS = ("draft_model", "scripted")


def drafts_when_it_can(header: Header) -> bool:
    """Whether an engine of this configuration is held to it."""
    method = _speculative(header).get("method")
    return promises_order(header) and (method == "ngram" or method in _ALWAYS)


def check_undrafted(trace: Trace) -> CheckResult:
    """A newest token is computed with drafts behind it, where there is a guess and room."""
    judge = _Undrafted(trace)
    for event in trace.of(
        *TABLE_EVENTS,
        Aborted,
        Arrived,
        DeliveredRows,
        EngineError,
        Finished,
        PlanApplied,
        PoolCounts,
        Preempted,
        PriorityChanged,
        ScheduledRows,
    ):
        judge.take(event)
    return judge.listing.result("work", "withheld drafts")


class _Undrafted:
    """What a step computed, and who could have had drafts in it.

    Args:
        trace: of a record with drafts.
    """

    def __init__(self, trace: Trace) -> None:
        self.listing = Listing()
        self._header = trace.header
        self._depth = steps_ahead(trace.header)
        self._specs = trace.specs
        self._guesses = _Guesses(_speculative(trace.header))
        self._tables = SchedulerTables()
        self._known: dict[str, list[int]] = {}  # of requests of one sequence that is sampled
        self._live: set[str] = set()
        self._got: set[str] = set()  # were given tokens in the step before, and kept their blocks
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_tokens = 0
        self._rows: list[tuple[str, int, int]] = []
        self._num_held = {seq: len(lease.blocks) for seq, lease in self._tables.leases.items()}
        self._delivered: list[tuple[str, list[int]]] = []
        holding = set(map(request_of, self._tables.leases))
        self._is_excused = not self._live <= holding

    def take(self, event: object) -> None:
        """The next thing that happened."""
        if isinstance(event, ScheduledRows):
            self._num_tokens += event.num_tokens
            self._rows += zip(event.seqs, event.starts, event.ends, strict=True)
        elif isinstance(event, DeliveredRows):
            self._delivered += zip(event.seqs, event.token_ids, strict=True)
        elif isinstance(event, PoolCounts):
            self._end_step(event)
        elif isinstance(event, Arrived):
            self._arrive(event)
        elif isinstance(event, TableEvent):
            self._tables.follow(event)
        elif isinstance(event, Finished | Aborted):
            self._live.discard(event.request)
        else:  # a preemption, another order, an action of the plan, or an error
            self._is_excused = True

    def _arrive(self, event: Arrived) -> None:
        self._live.add(event.request)
        self._is_excused = True
        spec = self._specs.get(event.request)
        if spec is not None and spec.sampling.num_sequences == 1 and spec.sampling.beam is None:
            self._known[f"{event.request}.0"] = list(event.prompt_token_ids)

    def _end_step(self, pool: PoolCounts) -> None:
        budget = self._header.config.get("max_num_batched_tokens")
        computing = {seq for seq, _, _ in self._rows}
        nobody_is_short = computing >= self._num_held.keys()
        has_tokens = isinstance(budget, int) and self._num_tokens < budget
        if has_tokens and nobody_is_short and not self._is_excused and not pool.held:
            for seq, start, end in self._rows:
                if seq in self._got:
                    self._judge(pool.step, seq, start, end)
        for seq, token_ids in self._delivered:
            if seq in self._known:
                self._known[seq] += token_ids
        self._got = {seq for seq, ids in self._delivered if ids and seq in self._tables.leases}
        self._begin_step()

    def _judge(self, step: int, seq: str, start: int, end: int) -> None:
        """Find a row that ends with the newest token, and need not."""
        known = self._known.get(seq, [])
        self.listing.count("rows judged")
        if not start + 1 == end == len(known):
            return
        end_decided = end + self._depth
        has_room = end_decided < self._num_held.get(seq, 0) * self._header.block_size
        has_more = end_decided + 1 < self._last_position(seq)
        if not has_room or not has_more or not self._guesses.has_one(seq, known):
            return
        self.listing.report(
            Code.WORK_DRAFTS,
            step,
            f"its newest token is computed alone, at position {end - 1}: nothing is drafted for "
            f"it, though {self._num_tokens} tokens of the budget are used, its last block has "
            f"room, and nobody waits",
            once=seq,
            seq=seq,
        )

    def _last_position(self, seq: str) -> int:
        """Of the longest output that the request may have; behind it nothing is sampled."""
        spec = self._specs[request_of(seq)]
        total = spec.num_prompt_tokens + spec.sampling.max_tokens
        most = self._header.max_total_tokens
        return total if most is None else min(total, most)


class _Guesses:
    """Whether a method has a guess at what follows a text.

    Args:
        speculative: the configuration of the drafts.
    """

    def __init__(self, speculative: dict[str, Any]) -> None:
        self._is_lookup = speculative.get("method") == "ngram"
        self._size = int(speculative.get("prompt_lookup_min", 1))
        self._seen: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._num_seen: defaultdict[str, int] = defaultdict(int)  # ends up to there are in

    def has_one(self, seq: str, known: list[int]) -> bool:
        """Asked of a sequence with ever more tokens."""
        if not self._is_lookup:
            return True
        seen, size = self._seen[seq], self._size
        for end in range(max(size, self._num_seen[seq] + 1), len(known)):
            seen.add(tuple(known[end - size : end]))
        self._num_seen[seq] = len(known) - 1
        return len(known) > size and tuple(known[-size:]) in seen


def _speculative(header: Header) -> dict[str, Any]:
    speculative = header.config.get("speculative_config")
    return speculative if isinstance(speculative, dict) else {}
