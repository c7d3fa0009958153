"""What a session answers where its engine cannot do what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from preempt_harness.adapters import protocol
from preempt_harness.errors import HarnessError
from preempt_harness.record import Score


class NotCapableError(HarnessError):
    """A session is asked for what its adapter's capabilities do not name."""


class LimitedSession:
    """Refuses everything that capabilities stand for; a session overrides what its engine can."""

    def abort(self, request: str) -> None:
        """Needs `ABORT`."""
        self._refuse(protocol.ABORT)

    def preempt(self, request: str, mode: str) -> None:
        """Needs `PREEMPT`."""
        self._refuse(protocol.PREEMPT)

    def hold_blocks(self, num_blocks: int) -> int:
        """Needs `HOLD_BLOCKS`."""
        self._refuse(protocol.HOLD_BLOCKS)

    def reset_prefix_cache(self) -> None:
        """Needs `RESET_PREFIX_CACHE`."""
        self._refuse(protocol.RESET_PREFIX_CACHE)

    def reset_running_requests(self) -> None:
        """Needs `RESET_RUNNING_REQUESTS`."""
        self._refuse(protocol.RESET_RUNNING_REQUESTS)

    def set_priority(self, request: str, priority: int) -> None:
        """Needs `SET_PRIORITY`."""
        self._refuse(protocol.SET_PRIORITY)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Needs `SCORE`."""
        self._refuse(protocol.SCORE)

    def _refuse(self, capability: str) -> NoReturn:
        raise NotCapableError(
            f"{type(self).__name__} has no {capability}.",
            f"Ask adapters whose capabilities name {capability!r}.",
        )
