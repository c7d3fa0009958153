"""What a plan may know of the requests: progress, folded from a trial's events.

Owns `RequestView` and the bookkeeping that keeps it current; any engine that emits events can be
followed, one that shows only deliveries to the extent of what it shows. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from preempt_harness.record import (
    Aborted,
    AnyEvent,
    Arrived,
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
        self._schedule_is_shown = False
        self._last_choice: dict[str, int] = {}

    @property
    def views(self) -> Mapping[str, RequestView]:
        """Request -> its view; live objects."""
        return self._views

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Take in what happened."""
        for event in events:
            match event:
                case Arrived():
                    self._view(event.request).num_prompt_tokens = len(event.prompt_token_ids)
                case Scheduled():
                    self._scheduled(event)
                case TokensChosen():
                    self._chosen(event)
                case TokensDelivered():
                    self._delivered(event)
                case Preempted() | Resumed() if event.seq and not event.seq.endswith(".0"):
                    pass  # of another branch than the first
                case Preempted():
                    self._preempted(event)
                case Resumed():
                    view = self._view(event.request)
                    view.status = "running"
                    view.num_resumes += 1
                case Finished() | Aborted():
                    self._view(event.request).status = "finished"
                case _:
                    pass

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
        view.num_computed_tokens = event.end

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
        if view.status == "waiting" and not self._schedule_is_shown:
            view.status = "running"  # its tokens are all that tells

    def _preempted(self, event: Preempted) -> None:
        view = self._view(event.request)
        view.status = "waiting"
        view.num_preemptions += 1
        if event.mode != "swap":
            view.num_chunks = 0
            view.num_computed_tokens = 0
