"""Whether what a session was told to do shows in its events. Knows no engine and no plan.

A knob that does nothing makes trials that show nothing, and nothing else would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from preempt_harness.errors import HarnessError
from preempt_harness.record import AnyEvent, PoolCounts, Preempted, TokensDelivered


class IdleKnobError(HarnessError, RuntimeError):
    """An adapter claims a capability, and using it changes nothing."""


class KnobWatch:
    """Follows one session.

    Args:
        engine: the adapter's name.
        num_reserved_blocks: that the engine always keeps for itself.
        num_ahead: steps that may be decided before it hears of a command.
    """

    def __init__(self, engine: str, *, num_reserved_blocks: int = 0, num_ahead: int = 0) -> None:
        self._engine = engine
        self._num_reserved_blocks = num_reserved_blocks
        self._most_polls = 2 + 2 * num_ahead
        self._num_ahead = num_ahead
        self._num_held = 0
        self._num_unheld = 0  # steps since, in which none was
        self._preempts = False  # it was seen to
        self._polls_since: Counter[str] = Counter()  # in which tokens came, of those told to go

    def held(self, num_blocks: int) -> None:
        """`hold_blocks` says that so many blocks are held now."""
        if not self._num_held:
            self._num_unheld = 0
        self._num_held = num_blocks

    def preempted(self, request: str) -> None:
        """`preempt` was called for a running request."""
        if not self._preempts:
            self._polls_since.setdefault(request, 0)

    def take(self, events: Iterable[AnyEvent]) -> None:
        """What the next poll gave.

        Raises:
            IdleKnobError: blocks are said to be held and none is; or nobody was ever preempted, and
                a request that should have been goes on.
        """
        if not self._num_held and not self._polls_since:
            return
        going_on = set()
        for event in events:
            if isinstance(event, PoolCounts):
                self._check_held(event)
            elif isinstance(event, Preempted):
                self._preempts = True
                self._polls_since.clear()
            elif isinstance(event, TokensDelivered):
                going_on.add(event.seq.rpartition(".")[0])
        for request in going_on & self._polls_since.keys():
            self._polls_since[request] += 1
            if self._polls_since[request] > self._most_polls:
                raise IdleKnobError(
                    f"Engine {self._engine!r} was told to preempt {request}, shows no preemption, "
                    f"and {request} goes on.",
                    "Mend the adapter's preempt, or take the capability from it.",
                )

    def _check_held(self, event: PoolCounts) -> None:
        if not self._num_held:
            return
        self._num_unheld = self._num_unheld + 1 if event.held <= self._num_reserved_blocks else 0
        if self._num_unheld > self._num_ahead:
            raise IdleKnobError(
                f"Engine {self._engine!r} says that {self._num_held} blocks are held, and shows "
                f"{event.held} in step {event.step}, {self._num_reserved_blocks} of which it "
                f"always keeps.",
                "Mend the adapter's hold_blocks, or take the capability from it.",
            )
