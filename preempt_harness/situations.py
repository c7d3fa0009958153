"""The situation table: in which circumstances a trial really preempted.

A classifier over the record gives every `Preempted` event a value in each dimension; coverage is
the set of pairs of values that were seen together. Nothing counts because a test meant it: only
what the record shows.

    phase         what the request was doing, as the engine says (`PHASES`)
    offset        num_computed_tokens mod block size: 0, 1, B-1 or other
    repeat        the request's first preemption, or a repeated one
    victims       one, several, or all running requests lost their blocks in this step
    neighbour     alone; bystander: another request was given one of the blocks before the victim
                  came back; later sharer: a request with the same first prompt block arrived later
    hit           what came back from the prefix cache: none, part, or every full block that the
                  victim had computed and may find (a hit never covers the whole sequence)
    prefix_cache  on or off
    drafts        how tokens are drafted ahead, or off
    accepted      none, some or all of the drafts in the last step in which the victim had any,
                  since its blocks were its own
    ahead         steps decided ahead of the one that runs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from preempt_harness.checks.drafts import DraftLedger
from preempt_harness.checks.finding import request_of
from preempt_harness.checks.tables import SchedulerTables, first_difference
from preempt_harness.record import (
    PHASES,
    Aborted,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    Event,
    Finished,
    Forked,
    Header,
    Preempted,
    Resumed,
    TrialRecord,
)

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "phase": PHASES,
    "offset": ("0", "1", "B-1", "other"),
    "repeat": ("first", "repeated"),
    "victims": ("one", "several", "all"),
    "neighbour": ("alone", "bystander", "later_sharer"),
    "hit": ("no", "partial", "full"),
    "prefix_cache": ("on", "off"),
    "drafts": ("off", "ngram", "draft_model", "scripted"),
    "accepted": ("none", "some", "all"),
    "ahead": ("0", "1", "2"),
}

NEEDED_EVENTS = frozenset({"Arrived", "BlocksAllocated", "BlocksFreed", "Preempted", "Resumed"})

Value = tuple[str, str]
"""A dimension and a value of it."""

Pair = tuple[Value, Value]
"""Two values of different dimensions, in the order of `DIMENSIONS`."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One preemption.

    Attributes:
        step, request, mode, reason: of the event.
        values: dimension -> its values. Usually one; several neighbours may be there at once, and
            none is known of the hit of a request that never came back.
    """

    step: int
    request: str
    mode: str
    reason: str
    values: dict[str, tuple[str, ...]]

    def pairs(self) -> set[Pair]:
        """All pairs of values that it shows."""
        shown = [(name, self.values[name]) for name in DIMENSIONS if self.values.get(name)]
        return {
            ((first, one), (second, other))
            for (first, ones), (second, others) in combinations(shown, 2)
            for one, other in product(ones, others)
        }


def classify(record: TrialRecord) -> list[Situation]:
    """Every preemption of the record, in order."""
    classifier = _Classifier(record.header)
    for event in record.events:
        classifier.take(event)
    return [open_.finish() for open_ in classifier.found]


def pairs(situations: Iterable[Situation]) -> set[Pair]:
    """Pairs of values that any of them shows."""
    seen: set[Pair] = set()
    for situation in situations:
        seen |= situation.pairs()
    return seen


def pair_name(pair: Pair) -> str:
    """A pair as reports name it: "phase=decode & offset=0"."""
    return " & ".join(f"{dimension}={value}" for dimension, value in pair)


def all_pairs() -> set[Pair]:
    """Every pair of values of two dimensions, reachable or not."""
    return {
        ((first, one), (second, other))
        for first, second in combinations(DIMENSIONS, 2)
        for one, other in product(DIMENSIONS[first], DIMENSIONS[second])
    }


def reachable_pairs() -> set[Pair]:
    """Pairs that a run can show: what a suite has to cover."""
    return all_pairs() - unreachable().keys()


def unreachable() -> dict[Pair, str]:
    """Pairs that no run can show, each with the reason."""
    return {
        pair: rule.reason
        for pair in sorted(all_pairs())
        for rule in UNREACHABLE_RULES
        if rule.forbids(dict(pair))
    }


@dataclass(frozen=True)
class Rule:
    """Why some pairs cannot be shown.

    Attributes:
        reason: a sentence.
        forbids: says of the two values {dimension: value} of a pair whether the rule forbids it.
    """

    reason: str
    forbids: Callable[[dict[str, str]], bool]


UNREACHABLE_RULES = (
    Rule(
        "without a prefix cache nothing is found again",
        lambda pair: pair.get("prefix_cache") == "off" and pair.get("hit") in ("partial", "full"),
    ),
    Rule(
        "a request that was just resumed has been preempted before",
        lambda pair: pair.get("phase") == "just_resumed" and pair.get("repeat") == "first",
    ),
    Rule(
        "a resumed request with one chunk done counts as just resumed",
        lambda pair: pair.get("phase") == "prefill_first" and pair.get("repeat") == "repeated",
    ),
    Rule(
        "without drafts none is accepted or rejected",
        lambda pair: pair.get("drafts") == "off" and "accepted" in pair,
    ),
    Rule(
        "drafts follow the first token since the blocks were a request's own",
        lambda pair: "accepted" in pair and pair.get("phase", "decode") != "decode",
    ),
    Rule(
        "steps are not decided ahead of a draft model",
        lambda pair: pair.get("ahead", "0") != "0" and pair.get("drafts") == "draft_model",
    ),
)


# The classifier -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Open:
    """A preemption whose aftermath is still being watched."""

    event: Preempted
    repeated: bool
    blocks: frozenset[int]
    prompt: list[int]
    header: Header
    running: frozenset[str]
    victims: set[str]
    accepted: tuple[str, ...]
    neighbours: set[str] = field(default_factory=set)
    hit: str | None = None

    def finish(self) -> Situation:
        size = self.header.block_size
        values: dict[str, tuple[str, ...]] = {
            "phase": (self.event.phase,) if self.event.phase in PHASES else (),
            "offset": (_offset(self.event.num_computed_tokens, size),),
            "repeat": ("repeated" if self.repeated else "first",),
            "victims": (self._victims(),),
            "neighbour": tuple(sorted(self.neighbours)) or ("alone",),
            "hit": () if self.hit is None else (self.hit,),
        }
        caching = self.header.config.get("enable_prefix_caching")
        if isinstance(caching, bool):
            values["prefix_cache"] = ("on" if caching else "off",)
        values["accepted"] = self.accepted
        depth = str(self.header.config.get("async_scheduling", ""))
        if depth in DIMENSIONS["ahead"]:
            values["ahead"] = (depth,)
        if "speculative_config" in self.header.config:
            values["drafts"] = _drafts(self.header.config["speculative_config"])
        return Situation(
            step=self.event.step,
            request=self.event.request,
            mode=self.event.mode,
            reason=self.event.reason,
            values=values,
        )

    def _victims(self) -> str:
        if len(self.victims) == 1:
            return "one"
        return "all" if self.running <= self.victims else "several"


class _Classifier:
    def __init__(self, header: Header) -> None:
        self.found: list[_Open] = []
        self._header = header
        self._tables = SchedulerTables()
        self._prompts: dict[str, list[int]] = {}
        self._times: Counter[str] = Counter()
        self._away: dict[str, _Open] = {}
        self._step: tuple[int, frozenset[str], set[str]] = (-1, frozenset(), set())
        self._ledger = DraftLedger()

    def take(self, event: Event) -> None:
        self._ledger.take(event)
        if isinstance(event, Arrived):
            self._arrive(event)
        elif isinstance(event, BlocksAllocated):
            self._tables.allocate(event)
            self._watch_blocks(event)
        elif isinstance(event, BlocksFreed):
            self._tables.free(event)
        elif isinstance(event, Forked):
            self._tables.fork(event)
        elif isinstance(event, Preempted):
            self._preempt(event)
        elif isinstance(event, Resumed):
            back = self._away.pop(event.request, None)
            if back is not None:
                back.hit = _hit(back.event, event.num_cached_tokens, self._header.block_size)
        elif isinstance(event, Finished | Aborted):
            self._away.pop(event.request, None)

    def _arrive(self, event: Arrived) -> None:
        self._prompts[event.request] = event.prompt_token_ids
        for situation in self.found:
            differ = first_difference(situation.prompt, event.prompt_token_ids)
            shared = len(situation.prompt) if differ is None else differ
            if shared >= self._header.block_size:
                situation.neighbours.add("later_sharer")

    def _watch_blocks(self, event: BlocksAllocated) -> None:
        request = request_of(event.seq)
        for victim, situation in self._away.items():
            if victim != request and not situation.blocks.isdisjoint(event.blocks):
                situation.neighbours.add("bystander")

    def _preempt(self, event: Preempted) -> None:
        leases = self._tables.leases
        if self._step[0] != event.step:
            running = frozenset(request_of(seq) for seq in leases)
            self._step = (event.step, running, set())
        _, running, victims = self._step
        victims.add(event.request)
        blocks = frozenset(
            block
            for seq, lease in leases.items()
            if request_of(seq) == event.request
            for block in lease.blocks
        )
        situation = _Open(
            event=event,
            repeated=self._times[event.request] > 0,
            blocks=blocks,
            prompt=self._prompts.get(event.request, []),
            header=self._header,
            running=running,
            victims=victims,
            accepted=self._accepted(event.request),
        )
        self._times[event.request] += 1
        self._away[event.request] = situation
        self.found.append(situation)

    def _accepted(self, request: str) -> tuple[str, ...]:
        """What became of the victim's last drafts; they are not asked about again."""
        ledger = self._ledger
        seqs = [seq for seq in ledger.drafted if request_of(seq) == request]
        num_drafted = sum(ledger.drafted[seq] for seq in seqs)
        num_accepted = sum(ledger.accepted[seq] for seq in seqs)
        for seq in seqs:
            ledger.forget(seq)
        if not num_drafted:
            return ()
        if num_accepted:
            return ("all" if num_accepted == num_drafted else "some",)
        return ("none",)


def _drafts(speculative: Any) -> tuple[str, ...]:
    """The method of a speculative configuration, if it is one of the table's."""
    if speculative is None:
        return ("off",)
    method = speculative.get("method") if isinstance(speculative, dict) else None
    return (method,) if method in DIMENSIONS["drafts"] else ()


def _offset(num_computed_tokens: int, block_size: int) -> str:
    """With blocks of one token all is 0; with blocks of two, 1 is taken before B-1."""
    offset = num_computed_tokens % block_size
    if offset <= 1:
        return str(offset)
    return "B-1" if offset == block_size - 1 else "other"


def _hit(event: Preempted, num_cached_tokens: int, block_size: int) -> str:
    """How much of what was lost was found again."""
    if not num_cached_tokens:
        return "no"
    most = min(event.num_computed_tokens, event.num_tokens - 1) // block_size * block_size
    return "full" if num_cached_tokens >= most else "partial"
