"""Steps that are decided and not done, and what of them is still wanted. Decides nothing.

    queued      decided, not launched      launched      with the workers, not done

Each scheduled sequence has a row that says how it was when its step was decided. The row is live
until the sequence ends or loses its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from preempt_engine.residency import Residency
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import SchedulerOutput, SequenceKey, StateCheck, state_checksum


@dataclass(slots=True, eq=False)
class Row:
    """A scheduled sequence, as it was then; with the step the workers have so much of it."""

    request: Request
    sequence: Sequence
    incarnation: int
    num_tokens: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class Flight:
    """A step that is decided and not done; `counts` of it are not counted yet."""

    step: SchedulerOutput
    rows: list[Row]
    counts: dict[str, int] = field(default_factory=dict)


class Flights:
    """The steps under way, and what the workers know by the latest of them.

    Args:
        residency: of the sequences.
    """

    def __init__(self, residency: Residency) -> None:
        self.queued: deque[Flight] = deque()
        self.launched: deque[Flight] = deque()
        self._residency = residency
        self._known_keys: set[SequenceKey] = set()  # what the workers keep

    def __bool__(self) -> bool:
        return bool(self.queued or self.launched)

    def is_live(self, row: Row) -> bool:
        """Whether somebody still wants what is computed for the row."""
        sequence = row.sequence
        return (
            self._residency.requests.get(row.request.request_id) is row.request
            and row.request.sequences.get(sequence.key.branch) is sequence
            and sequence.incarnation == row.incarnation
        )

    def never_sent(self, key: SequenceKey) -> None:
        """The workers are not told of the sequence, so they need not forget it."""
        told = [flight.step.dropped for flight in self.queued]
        for dropped in (*told, self._residency.dropped):
            if key in dropped:
                dropped.remove(key)
                return
        raise AssertionError(f"{key} was to be sent, and is neither live nor dropped")

    def pass_on(self, step: SchedulerOutput) -> None:
        """What the workers must know all the same goes with the next step."""
        if not self.queued:
            self._residency.forks = step.forks + self._residency.forks
            self._residency.dropped = step.dropped + self._residency.dropped
            return
        following = self.queued[0].step
        following.forks = step.forks + following.forks
        following.dropped = step.dropped + following.dropped
        following.poison_block_ids = step.poison_block_ids + following.poison_block_ids

    def launch(self, flight: Flight) -> None:
        """The step goes to the workers now."""
        step = flight.step
        self._known_keys.update(child for _, child in step.forks)
        self._known_keys.difference_update(step.dropped)
        self._known_keys.update(item.key for item in step.scheduled)
        if self._residency.config.debug_worker_state:
            step.state_check = StateCheck(
                num_sequences=len(self._known_keys),
                checksums=[
                    state_checksum(
                        row.sequence.token_ids[: row.num_tokens],
                        row.sequence.block_table[: row.num_blocks],
                    )
                    for row in flight.rows
                ],
            )
        self.launched.append(flight)


def has_rows(flights: Iterable[Flight], request: Request) -> bool:
    """Whether a sequence of the request was scheduled in one of the steps."""
    return any(row.request is request for flight in flights for row in flight.rows)
