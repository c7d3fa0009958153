"""A server with an OpenAI-compatible `/v1/completions` behind the session protocol.

A black box: prompts go in as token ids, token ids come back as a stream, and preemptions are known
from a Prometheus counter where the server has one. Which server, and how it is started, comes from
the constructor or from the environment; docs/adapters/openai-http.md has examples.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from preempt_harness import record
from preempt_harness.adapters import protocol
from preempt_harness.adapters.openai_answers import (
    ServerPreset,
    count_of,
    pieces,
    preset_named,
    tokens_of,
)
from preempt_harness.adapters.openai_server import (
    JSON_HEADERS,
    Endpoint,
    ServerProcess,
    ServerStartError,
)
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue, SessionInfo
from preempt_harness.admission import AdmissionModel
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput
from preempt_harness.workload import RequestSpec

_HOW = (
    'set PREEMPT_HTTP_URL, or PREEMPT_HTTP_COMMAND to a JSON list such as ["vllm", "serve", '
    '"{model}", "--port", "{port}"], and PREEMPT_HTTP_PRESET; see docs/adapters/openai-http.md'
)
_LOOK_S = 0.1  # how often a waiting poll looks whether the server lives
_SCORE_TIMEOUT_S = 60.0
_SCORE_LOGPROBS = 20  # most that servers give


class NoTokenIdsError(RuntimeError):
    """The server's answer has text and no token ids."""


class NoCounterError(RuntimeError):
    """The server shows no metrics, so that nobody can tell whether it preempted."""


class OpenAIHttpAdapter:
    """Adapter "openai-http".

    What is not given comes from the environment: PREEMPT_HTTP_URL, _COMMAND (a JSON list), _PRESET,
    _MODEL, _VOCAB_SIZE and _BLOCK_SIZE.

    Args:
        url: of a server that runs; None starts one by `command`.
        command: arguments that start one. "{port}", "{model}", "{num_blocks}", "{block_size}",
            "{num_tokens}" (of the pool), "{max_num_seqs}" and "{max_num_batched_tokens}" in them
            are replaced.
        preset: name in `openai_answers.PRESETS`.
        model: the server's name or path of the model.
        vocab_size: of the model.
        block_sizes: those that the server can have; without paging, what the suite counts in.
        start_timeout_s: longest wait for a started server.
    """

    name = "openai-http"
    isolation = "none"  # the server is a process of its own

    def __init__(
        self,
        *,
        url: str | None = None,
        command: Sequence[str] | None = None,
        preset: str | None = None,
        model: str | None = None,
        vocab_size: int | None = None,
        block_sizes: Sequence[int] = (),
        start_timeout_s: float = 300.0,
        known_issues: Sequence[KnownIssue] = (),
    ) -> None:
        given = os.environ
        self._url = url or given.get("PREEMPT_HTTP_URL")
        self._command = command or json.loads(given.get("PREEMPT_HTTP_COMMAND", "null"))
        self._preset = preset_named(preset or given.get("PREEMPT_HTTP_PRESET", "vllm"))
        self._vocab_size = vocab_size or int(given.get("PREEMPT_HTTP_VOCAB_SIZE", 0))
        self._start_timeout_s = start_timeout_s
        self._server: ServerProcess | None = None
        self._key: tuple[str, ...] = ()
        self.models: tuple[str, ...] = (model or given.get("PREEMPT_HTTP_MODEL", "smollm2"),)
        self.block_sizes = tuple(block_sizes) or (int(given.get("PREEMPT_HTTP_BLOCK_SIZE", 16)),)
        self.known_issues = tuple(known_issues)
        self.capabilities = self._preset.capabilities | {
            protocol.ABORT,
            protocol.SCORE,
            protocol.LOGPROBS,
            protocol.PREFIX_CACHING,
        }

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """As the preset says."""
        return AdmissionModel(
            policy=self._preset.policy,
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            prefix_caching=settings.enable_prefix_caching,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """As given, else from the checkpoint of the model's name."""
        if self._vocab_size:
            return self._vocab_size
        from preempt_harness.checkpoints import resolve_model_name

        with open(f"{resolve_model_name(settings.model)}/config.json") as file:  # noqa: PTH123
            return int(json.load(file)["vocab_size"])

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """No tokenizer on this side: prompts are random ids."""
        return None

    def missing(self) -> str | None:
        """A server."""
        return None if self._url or self._command else _HOW

    def open(self, settings: EngineSettings) -> HttpSession:
        """A session on the server, which is started if it does not run with these settings.

        Raises:
            ServerStartError: it ended early, or did not become ready.
        """
        if self._url:
            return HttpSession(settings, self._preset, Endpoint(self._url), None, self._command)
        if not self._command:
            raise ServerStartError("No server is given.", _HOW)
        values = {
            "model": settings.model,
            "num_blocks": settings.num_blocks,
            "block_size": settings.block_size,
            "num_tokens": settings.num_blocks * settings.block_size,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
        }
        key = tuple(_filled(argument, values) for argument in self._command)
        if self._server is None or key != self._key or not _is_alive(self._server):
            self.close_kept()
            self._server = ServerProcess(
                key,
                health_path=self._preset.health_path,
                start_timeout_s=self._start_timeout_s,
            )
            self._key = key
        return HttpSession(
            settings, self._preset, self._server.endpoint, self._server, self._server.command
        )

    def kept_process_ids(self) -> frozenset[int]:
        """Of a started server, which waits for the next session."""
        return frozenset() if self._server is None else frozenset({self._server.pid})

    def close_kept(self) -> None:
        """End a started server."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


@dataclass(slots=True)
class _Request:
    """One request under way; its thread reads, everybody else's only look."""

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


class HttpSession:
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
        self._requests: dict[str, _Request] = {}
        self._arrived: queue.SimpleQueue[tuple[str, dict[str, Any] | None]] = queue.SimpleQueue()
        self._events: list[AnyEvent] = []
        self._step = 0
        self._num_preemptions = self._count_preemptions()
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
        self._events.append(
            record.Arrived(
                self._step, request.id, request.prompt_token_ids, request.sampling.max_tokens
            )
        )
        entry = _Request(request, self._endpoint.connect(None))
        self._requests[request.id] = entry
        entry.thread = threading.Thread(target=self._read, args=(entry,), daemon=True)
        entry.thread.start()

    def abort(self, request: str) -> None:
        """Close the connection; that is how a client gives up."""
        entry = self._requests[request]
        if not entry.ended:
            entry.aborted = entry.ended = True
            _hang_up(entry.connection)
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
        return {name: _result(entry) for name, entry in self._requests.items()}

    def close(self) -> Sequence[AnyEvent]:
        """Hang up; the server stays for the next session."""
        for entry in self._requests.values():
            if not entry.ended:
                _hang_up(entry.connection)
            if entry.thread is not None:
                entry.thread.join(_LOOK_S)
        if self._server is None or _is_alive(self._server):
            self._see_preemptions()
        events, self._events = self._events, []
        return events

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Each token by a request of its own for the one after what came before it."""
        scores = []
        for index, token_id in enumerate(continuation):
            body = self._body([*prompt, *continuation[:index]], 1, _SCORE_LOGPROBS)
            answer = self._endpoint.post("/v1/completions", body, _SCORE_TIMEOUT_S)
            (top, best), *_ = tokens_of(answer["choices"][0])
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

    def _read(self, entry: _Request) -> None:
        """In the request's thread: hand every piece of the answer over, then None."""
        spec = entry.spec
        sampling = spec.sampling
        body = self._body(spec.prompt_token_ids, sampling.max_tokens, sampling.logprobs or 1)
        # Room for an end-of-sequence token, which must be ignored and may be the likeliest.
        body["logprobs"] += 1
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.min_tokens:
            body["min_tokens"] = sampling.min_tokens
        path = self._endpoint.path("/v1/completions")
        try:
            with contextlib.closing(entry.connection):
                entry.connection.request("POST", path, json.dumps(body), JSON_HEADERS)
                with entry.connection.getresponse() as response:
                    for piece in pieces(response):
                        self._arrived.put((spec.id, piece))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._arrived.put((spec.id, {"error": f"{type(error).__name__}: {error}"}))
        self._arrived.put((spec.id, None))

    def _take(self, request: str, piece: dict[str, Any] | None) -> None:
        entry = self._requests[request]
        if entry.aborted:
            return
        if piece is None:
            self._end(entry)
            return
        if "error" in piece and not entry.error:  # the first one says why
            entry.error = str(piece["error"])
        usage = piece.get("usage") or {}
        entry.num_counted = usage.get("completion_tokens", entry.num_counted)
        details = usage.get("prompt_tokens_details") or {}
        entry.num_cached = details.get("cached_tokens", entry.num_cached)
        for choice in piece.get("choices") or ():
            entry.finish_reason = choice.get("finish_reason") or entry.finish_reason
            tokens = list(tokens_of(choice))
            if not tokens and not choice.get("text"):
                continue
            entry.text += choice.get("text") or ""
            entry.token_ids += [token_id for token_id, _ in tokens]
            entry.logprobs += [best for _, best in tokens]
            wanted = entry.spec.sampling.logprobs is not None
            self._events.append(
                record.TokensDelivered(
                    self._step,
                    f"{request}.0",
                    [token_id for token_id, _ in tokens],
                    [best for _, best in tokens] if wanted else None,
                    choice.get("text") or "",
                )
            )

    def _end(self, entry: _Request) -> None:
        if entry.error and self._server is not None:
            self._server.check_answers()
        entry.ended = True
        if entry.text and not entry.token_ids:
            raise NoTokenIdsError(
                "the server gives text, and neither `token_ids` nor `logprobs.content`"
            )
        if not entry.error and entry.finish_reason is None:
            entry.error = "the stream ended without a finish reason"
        if not entry.error and entry.num_counted not in (None, len(entry.token_ids)):
            entry.error = (
                f"the server counts {entry.num_counted} completion tokens, "
                f"{len(entry.token_ids)} came"
            )
        self._see_preemptions()
        reason = "error" if entry.error else entry.finish_reason or "error"
        self._events.append(record.Finished(self._step, entry.spec.id, reason))

    def _see_preemptions(self) -> None:
        """The counter tells how many there were, not whose."""
        before, self._num_preemptions = self._num_preemptions, self._count_preemptions()
        for _ in range(self._num_preemptions - before):
            self._events.append(
                record.Preempted(self._step, "", "recompute", "unknown", "out_of_blocks", 0, 0)
            )

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


def _result(entry: _Request) -> RequestResult:
    reason = "abort" if entry.aborted else "error" if entry.error else entry.finish_reason
    wanted = entry.spec.sampling.logprobs is not None
    output = SequenceOutput(
        token_ids=entry.token_ids,
        text=entry.text,
        logprobs=entry.logprobs if wanted else None,
        finish_reason=reason,
    )
    return RequestResult(
        outputs=[output],
        finished=entry.ended,
        error=entry.error,
        num_cached_tokens=entry.num_cached,
    )


def _filled(argument: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", str(value))
    return argument


def _is_alive(server: ServerProcess) -> bool:
    from preempt_harness.adapters.child import EngineProcessError

    try:
        server.check_alive()
    except EngineProcessError:
        return False
    return True


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Wake the thread that reads from it."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
