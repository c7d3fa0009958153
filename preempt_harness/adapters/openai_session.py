"""A session on a server with an OpenAI-compatible `/v1/completions`, one connection a request."""

from __future__ import annotations

import contextlib
import http.client
import queue
import time
from collections.abc import Sequence
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.counted import CounterDelta, counted_preemptions
from preempt_harness.adapters.limited_session import LimitedSession
from preempt_harness.adapters.openai_answers import ServerPreset, count_of, tokens_of
from preempt_harness.adapters.openai_request import (
    Arrivals,
    NoTokenIdsError,
    RequestUnderWay,
)
from preempt_harness.adapters.openai_server import Endpoint, ServerProcess
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.record import AnyEvent, RequestResult, Score
from preempt_harness.workload import RequestSpec

_LOOK_S = 0.1  # how often a waiting poll looks whether the server lives
_SCORE_TIMEOUT_S = 60.0
_SCORE_LOGPROBS = 20  # most that vLLM and SGLang give


class NoCounterError(RuntimeError):
    """The server shows no metrics, so that nobody can tell whether it preempted."""


class HttpSession(LimitedSession):
    """Requests to one server, each read by a thread.

    Args:
        settings: what the trial asks for.
        preset: of the server.
        endpoint: where it listens.
        server: its process, if this session's adapter started it.
        command: how it was started.
    """

    def __init__(
        self,
        settings: EngineSettings,
        preset: ServerPreset,
        endpoint: Endpoint,
        server: ServerProcess | None,
        command: Sequence[str] | None,
    ) -> None:
        self._settings, self._preset = settings, preset
        self._endpoint, self._server = endpoint, server
        self._requests: dict[str, RequestUnderWay] = {}
        self._arrived: Arrivals = queue.SimpleQueue()
        self._events: list[AnyEvent] = []
        self._step = 0
        self._preemptions = CounterDelta(self._count_preemptions)
        observed = ["Arrived", "TokensDelivered", "Finished", "Aborted"]
        self.info = SessionInfo(
            config={
                "url": endpoint.url,
                "command": list(command or ()),
                "dtype": settings.dtype,
                "device": "server",
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            observed=[*observed, "Preempted"] if preset.preemptions else observed,
            batch_invariant=False,
        )

    def submit(self, request: RequestSpec) -> None:
        """Send the request; a thread reads the answer."""
        sampling = request.sampling
        self._events.append(
            record.Arrived(self._step, request.id, request.prompt_token_ids, sampling.max_tokens)
        )
        num_logprobs = (sampling.logprobs or 1) + self._preset.num_forbidden
        body = self._body(request.prompt_token_ids, sampling.max_tokens, num_logprobs)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.min_tokens:
            body["min_tokens"] = sampling.min_tokens
        entry = RequestUnderWay(request, self._endpoint.connect(None))
        self._requests[request.id] = entry
        entry.start(self._endpoint.path("/v1/completions"), body, self._arrived)

    def abort(self, request: str) -> None:
        """Close the connection; that is how a client gives up."""
        entry = self._requests[request]
        if not entry.ended:
            entry.hang_up(aborted=True)
            self._events.append(record.Aborted(self._step, request))

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """What has arrived, after at most so long.

        Raises:
            EngineProcessError: the server that was started here has ended.
        """
        deadline = time.monotonic() + timeout_s
        while not self._events and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._take(*self._arrived.get(timeout=_LOOK_S))
            if self._server is not None:
                self._server.check_alive()
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._arrived.get_nowait())
        self._step += 1
        events, self._events = self._events, []
        return events

    def unfinished(self) -> bool:
        """True while an answer has not ended."""
        return not all(entry.ended for entry in self._requests.values())

    def results(self) -> dict[str, RequestResult]:
        """What the answers added up to; the server's own count of tokens must be the same."""
        return {name: entry.result() for name, entry in self._requests.items()}

    def close(self) -> Sequence[AnyEvent]:
        """Hang up; the server stays for the next session."""
        for entry in self._requests.values():
            if not entry.ended:
                entry.hang_up()
            entry.join(_LOOK_S)
        if self._server is None or self._server.is_alive():
            self._see_preemptions()
        events, self._events = self._events, []
        return events

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Each token by a request of its own for the one after what came before it.

        Raises:
            NoTokenIdsError: the server keeps a token to itself, or all but one of the likeliest
                are forbidden to it.
        """
        scores = []
        num_logprobs = max(_SCORE_LOGPROBS, self._preset.num_forbidden)
        for index, token_id in enumerate(continuation):
            body = self._body([*prompt, *continuation[:index]], 1, num_logprobs)
            answer = self._endpoint.post("/v1/completions", body, _SCORE_TIMEOUT_S)
            tokens = list(tokens_of(answer["choices"][0]))
            if not tokens:
                raise NoTokenIdsError(
                    f"the server chose a token after {len(prompt) + index} others and does not "
                    f"name it: {answer['choices'][0]}"
                )
            (top, best), *_ = tokens
            if len(best) == 1:
                raise NoTokenIdsError(
                    f"of the {num_logprobs} likeliest tokens after {len(prompt) + index} others "
                    f"the server may choose only {top}, and the second best is not known"
                )
            (_, top_logprob), (_, second), *rest = sorted(best.items(), key=lambda item: -item[1])
            # A token that is not among the best is at most as likely as the last of them.
            last = rest[-1][1] if rest else second
            scores.append(Score(token_id, best.get(token_id, last), top, top_logprob, second))
        return scores

    # Inside -------------------------------------------------------------------------------------

    def _body(self, prompt: list[int], max_tokens: int, logprobs: int) -> dict[str, Any]:
        return {
            "model": self._settings.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": logprobs,
            **self._preset.body,
        }

    def _take(self, request: str, piece: dict[str, Any] | None) -> None:
        entry = self._requests[request]
        if entry.aborted:
            return
        if piece is None:
            self._end(entry)
            return
        for token_ids, logprobs, text in entry.take(piece):
            shown = logprobs if entry.wants_logprobs else None
            self._events.append(
                record.TokensDelivered(self._step, f"{request}.0", token_ids, shown, text)
            )

    def _end(self, entry: RequestUnderWay) -> None:
        if entry.error and self._server is not None:
            self._server.check_answers()
        reason = entry.end()
        self._see_preemptions()
        self._events.append(record.Finished(self._step, entry.spec.id, reason))

    def _see_preemptions(self) -> None:
        """The counter tells how many there were, not whose."""
        self._events += counted_preemptions(self._step, self._preemptions.take())

    def _count_preemptions(self) -> int:
        if not self._preset.preemptions:
            return 0
        try:
            status, text = self._endpoint.get("/metrics")
        except (OSError, http.client.HTTPException) as error:
            raise NoCounterError(f"/metrics cannot be read: {error}") from error
        if status != http.client.OK:
            raise NoCounterError(f"/metrics answers with status {status}")
        return count_of(self._preset.preemptions, text)
