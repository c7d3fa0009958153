"""One request to an OpenAI-compatible server, and what its answer adds up to."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from preempt_harness.adapters.openai_answers import pieces, tokens_of
from preempt_harness.adapters.openai_server import JSON_HEADERS
from preempt_harness.record import RequestResult, SequenceOutput
from preempt_harness.workload import RequestSpec

Arrivals = queue.SimpleQueue[tuple[str, dict[str, Any] | None]]
"""Pieces of answers by request; None after the last."""


class NoTokenIdsError(RuntimeError):
    """The server's answer has text and no token ids."""


@dataclass(slots=True)
class RequestUnderWay:
    """One request; its thread reads, everybody else's only look.

    Attributes:
        spec: what was asked for.
        connection: to the server, not opened yet.
        thread: that reads the answer.
        token_ids, logprobs, text: what has come.
        finish_reason: as the server says.
        num_counted: completion tokens by the server's own count.
        num_cached: prompt tokens that it found in its cache.
        error: why it ended in a bad way.
        ended: nothing more is taken of it.
        aborted: it was given up.
    """

    spec: RequestSpec
    connection: http.client.HTTPConnection
    thread: threading.Thread | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_counted: int | None = None
    num_cached: int | None = None
    error: str = ""
    ended: bool = False
    aborted: bool = False

    def start(self, path: str, body: Mapping[str, Any], arrivals: Arrivals) -> None:
        """Send the request; a thread hands every piece of the answer over, then None."""

        def read() -> None:
            try:
                with contextlib.closing(self.connection):
                    self.connection.request("POST", path, json.dumps(body), JSON_HEADERS)
                    with self.connection.getresponse() as response:
                        for piece in pieces(response):
                            arrivals.put((self.spec.id, piece))
            except (OSError, ValueError, http.client.HTTPException) as error:
                arrivals.put((self.spec.id, {"error": f"{type(error).__name__}: {error}"}))
            arrivals.put((self.spec.id, None))

        self.thread = threading.Thread(target=read, daemon=True)
        self.thread.start()

    def take(self, piece: Mapping[str, Any]) -> list[tuple[list[int], list[dict[int, float]], str]]:
        """Add a piece of the answer; returns what it brought: token ids, logprobs, text."""
        if "error" in piece and not self.error:  # the first one says why
            self.error = str(piece["error"])
        usage = piece.get("usage") or {}
        self.num_counted = usage.get("completion_tokens", self.num_counted)
        details = usage.get("prompt_tokens_details") or {}
        self.num_cached = details.get("cached_tokens", self.num_cached)
        brought = []
        for choice in piece.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            tokens = list(tokens_of(choice))
            text = choice.get("text") or ""
            if not tokens and not text:
                continue
            token_ids = [token_id for token_id, _ in tokens]
            logprobs = [self._wanted(token_id, best) for token_id, best in tokens]
            self.text += text
            self.token_ids += token_ids
            self.logprobs += logprobs
            brought.append((token_ids, logprobs, text))
        return brought

    def end(self) -> str:
        """The answer is complete; returns the reason, "error" where something is wrong with it.

        Raises:
            NoTokenIdsError: it has text and no token ids.
        """
        self.ended = True
        if self.text and not self.token_ids:
            raise NoTokenIdsError(
                "the server gives text, and neither `token_ids` nor `logprobs.content`"
            )
        if not self.error and self.finish_reason is None:
            self.error = "the stream ended without a finish reason"
        if not self.error and self.num_counted not in (None, len(self.token_ids)):
            self.error = (
                f"the server counts {self.num_counted} completion tokens, "
                f"{len(self.token_ids)} came"
            )
        return "error" if self.error else self.finish_reason or "error"

    def hang_up(self, *, aborted: bool = False) -> None:
        """Close the connection, which wakes the thread that reads from it."""
        if aborted:
            self.aborted = self.ended = True
        if self.connection.sock is not None:
            with contextlib.suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        if self.thread is not None:
            self.thread.join(timeout_s)

    def result(self) -> RequestResult:
        """What the answer added up to."""
        reason = "abort" if self.aborted else "error" if self.error else self.finish_reason
        output = SequenceOutput(
            token_ids=self.token_ids,
            text=self.text,
            logprobs=self.logprobs if self.wants_logprobs else None,
            finish_reason=reason,
        )
        return RequestResult(
            outputs=[output],
            finished=self.ended,
            error=self.error,
            num_cached_tokens=self.num_cached,
        )

    def _wanted(self, token_id: int, best: dict[int, float]) -> dict[int, float]:
        """As many as the request wants; more were asked for, of which some were forbidden."""
        ordered = sorted(best.items(), key=lambda item: (-item[1], item[0] != token_id))
        return dict(ordered[: self.spec.sampling.logprobs or 1])

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities were asked for; the server is always asked for some."""
        return self.spec.sampling.logprobs is not None
