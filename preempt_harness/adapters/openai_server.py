"""A server process of the `openai-http` adapter: started by command, watched, ended for sure."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from preempt_harness.adapters.child import EngineProcessError
from preempt_harness.errors import HarnessError

_GUARD = Path(__file__).with_name("server_guard.py")
_HEALTH_EVERY_S = 0.05
_END_S = 15.0  # the guard's grace and more
_MAX_LOG_BYTES = 8192


class ServerStartError(HarnessError):
    """The server ended before it was ready, or did not become ready."""


class Endpoint:
    """Where a server listens.

    Args:
        url: such as "http://127.0.0.1:8000"; a path in it is put before every request's.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ServerStartError(
                f"{url!r} is no address of a server.", "Give one like http://127.0.0.1:8000."
            )
        self.url = url
        self._host, self._port, self._path = parts.hostname, parts.port or 80, parts.path

    def connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        """A new connection, not opened yet."""
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def path(self, path: str) -> str:
        """The path of a request on this server."""
        return self._path.rstrip("/") + path

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        """Status and text of a GET request.

        Raises:
            OSError, http.client.HTTPException: nobody answers.
        """
        connection = self.connect(timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", self.path(path))
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a JSON request.

        Raises:
            OSError, http.client.HTTPException: nobody answers, or not with success.
        """
        connection = self.connect(timeout_s)
        with contextlib.closing(connection):
            connection.request("POST", self.path(path), json.dumps(body), JSON_HEADERS)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status != http.client.OK:
                raise http.client.HTTPException(f"status {response.status}: {text[:200]}")
            answer: dict[str, Any] = json.loads(text)
            return answer


JSON_HEADERS = {"Content-Type": "application/json"}


class ServerProcess:
    """A server and everything that it started.

    Args:
        command: arguments, no shell; "{port}" in them is replaced by a free port.
        health_path: answers 200 when the server is ready.
        start_timeout_s: longest wait for that.

    Raises:
        ServerStartError: it ended early, or did not become ready in time; nothing is left of it.
    """

    def __init__(self, command: Sequence[str], *, health_path: str, start_timeout_s: float) -> None:
        port = free_port()
        self._health_path = health_path
        self.command = [argument.replace("{port}", str(port)) for argument in command]
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, str(_GUARD), *self.command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_until_ready(start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the guard, which the server and all that it starts are below."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def check_alive(self) -> None:
        """Nothing, while the server runs.

        Raises:
            EngineProcessError: it has ended.
        """
        status = self._process.poll()
        if status is None:
            return
        if status < 0:
            name = signal.Signals(-status).name
            raise EngineProcessError("signal", f"the server was killed by {name}", self.log_tail())
        raise EngineProcessError("exit", f"the server exited with status {status}", self.log_tail())

    def check_answers(self) -> None:
        """Find out whether a connection broke because the server has ended.

        Raises:
            EngineProcessError: it has ended.
        """
        try:
            self.endpoint.get(self._health_path)
        except (OSError, http.client.HTTPException):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_S)  # it is about to end, and will say how
        self.check_alive()

    def log_tail(self) -> str:
        """The end of what the server printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _MAX_LOG_BYTES))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End the server and everything below it; may be called twice."""
        if self._log.closed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise ServerStartError(
                    f"The server ended with status {status} before it was ready.",
                    f"It was started as {self.command} and printed:\n{self.log_tail()}",
                )
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.endpoint.get(self._health_path)[0] == http.client.OK:
                    return
            time.sleep(_HEALTH_EVERY_S)
        raise ServerStartError(
            f"The server did not answer {self._health_path} with 200 within {timeout_s:g} s.",
            f"It was started as {self.command} and printed:\n{self.log_tail()}",
        )


def free_port() -> int:
    """A port of the local machine on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
