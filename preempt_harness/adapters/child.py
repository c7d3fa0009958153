"""Sessions in a child process, so that a hang, a segfault or an exit ends a trial and not pytest.

Owns the parent's side: starting the child, frames over a pair of pipes, and the watchdog. Frames
are JSON of known types; nothing is unpickled. The child's side is `child_main`.

One child serves many sessions, one after another, because importing an engine is slow. It is
replaced as soon as anything went wrong in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO

import msgspec

from preempt_harness.adapters.child_folder import ChildFolder
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session, SessionInfo
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput, TokensDelivered
from preempt_harness.workload import RequestSpec

START_TIMEOUT_S = 300.0  # importing and building an engine; a GPU engine captures graphs here
_ABORT_GRACE_S = 2.0  # for the child's traceback dump after SIGABRT
_MAX_LOG_BYTES = 16_384


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the child answers. Exactly one of the last fields is set unless it is plain "done".

    A `partial` reply carries events of a call that is still running; another reply follows.
    """

    partial: bool = False
    events: list[AnyEvent] = []
    unfinished: bool = False
    results: dict[str, RequestResult] = {}
    info: SessionInfo | None = None
    scores: list[Score] = []
    number: int = 0
    error: RemoteError | None = None


class RemoteError(msgspec.Struct, frozen=True):
    """An exception in the child, as text; `advice` where it is an error of the harness."""

    kind: str
    message: str
    traceback: str
    advice: str = ""


class Call(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the parent asks of the child's session."""

    method: str
    settings: EngineSettings | None = None
    request: RequestSpec | None = None
    name: str = ""
    mode: str = ""
    number: int = 0
    timeout_s: float = 0.0
    prompt: list[int] = []
    continuation: list[int] = []


class EngineProcessError(Exception):
    """The engine in the child raised, died or hung.

    Args:
        kind: the exception's name, or "signal", "exit", "hang".
        message: what happened.
        traceback: of the child, as far as it is known.
        advice: what to do about it, where that is known.
    """

    def __init__(self, kind: str, message: str, traceback: str, advice: str = "") -> None:
        super().__init__(f"{message} {advice}" if advice else message)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.advice = advice


class ChildHost:
    """One child process and the pipes to it.

    Args:
        adapter: must be importable by its class: the child builds its own.
        poll_timeout_s: longest silence before the child counts as hung.
    """

    def __init__(self, adapter: EngineAdapter, poll_timeout_s: float) -> None:
        self._adapter = adapter
        self._poll_timeout_s = poll_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: IO[bytes] | None = None
        self._folder: ChildFolder | None = None  # for its temporary files

    @property
    def pid(self) -> int | None:
        """Of the child, None when there is none."""
        return None if self._process is None else self._process.pid

    def open(self, settings: EngineSettings) -> Session:
        """Open a session in the child, starting one if there is none.

        Raises:
            UnsupportedTrialError: the engine says that it cannot honour the settings.
            EngineProcessError: the engine could not be built.
        """
        if self._process is None:
            self._start()
        try:
            reply = self.ask(Call(method="open", settings=settings), START_TIMEOUT_S)
        except EngineProcessError as error:
            self.close()  # whatever half an engine left behind
            if error.kind == UnsupportedTrialError.__name__:
                raise UnsupportedTrialError(error.message, error.advice) from None
            error.add_note(f"In the engine's process:\n{error.traceback}")
            raise
        assert reply.info is not None
        return ChildSession(self, reply.info)

    def ask(
        self,
        call: Call,
        timeout_s: float | None = None,
        streamed: list[AnyEvent] | None = None,
    ) -> Reply:
        """Send a call and wait for its reply.

        Args:
            call: what to do.
            timeout_s: longest silence; None takes that of polls.
            streamed: takes the events that come before the reply, also when none comes.

        Raises:
            EngineProcessError: the engine raised, the child died, or it was silent for too long;
                in the last two cases there is no child any more.
        """
        if self._connection is None:
            raise EngineProcessError("exit", "the engine's process is gone", "")
        wait_s = self._poll_timeout_s if timeout_s is None else timeout_s
        try:
            self._connection.send_bytes(msgspec.json.encode(call))
            reply = self._receive(call, wait_s)
            while reply.partial:
                if streamed is not None:
                    streamed += reply.events
                reply = self._receive(call, wait_s)
        except (EOFError, OSError):
            raise self._death() from None
        except BaseException:
            # Interrupted, by Ctrl-C or a test's time limit: the reply that is still to come would
            # be taken for that of the next call.
            self.close()
            raise
        if reply.error is not None:
            raise EngineProcessError(**msgspec.structs.asdict(reply.error))
        return reply

    def _receive(self, call: Call, wait_s: float) -> Reply:
        assert self._connection is not None
        if not self._connection.poll(wait_s):
            raise self._hang(call, wait_s)
        return msgspec.json.decode(self._connection.recv_bytes(), type=Reply)

    def close(self) -> None:
        """End the child and everything it started; may be called twice."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is not None:
            _end(process)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._folder = ChildFolder()
        kind = type(self._adapter)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(self._folder.path),
        }
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-X",
                    "faulthandler",
                    "-m",
                    "preempt_harness.adapters.child_main",
                    str(theirs.fileno()),
                    kind.__module__,
                    kind.__qualname__,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # so that its own children can be ended with it
            )
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())

    def _death(self) -> EngineProcessError:
        """The child closed its pipe: find out how it ended."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_ABORT_GRACE_S)
        code = self._process.returncode
        log = self._log_tail()
        self.close()
        if code is None:
            what = "the engine closed the connection to its process"
            return EngineProcessError("exit", what, log)
        if code < 0:
            name = signal.Signals(-code).name
            return EngineProcessError("signal", f"the engine's process was killed by {name}", log)
        return EngineProcessError("exit", f"the engine's process exited with status {code}", log)

    def _hang(self, call: Call, waited_s: float) -> EngineProcessError:
        """The child is silent: make it dump its stacks, then end it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_ABORT_GRACE_S)
        log = self._log_tail()
        self.close()
        return EngineProcessError(
            "hang", f"the engine did not answer {call.method!r} for {waited_s:g} s", log
        )

    def _log_tail(self) -> str:
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _MAX_LOG_BYTES))
        return self._log.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child's whole process group, so that nothing it started stays."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class ChildSession:
    """A session whose engine lives in the host's child.

    Args:
        host: of the child.
        info: as the child's session describes itself.
    """

    def __init__(self, host: ChildHost, info: SessionInfo) -> None:
        self.info = info
        self._host = host
        self._unfinished = False
        self._results: dict[str, RequestResult] = {}
        self._delivered: dict[str, list[int]] = {}
        self._streamed: list[AnyEvent] = []
        self._failed = False

    def submit(self, request: RequestSpec) -> None:
        """See `Session`."""
        self._delivered[request.id] = []
        self._ask(Call(method="submit", request=request))

    def abort(self, request: str) -> None:
        """See `Session`."""
        self._ask(Call(method="abort", name=request))

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """See `Session`."""
        return self._take(self._ask(Call(method="poll", timeout_s=timeout_s)).events)

    def unfinished(self) -> bool:
        """See `Session`; the state after the last call."""
        return self._unfinished

    def results(self) -> dict[str, RequestResult]:
        """Results as the child gave them; of a dead child, what was delivered before."""
        partial = {
            request: RequestResult(outputs=[SequenceOutput(token_ids=token_ids)], finished=False)
            for request, token_ids in self._delivered.items()
        }
        return {**partial, **self._results}

    def close(self) -> Sequence[AnyEvent]:
        """Close the child's session; the child stays for the next one, unless a call failed."""
        events: list[AnyEvent] = []
        try:
            if self._host.pid is not None:
                events = self._ask(Call(method="close")).events
        finally:
            if self._failed:
                self._host.close()
        return self._take(events)

    def preempt(self, request: str, mode: str) -> None:
        """See `Session`."""
        self._ask(Call(method="preempt", name=request, mode=mode))

    def hold_blocks(self, num_blocks: int) -> int:
        """See `Session`."""
        return self._ask(Call(method="hold_blocks", number=num_blocks)).number

    def reset_prefix_cache(self) -> None:
        """See `Session`."""
        self._ask(Call(method="reset_prefix_cache"))

    def reset_running_requests(self) -> None:
        """See `Session`."""
        self._ask(Call(method="reset_running_requests"))

    def set_priority(self, request: str, priority: int) -> None:
        """See `Session`."""
        self._ask(Call(method="set_priority", name=request, number=priority))

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """See `Session`."""
        call = Call(method="score", prompt=list(prompt), continuation=list(continuation))
        return self._ask(call).scores

    def _ask(self, call: Call) -> Reply:
        try:
            reply = self._host.ask(call, streamed=self._streamed)
        except EngineProcessError:
            self._failed = True
            raise
        self._unfinished = reply.unfinished
        self._results.update(reply.results)
        return reply

    def _take(self, events: list[AnyEvent]) -> list[AnyEvent]:
        """Events in their order: those that came while the step ran, then those of its reply."""
        events, self._streamed = [*self._streamed, *events], []
        for event in events:
            if isinstance(event, TokensDelivered):
                request = event.seq.rpartition(".")[0]
                self._delivered.setdefault(request, []).extend(event.token_ids)
        return events
