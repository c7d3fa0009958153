"""Adapter "openai-http": a server with an OpenAI-compatible `/v1/completions`.

A black box: prompts go in as token ids, token ids come back as a stream, and preemptions are known
from a Prometheus counter where the server has one. Which server, and how it is started, comes from
the constructor or from the environment; docs/adapters/openai-http.md has examples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from preempt_harness.adapters import protocol
from preempt_harness.adapters.openai_answers import preset_named
from preempt_harness.adapters.openai_server import Endpoint, ServerProcess, ServerStartError
from preempt_harness.adapters.openai_session import HttpSession
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue
from preempt_harness.admission import AdmissionModel

_HOW = (
    'set PREEMPT_HTTP_URL, or PREEMPT_HTTP_COMMAND to a JSON list such as ["vllm", "serve", '
    '"{model}", "--port", "{port}"], and PREEMPT_HTTP_PRESET; see docs/adapters/openai-http.md'
)


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
            outputs_apart=True,
            prefix_caching=settings.enable_prefix_caching,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """As given, else from the checkpoint of the model's name."""
        if self._vocab_size:
            return self._vocab_size
        from preempt_harness.checkpoints import resolve_model_name

        config = Path(resolve_model_name(settings.model)) / "config.json"
        return int(json.loads(config.read_text())["vocab_size"])

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
        if self._server is None or key != self._key or not self._server.is_alive():
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


def _filled(argument: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", str(value))
    return argument
