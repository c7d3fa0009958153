"""A record as the checks read it: its events in order, the rows of a step taken together.

Most events of a trial are rows: what one step schedules, computes and delivers for each sequence.
Rows of one kind that follow each other in one step are one batch here, column by column, so that a
check pays for a step and not for each field of each row of it. Owns the grouping, and what several
checks derive from a record alike; judges nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, TypeVar, cast, overload

import msgspec

from preempt_harness.checks.steady import IdleSteps, SteadySteps, fold, may_be_steady
from preempt_harness.record import (
    Computed,
    Event,
    Header,
    PoolCounts,
    RecordFormatError,
    Scheduled,
    StepDone,
    StepLaunched,
    TokensDelivered,
    TrialRecord,
)
from preempt_harness.workload import RequestSpec, Workload

_T = TypeVar("_T")


class ScheduledRows:
    """`Scheduled` events of one step that follow each other.

    Attributes:
        step: of all of them.
        seqs, starts, ends: columns, [num_rows].
        num_tokens: sum of their lengths.
    """

    __slots__ = ("ends", "num_tokens", "seqs", "starts", "step")

    @property
    def last_step(self) -> int:
        """The same."""
        return self.step

    def __init__(self, rows: Sequence[Scheduled]) -> None:
        self.step = rows[0].step
        self.seqs = tuple([row.seq for row in rows])
        self.starts = [row.start for row in rows]
        self.ends = [row.end for row in rows]
        self.num_tokens = sum(self.ends) - sum(self.starts)


class ComputedRows:
    """`Computed` events of one step and rank that follow each other.

    Attributes:
        step, rank: of all of them.
        rows: the events.
        seqs, starts, ends: columns, [num_rows]; [start, end) are the positions of `token_ids`.
    """

    __slots__ = ("ends", "rank", "rows", "seqs", "starts", "step")

    def __init__(self, rows: Sequence[Computed]) -> None:
        self.step = rows[0].step
        self.rank = rows[0].rank
        self.rows = rows
        self.seqs = tuple([row.seq for row in rows])
        self.starts = [row.start for row in rows]
        self.ends = [row.start + len(row.token_ids) for row in rows]


class DeliveredRows:
    """`TokensDelivered` events of one step that follow each other.

    Attributes:
        step: of all of them.
        rows: the events.
        seqs, token_ids: columns, [num_rows].
        num_tokens: in all.
    """

    __slots__ = ("num_tokens", "rows", "seqs", "step", "token_ids")

    def __init__(self, rows: Sequence[TokensDelivered]) -> None:
        self.step = rows[0].step
        self.rows = rows
        self.seqs = tuple([row.seq for row in rows])
        self.token_ids = [row.token_ids for row in rows]
        self.num_tokens = sum(map(len, self.token_ids))


Batch = Event | ScheduledRows | ComputedRows | DeliveredRows
"""What stands in a trace: rows that were taken together, or an event of another kind."""

Folded = Batch | SteadySteps | IdleSteps
"""The same where steps that are alike are taken together as well."""

_IN_STEADY_STEPS = frozenset(
    {ScheduledRows, StepLaunched, ComputedRows, StepDone, DeliveredRows, PoolCounts}
)

_ROWS: dict[type[Event], Callable[[Sequence[Any]], Batch]] = {
    Scheduled: ScheduledRows,
    Computed: ComputedRows,
    TokensDelivered: DeliveredRows,
}
_STEP = attrgetter("step")
_STEP_AND_RANK = attrgetter("step", "rank")


def batches(events: Iterable[Event]) -> list[Batch]:
    """The events in their order, rows taken together."""
    found: list[Batch] = []
    for kind, run in groupby(events, type):
        make = _ROWS.get(kind)
        if make is None:
            found.extend(run)
            continue
        rows = list(run)
        if _are_of_one_step(rows):
            found.append(make(rows))
        else:
            key = _STEP_AND_RANK if kind is Computed else _STEP
            found.extend(make(list(same)) for _, same in groupby(rows, key))
    return found


def _are_of_one_step(rows: Sequence[Any]) -> bool:
    """Whether all rows of a kind are of the same step, and of the same rank if they have one."""
    if len(rows) == 1:
        return True
    steps = [row.step for row in rows]
    if steps.count(steps[0]) != len(steps):
        return False
    if type(rows[0]) is not Computed:
        return True
    ranks = [row.rank for row in rows]
    return ranks.count(ranks[0]) == len(ranks)


class Trace:
    """One record, for all checks of one judgement. The record must not change meanwhile.

    Args:
        record: of a trial.

    Attributes:
        record: as given.
    """

    def __init__(self, record: TrialRecord) -> None:
        self.record = record
        self._derived: dict[Callable[[Trace], object], object] = {}

    @property
    def header(self) -> Header:
        return self.record.header

    @cached_property
    def batches(self) -> list[Batch]:
        """All of it, in order."""
        return batches(self.record.events)

    @cached_property
    def folded(self) -> list[Folded]:
        """All of it, in order, with steps that are alike taken together."""
        if not may_be_steady(self.header):
            return list(self.batches)
        found: list[Folded] = []
        for part in fold(self.record.events, self._numbers):
            if isinstance(part, SteadySteps | IdleSteps):
                found.append(part)
            else:
                found += batches(part)
        return found

    @cached_property
    def _numbers(self) -> list[int]:
        """The step of each event."""
        return [event.step for event in self.record.events]

    @cached_property
    def last_step(self) -> int:
        """Number of the last step that anything is told of, 0 if there is none."""
        return max(self._numbers, default=0)

    @overload
    def of(self, kind: type[_T], /) -> list[_T]: ...

    @overload
    def of(self, *kinds: type[Any]) -> list[Any]: ...

    def of(self, *kinds: type[Any]) -> list[Any]:
        """Batches and events of these kinds, in order.

        Who names `SteadySteps` gets those, and with `PoolCounts` also `IdleSteps`; what stands in
        them does not come a second time.
        """
        wanted = dict.fromkeys(kinds)
        if SteadySteps not in wanted and not wanted.keys().isdisjoint(_IN_STEADY_STEPS):
            return [batch for batch in self.batches if type(batch) in wanted]
        assert PoolCounts not in wanted or IdleSteps in wanted
        folded = self.folded
        places = chain.from_iterable([self._places.get(kind, ()) for kind in wanted])
        return [folded[place] for place in sorted(places)]

    def has(self, kind: type[Event]) -> bool:
        """Whether there is an event of this kind, which is no row and stands in no steady step."""
        return kind in self._places

    @cached_property
    def _places(self) -> dict[type, list[int]]:
        """Kind -> where what is of it stands among `folded`."""
        places: defaultdict[type, list[int]] = defaultdict(list)
        for place, batch in enumerate(self.folded):
            places[type(batch)].append(place)
        return dict(places)

    def sees(self, *names: str) -> bool:
        """Whether the engine shows all event types of these names."""
        return self._observed.issuperset(names)

    @cached_property
    def _observed(self) -> frozenset[str]:
        return frozenset(self.record.header.observed)

    @cached_property
    def workload(self) -> Workload:
        """What was asked for.

        Raises:
            RecordFormatError: the header's workload is not one.
        """
        try:
            return Workload.from_builtins(self.record.header.workload)
        except msgspec.ValidationError as error:
            raise RecordFormatError(f"the header's workload cannot be read: {error}") from error

    @cached_property
    def specs(self) -> dict[str, RequestSpec]:
        """The requests that were asked for, by id.

        Raises:
            RecordFormatError: the header's workload is not one.
        """
        return {request.id: request for request in self.workload.requests}

    def derive(self, make: Callable[[Trace], _T]) -> _T:
        """`make(self)`, computed once; its result is shared and must not be changed."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return cast(_T, self._derived[make])


class RequestNames(dict[tuple[str, ...], frozenset[str]]):
    """Sequences of a batch -> their requests, worked out once for each set of sequences."""

    def __missing__(self, seqs: tuple[str, ...]) -> frozenset[str]:
        names = frozenset(seq.rpartition(".")[0] or seq for seq in seqs)
        self[seqs] = names
        return names
