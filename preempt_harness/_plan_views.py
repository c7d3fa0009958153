"""What a plan may know of the requests: progress, folded from a trial's events.

Owns `RequestView` and the bookkeeping that keeps it current; any engine that emits events can be
followed, one that shows only deliveries to the extent of what it shows. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from preempt_harness.record import (
    Aborted,
    AnyEvent,
    Arrived,
    Event,
    Finished,
    Preempted,
    Resumed,
    Scheduled,
    TokensChosen,
    TokensDelivered,
)


@dataclass(slots=True)
class RequestView:
    """Where one request stands before a step.

    Attributes:
        status: a preempted request is "waiting" again.
        num_prompt_tokens: of its prompt.
        num_output_tokens: delivered so far.
        num_computed_tokens: tokens whose KV is in the cache.
        num_chunks: steps that computed a part of the present prefill; 0 after a recompute.
        num_preemptions, num_resumes: so far.
    """

    status: Literal["waiting", "running", "finished"] = "waiting"
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_chunks: int = 0
    num_preemptions: int = 0
    num_resumes: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class RequestViews:
    """Follows all requests of a trial, by their first branch. Views stand in order of arrival.

    A beam search is followed by its last step: beams come and go, and all are of one length.
    """

    def __init__(self) -> None:
        self._views: dict[str, RequestView] = {}
        self._prefill_ends: dict[str, int] = {}
        self._ends: dict[str, int] = {}  # of the step that computed it last
        self._schedule_is_shown = False
        self._last_choice: dict[str, int] = {}
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Arrived: self._arrived,
            Scheduled: self._scheduled,
            TokensChosen: self._chosen,
            TokensDelivered: self._delivered,
            Preempted: self._preempted,
            Resumed: self._resumed,
            Finished: self._ended,
            Aborted: self._ended,
        }

    @property
    def views(self) -> Mapping[str, RequestView]:
        """Request -> its view; live objects."""
        return self._views

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Take in what happened."""
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)

    def _arrived(self, event: Arrived) -> None:
        self._view(event.request).num_prompt_tokens = len(event.prompt_token_ids)

    def _resumed(self, event: Resumed) -> None:
        if _of_another_branch(event):
            return
        view = self._view(event.request)
        view.status = "running"
        view.num_resumes += 1

    def _ended(self, event: Finished | Aborted) -> None:
        self._view(event.request).status = "finished"

    def _view(self, request: str) -> RequestView:
        return self._views.setdefault(request, RequestView())

    def _scheduled(self, event: Scheduled) -> None:
        request, _, branch = event.seq.rpartition(".")
        if branch != "0" and request not in self._last_choice:
            return
        self._schedule_is_shown = True
        view = self._view(request)
        view.status = "running"
        if view.num_chunks == 0:
            self._prefill_ends[request] = view.num_tokens
        if event.start < self._prefill_ends[request]:
            view.num_chunks += 1
        view.num_computed_tokens = self._ends[request] = event.end

    def _chosen(self, event: TokensChosen) -> None:
        request = event.seq.rpartition(".")[0]
        if self._last_choice.get(request) != event.step:
            self._last_choice[request] = event.step
            self._view(request).num_output_tokens += len(event.token_ids)

    def _delivered(self, event: TokensDelivered) -> None:
        request, _, branch = event.seq.rpartition(".")
        if branch != "0" or request in self._last_choice:
            return
        view = self._view(request)
        view.num_output_tokens += len(event.token_ids)
        # The last token is not computed yet, and rejected drafts behind it are no progress.
        view.num_computed_tokens = min(self._ends.get(request, 0), view.num_tokens - 1)
        if view.status == "waiting" and not self._schedule_is_shown:
            view.status = "running"  # its tokens are all that tells

    def _preempted(self, event: Preempted) -> None:
        if _of_another_branch(event):
            return
        view = self._view(event.request)
        view.status = "waiting"
        view.num_preemptions += 1
        if event.mode != "swap":
            view.num_chunks = 0
            view.num_computed_tokens = 0
            self._ends.pop(event.request, None)


def _of_another_branch(event: Preempted | Resumed) -> bool:
    """Whether it concerns one branch alone, which is not the first."""
    return bool(event.seq) and not event.seq.endswith(".0")
