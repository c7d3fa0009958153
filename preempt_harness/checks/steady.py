"""Steady steps: steps that differ from the one before in nothing but how far they have got.

Most steps of a trial are such: the same sequences compute as many tokens as before, each where it
stopped, the user gets a token of some of them, and the pool's sizes stay. A check that has judged
the first of them can tell in one go what it has to say of the others. Owns the recognition of such
steps in a record of one rank, event by event; judges nothing. Whatever is not recognised is left as
it is, so a step that is odd in any field that stands here is judged by itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar, get_args

from preempt_harness.record import (
    Aborted,
    AnyEvent,
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksReplaced,
    Computed,
    Counters,
    Event,
    Finished,
    Forked,
    Header,
    PlanApplied,
    PlanMissed,
    PoolCounts,
    PoolState,
    Preempted,
    PriorityChanged,
    Resumed,
    Scheduled,
    StepDone,
    StepLaunched,
    TokensDelivered,
)

_T = TypeVar("_T")

_WHOLE_POOL = "W"
_LETTERS: dict[type[Event], str] = (
    dict.fromkeys(get_args(AnyEvent), "?")
    | {
        Scheduled: "S",
        StepLaunched: "L",
        Computed: "C",
        StepDone: "D",
        TokensDelivered: "T",
        PoolCounts: "P",
    }
    | dict.fromkeys(
        (
            Aborted,
            Arrived,
            BlocksAllocated,
            BlocksFreed,
            BlocksReplaced,
            Finished,
            Forked,
            PlanApplied,
            PlanMissed,
            Preempted,
            PriorityChanged,
            Resumed,
        ),
        "b",  # may stand before the rest of its step
    )
    | {
        Counters: "a",  # may stand after it
        PoolState: _WHOLE_POOL,  # may stand anywhere
    }
)
_SAME_SHAPE = re.compile(r"(S+LC+D(?:PT+|T*P)|P)\1*")
"""Steps with as many events of each kind as the first of them; or such in which nothing runs."""


class _Shape(NamedTuple):
    """Where what stands in a step.

    Attributes:
        width: events a step.
        num_rows: rows a step.
        first_delivered, end_delivered: [first, end) are tokens delivered.
        pool: sizes of the pool, before the tokens or after them.
    """

    width: int
    num_rows: int
    first_delivered: int
    end_delivered: int
    pool: int


@lru_cache(maxsize=256)
def _shape_of(letters: str) -> _Shape:
    """The shape of a step of such letters."""
    pool = letters.index("P")
    first = pool + 1 if letters.endswith("T") else pool - letters.count("T")
    return _Shape(len(letters), letters.count("S"), first, first + letters.count("T"), pool)


class IdleSteps:
    """Steps that follow each other, of which nothing is told but the same sizes of the pool.

    Attributes:
        events: one a step.
        step, last_step, num_steps: the first, the last, and how many they are.
        pool: the first of the events.
    """

    __slots__ = ("events", "last_step", "num_steps", "pool", "step")

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.pool: PoolCounts = events[0]
        self.step = self.pool.step
        self.last_step = events[-1].step
        self.num_steps = len(events)


class SteadySteps:
    """Steps that follow each other in which the same sequences go on, and nothing else happens.

    Every step is scheduled, launched, computed by rank 0 as it was scheduled and done; a token each
    may be delivered, without log probabilities; before or after come the pool's sizes. Block
    tables change in the first step only. A row has as many slots as tokens; which they are is left
    to be judged.

    Attributes:
        events: of all steps, as many a step.
        step, last_step, num_steps: the first, the last, and how many they are.
        seqs, lengths: of each row, which computes so many tokens a step, [num_rows].
        starts, ends: positions [start, end) are computed by all steps together, [num_rows].
        num_tokens: sum of their lengths.
        delivered_seqs: sequences that get one token in every step; no other gets any.
        pool: sizes of the pool after the first step, and after every other.
    """

    __slots__ = (
        "_shape",
        "delivered_seqs",
        "ends",
        "events",
        "last_step",
        "lengths",
        "num_steps",
        "num_tokens",
        "pool",
        "seqs",
        "starts",
        "step",
    )

    def __init__(self, events: Sequence[Any], shape: _Shape) -> None:
        num_rows, width = shape.num_rows, shape.width
        rows: Sequence[Scheduled] = events[:num_rows]
        self.events = events
        self._shape = shape
        self.num_steps = len(events) // width
        self.step = rows[0].step
        self.last_step = events[-1].step
        self.seqs = tuple([row.seq for row in rows])
        self.starts = [row.start for row in rows]
        self.lengths = [row.end - row.start for row in rows]
        self.ends = [row.end for row in events[-width : num_rows - width]]
        self.num_tokens = sum(self.ends) - sum(self.starts)
        delivered = events[shape.first_delivered : shape.end_delivered]
        self.delivered_seqs = tuple([row.seq for row in delivered])
        self.pool: PoolCounts = events[shape.pool]

    def computed_ids(self, row: int) -> list[int]:
        """The tokens that one row computes in all steps."""
        events = self._computed(row)
        if self.lengths[row] == 1:
            return [event.token_ids[0] for event in events]
        return list(chain.from_iterable([event.token_ids for event in events]))

    def written_slots(self, row: int) -> list[int]:
        """Where one row writes them, as its events have it."""
        events = self._computed(row)
        if self.lengths[row] == 1:
            return [event.written_slots[0] for event in events]
        return list(chain.from_iterable([event.written_slots for event in events]))

    def _computed(self, row: int) -> Sequence[Computed]:
        """The events of one row, [num_steps]."""
        return self.events[len(self.seqs) + 1 + row :: self._shape.width]

    def table_change(self, row: int) -> tuple[int, list[int]]:
        """How the first step changes the block table of one row, as `Computed` has it."""
        first: Computed = self.events[len(self.seqs) + 1 + row]
        return first.table_keep, first.table_new

    def delivered(self, index: int) -> Sequence[TokensDelivered]:
        """The events of one of `delivered_seqs`, [num_steps]."""
        return self.events[self._shape.first_delivered + index :: self._shape.width]

    def delivered_ids(self) -> list[list[int]]:
        """The tokens that each of `delivered_seqs` gets."""
        columns = map(self.delivered, range(len(self.delivered_seqs)))
        return [[event.token_ids[0] for event in column] for column in columns]

    def first_events(self) -> Sequence[Event]:
        """Those of the first step."""
        return self.events[: self._shape.width]

    def but_first(self) -> SteadySteps | None:
        """All steps but the first, if there are any."""
        if self.num_steps == 1:
            return None
        return SteadySteps(self.events[self._shape.width :], self._shape)


def may_be_steady(header: Header) -> bool:
    """Whether steps are looked at: those of several ranks and with drafts are not."""
    return header.num_ranks == 1 and not header.config.get("num_speculative_tokens")


def fold(
    events: Sequence[Event], numbers: Sequence[int]
) -> Iterator[SteadySteps | IdleSteps | Sequence[Event]]:
    """The events in their order, steady and idle steps taken together.

    Nothing is, unless step numbers rise through the whole record: so all that is told of a step
    stands in one place. What the whole pool looks like within steps that are taken together comes
    behind them: its tables and queues are the same all along.

    Args:
        events: of a record.
        numbers: the step of each.
    """
    if numbers != sorted(numbers):
        yield events
        return
    letters = "".join(map(_LETTERS.__getitem__, map(type, events)))
    states = [found.start() for found in re.finditer(_WHOLE_POOL, letters)]
    before = [place - index for index, place in enumerate(states)]  # what else stands before each
    told = 0
    waiting: list[Event] = []
    for piece, first, last in _pieces(
        _without(events, states), _without(numbers, states), letters.replace(_WHOLE_POOL, "")
    ):
        from_state, to_state = bisect_right(before, first), bisect_left(before, last)
        first += from_state
        if waiting or told < first:
            yield [*waiting, *events[told:first]]
        yield piece
        waiting = [events[place] for place in states[from_state:to_state]]
        told = last + to_state
    if waiting or told < len(events):
        yield [*waiting, *events[told:]]


def _without(items: Sequence[_T], places: Sequence[int]) -> Sequence[_T]:
    """All items but those at these places, which rise."""
    if not places:
        return items
    left: list[_T] = []
    start = 0
    for place in places:
        left += items[start:place]
        start = place + 1
    left += items[start:]
    return left


def _pieces(
    events: Sequence[Event], numbers: Sequence[int], letters: str
) -> Iterator[tuple[SteadySteps | IdleSteps, int, int]]:
    """Steps that are alike, with the places [first, last) of their events."""
    for found in _SAME_SHAPE.finditer(letters):
        shape = _shape_of(found[1])
        width, num_rows = shape.width, shape.num_rows
        if found[1].count("C") != num_rows:
            continue
        start, end = found.span()
        while start < end:
            stop = start + width * _num_alike(events, start, end, shape)
            first, last = start, stop
            start = max(stop, start + width)
            if num_rows:
                first += width * (last > first and _told_before(letters, numbers, first))
                last -= width * (last > first and _told_after(letters, numbers, last))
            elif last - first == 1:  # one event is no less than itself
                continue
            if first >= last:
                continue
            same = events[first:last]
            yield (SteadySteps(same, shape) if num_rows else IdleSteps(same)), first, last


def _told_before(letters: str, numbers: Sequence[int], first: int) -> bool:
    """Whether more rows of the step that begins at `first` stand before it, or copies of blocks."""
    place = first - 1
    while place >= 0 and numbers[place] == numbers[first]:
        if letters[place] != "b":
            return True
        place -= 1
    return False


def _told_after(letters: str, numbers: Sequence[int], end: int) -> bool:
    """Whether anything of the step that ends before `end` follows but counters."""
    for place in range(end, len(numbers)):
        if numbers[place] != numbers[end - 1]:
            break
        if letters[place] != "a":
            return True
    return False


def _num_alike(events: Sequence[Any], start: int, end: int, shape: _Shape) -> int:
    """How many steps from `start` on are steady together; 0 when the first is not.

    Args:
        events: of the record; those of [start, end) are steps of one shape.
        start, end: where.
        shape: of each.
    """
    width = shape.width
    rows = _Rows(events[start : start + width], shape) if shape.num_rows else None
    pool = events[start + shape.pool]
    number = pool.step
    for first in range(start, end, width):
        sizes = events[first + shape.pool]
        if (
            events[first].step != number
            or events[first + width - 1].step != number
            or sizes.free != pool.free
            or sizes.cached != pool.cached
            or sizes.used != pool.used
            or sizes.held != pool.held
            or sizes.fenced != pool.fenced
            or sizes.num_blocks != pool.num_blocks
            or (rows is not None and not rows.go_on(events, first))
        ):
            return (first - start) // width
        number += 1
    return (end - start) // width


class _Rows:
    """How far the rows of steady steps have got.

    Args:
        events: of the first step.
        shape: of every step.
    """

    def __init__(self, events: Sequence[Any], shape: _Shape) -> None:
        num_rows = shape.num_rows
        rows = events[:num_rows]
        self._first_delivered = shape.first_delivered
        self._seqs = [row.seq for row in rows]
        self._lengths = [row.end - row.start for row in rows]
        self._ends = [row.start for row in rows]
        computed = events[num_rows + 1 : 2 * num_rows + 1]
        self._num_blocks = [row.table_keep + len(row.table_new) for row in computed]
        self._is_first = True
        delivered = events[shape.first_delivered : shape.end_delivered]
        self._delivered_seqs = [event.seq for event in delivered]
        self._is_sound = min(self._lengths) > 0 and all(
            len(set(seqs)) == len(seqs) for seqs in (self._seqs, self._delivered_seqs)
        )

    def go_on(self, events: Sequence[Any], first: int) -> bool:
        """Whether the step whose events begin at `first` goes on where the one before stopped."""
        seqs, ends = self._seqs, self._ends
        at = first + len(seqs) + 1  # behind the launch
        for row, seq in enumerate(seqs):
            scheduled, computed = events[first + row], events[at + row]
            start, length = ends[row], self._lengths[row]
            end = ends[row] = start + length
            if (
                scheduled.seq != seq
                or computed.seq != seq
                or scheduled.start != start
                or scheduled.end != end
                or computed.start != start
                or computed.read_len != end
                or not len(computed.token_ids) == len(computed.written_slots) == length
                or computed.rank
                or (
                    (computed.table_new or computed.table_keep != self._num_blocks[row])
                    and not self._is_first
                )
            ):
                return False
        for place, seq in enumerate(self._delivered_seqs, start=first + self._first_delivered):
            delivered = events[place]
            if (
                delivered.seq != seq
                or len(delivered.token_ids) != 1
                or delivered.logprobs is not None
            ):
                return False
        self._is_first = False
        return self._is_sound
