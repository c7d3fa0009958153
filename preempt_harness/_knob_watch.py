"""Whether what a session was told to do shows in its events. Knows no engine and no plan.

A knob that does nothing makes trials that show nothing, and nothing else would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from preempt_harness.errors import HarnessError
from preempt_harness.record import (
    AnyEvent,
    BlocksAllocated,
    BlocksFreed,
    BlocksPoisoned,
    Forked,
    PoolCounts,
    Preempted,
    Scheduled,
    TokensDelivered,
)

POISON_EVENTS = frozenset({"BlocksAllocated", "BlocksFreed", "BlocksPoisoned", "Scheduled"})
"""What an engine must show for its poison to be watched."""


class IdleKnobError(HarnessError, RuntimeError):
    """An adapter claims a capability, and using it changes nothing."""


class KnobWatch:
    """Follows one session.

    Args:
        engine: the adapter's name.
        num_reserved_blocks: that the engine always keeps for itself.
        num_ahead: steps that may be decided before it hears of a command.
        poisons: it was told to poison freed blocks, and none keeps its content for a cache.
    """

    def __init__(
        self,
        engine: str,
        *,
        num_reserved_blocks: int = 0,
        num_ahead: int = 0,
        poisons: bool = False,
    ) -> None:
        self._engine = engine
        self._num_reserved_blocks = num_reserved_blocks
        self._most_polls = 2 + 2 * num_ahead
        self._num_ahead = num_ahead
        self._num_held = 0
        self._num_unheld = 0  # steps since, in which none was
        self._preempts = False  # it was seen to
        self._polls_since: Counter[str] = Counter()  # in which tokens came, of those told to go
        self._latest: Sequence[AnyEvent] = ()  # what the latest poll gave
        self._watches_poison = poisons
        self._polls_free: dict[int, int] = {}  # block -> working polls since it was freed

    def held(self, num_blocks: int, num_wanted: int = 0) -> None:
        """`hold_blocks` says that so many blocks are held now, of those that were wanted.

        Raises:
            IdleKnobError: none is, though blocks were free when the latest step was over. Not
                judged where steps are decided ahead: they may have taken them since.
        """
        if not num_blocks and num_wanted and not self._num_ahead:
            counts = (event for event in reversed(self._latest) if isinstance(event, PoolCounts))
            num_free = next((event.free for event in counts), 0)
            if num_free:
                raise IdleKnobError(
                    f"Engine {self._engine!r} was told to hold {num_wanted} blocks and holds none, "
                    f"though it showed {num_free} free blocks just before.",
                    "Mend the adapter's hold_blocks, or take the capability from it.",
                )
        self._watches_poison = self._watches_poison and not num_blocks
        if not self._num_held:
            self._num_unheld = 0
        self._num_held = num_blocks

    def preempted(self, request: str) -> None:
        """`preempt` was called for a running request."""
        if not self._preempts:
            self._polls_since.setdefault(request, 0)

    def take(self, events: Sequence[AnyEvent]) -> None:
        """What the next poll gave.

        Raises:
            IdleKnobError: blocks are said to be held and none is; nobody was ever preempted, and
                a request that should have been goes on; or no block was ever poisoned, and one
                that should have been has long been free.
        """
        self._latest = events
        if self._watches_poison:
            self._watch_poison(events)
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

    def _watch_poison(self, events: Iterable[AnyEvent]) -> None:
        """A step poisons what was freed before it; a step that computes nothing need not be run.

        It is enough to see it once. Blocks of branches may be freed by one and kept by another.
        """
        works = False
        for event in events:
            if isinstance(event, BlocksPoisoned | Forked):
                self._watches_poison = False
                return
            if isinstance(event, BlocksFreed):
                self._polls_free.update(dict.fromkeys(event.blocks, 0))
            elif isinstance(event, BlocksAllocated):
                for block in event.blocks:
                    self._polls_free.pop(block, None)
            works = works or isinstance(event, Scheduled)
        for block in self._polls_free if works else ():
            self._polls_free[block] += 1
            if self._polls_free[block] > self._most_polls:
                raise IdleKnobError(
                    f"Engine {self._engine!r} was told to poison freed blocks, block {block} has "
                    f"been free for {self._most_polls} steps, and no block was ever poisoned.",
                    "Mend what the adapter does with the option, or take the capability from it.",
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
