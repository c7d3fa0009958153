"""Steps that are decided and not done, and what of them is still wanted. Decides nothing.

    queued      decided, not launched      launched      with the workers, not done

Each scheduled sequence has a row that says how it was when its step was decided. The row is live
until the sequence ends or loses its blocks. What is queued for a sequence follows it when a step
under way turns out to have brought more than one token, because drafts were right:

    decided      [ a ) [ b )              b computes the token that a samples
    a, launched  [ a d0 d1 )              with drafts, of which d0 is right
    b, shifted          [ b )             computes the token that stands in place of d1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from preempt_engine.residency import Residency
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import (
    ScheduledSequence,
    SchedulerOutput,
    SequenceKey,
    StateCheck,
    state_checksum,
)


@dataclass(slots=True, eq=False)
class Row:
    """A scheduled sequence, as it was then; with the step the workers have so much of it."""

    item: ScheduledSequence
    request: Request
    sequence: Sequence
    incarnation: int
    num_tokens: int
    num_blocks: int

    def shift(self, count: int) -> None:
        """The row computes so many positions further on."""
        self.item.start += count
        self.item.logits_start += count
        self.item.end += count
        self.num_tokens += count


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
        self._rows: dict[Sequence, deque[Row]] = {}
        self._known_keys: set[SequenceKey] = set()  # what the workers keep

    def __bool__(self) -> bool:
        return bool(self.queued or self.launched)

    def queue(self, flight: Flight) -> None:
        """The step is decided."""
        self.queued.append(flight)
        for row in flight.rows:
            self._rows.setdefault(row.sequence, deque()).append(row)

    def take(self) -> Flight:
        """The next step leaves the queue."""
        flight = self.queued.popleft()
        for row in flight.rows:
            rows = self._rows[row.sequence]
            rows.popleft()
            if not rows:
                del self._rows[row.sequence]
        return flight

    def rows_of(self, sequence: Sequence) -> Iterable[Row]:
        """What is queued for the sequence, in order."""
        return self._rows.get(sequence, ())

    def send_blocks(self, row: Row, num_blocks: int) -> None:
        """The row is launched: with it the workers have as many entries of the block table.

        What is queued for the sequence need not bring them any more.
        """
        sequence = row.sequence
        if num_blocks <= row.num_blocks:
            return
        more = sequence.block_table[row.num_blocks : num_blocks]
        row.item.new_block_ids = [*row.item.new_block_ids, *more]
        row.num_blocks = num_blocks
        for later in self.rows_of(sequence):
            new = later.item.new_block_ids
            later.item.new_block_ids = new[max(0, num_blocks - (later.num_blocks - len(new))) :]
            later.num_blocks = max(later.num_blocks, num_blocks)
        sequence.num_sent_blocks = max(sequence.num_sent_blocks, num_blocks)

    def keep(self, block_ids: Seq[int]) -> None:
        """Blocks were taken at a launch: what is queued must not overwrite them with poison."""
        for flight in self.queued if block_ids else ():
            poisoned = flight.step.poison_block_ids
            flight.step.poison_block_ids = [block for block in poisoned if block not in block_ids]

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
            self._residency.blocks.put_back_to_poison(step.poison_block_ids)
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
                        row.sequence.token_ids[: row.num_tokens] + row.sequence.drafts_in_flight,
                        row.sequence.block_table[: row.num_blocks],
                    )
                    for row in flight.rows
                ],
            )
        self.launched.append(flight)


def has_rows(flights: Iterable[Flight], request: Request) -> bool:
    """Whether a sequence of the request was scheduled in one of the steps."""
    return any(row.request is request for flight in flights for row in flight.rows)
