"""The child's side of a session in a process of its own: `python -m` with a socket and a class.

Answers one call after another until its parent is gone. Whatever the engine prints goes to the log
that the parent gave as standard output and error; the frames have a socket to themselves.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import msgspec

from preempt_harness.adapters.child import Call, RemoteError, Reply
from preempt_harness.adapters.protocol import EngineAdapter, Session
from preempt_harness.adapters.registry import AdapterError
from preempt_harness.errors import HarnessError
from preempt_harness.record import AnyEvent, RequestResult

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(arguments: list[str]) -> int:
    """Serve calls.

    Args:
        arguments: file descriptor of the socket, module and qualified name of the adapter's class.
    """
    descriptor, module_name, class_name = arguments
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(int(descriptor))

    def stream(events: Sequence[AnyEvent]) -> None:
        connection.send_bytes(msgspec.json.encode(Reply(partial=True, events=list(events))))

    server = _Server(module_name, class_name, stream)
    while True:
        try:
            frame = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # the parent is gone; the engine may have threads that never end
        connection.send_bytes(msgspec.json.encode(server.answer(frame)))


def _end_with_parent() -> None:
    """Ask Linux to end this process with its parent's thread, even while it is stuck in C code.

    Elsewhere the end of the socket does it, between two calls.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Server:
    """Holds the adapter and the session of the moment."""

    def __init__(
        self,
        module_name: str,
        class_name: str,
        stream: Callable[[Sequence[AnyEvent]], None],
    ) -> None:
        self._module_name = module_name
        self._class_name = class_name
        self._stream = stream
        self._session: Session | None = None
        self._reported: set[str] = set()

    def answer(self, frame: bytes) -> Reply:
        """Carry out one call; an exception becomes part of the reply."""
        call = msgspec.json.decode(frame, type=Call)
        try:
            if call.method == "open":
                return self._open(call)
            assert self._session is not None
            reply = self._carry_out(call, self._session)
            reply.unfinished = self._session.unfinished()
            reply.results = self._new_results(call, self._session)
            if call.method == "close":
                self._session = None
            return reply
        except Exception as error:
            return Reply(
                error=RemoteError(
                    type(error).__name__,
                    error.message if isinstance(error, HarnessError) else str(error),
                    "".join(traceback.format_exception(error)),
                    error.advice if isinstance(error, HarnessError) else "",
                )
            )

    def _open(self, call: Call) -> Reply:
        assert call.settings is not None
        self._session = self._build_adapter().open(call.settings)
        self._reported = set()
        stream_to = getattr(self._session, "stream_to", None)
        if stream_to is not None:
            stream_to(self._stream)
        return Reply(info=self._session.info)

    def _build_adapter(self) -> EngineAdapter:
        try:
            target: object = importlib.import_module(self._module_name)
            for name in self._class_name.split("."):
                target = getattr(target, name)
            assert isinstance(target, type)
            adapter: EngineAdapter = target()
        except Exception as error:
            raise AdapterError(
                f"The adapter {self._module_name}.{self._class_name} cannot be built in the "
                f"engine's process: {type(error).__name__}: {error}.",
                "Put the class at the top level of a module that can be imported, let its "
                "constructor take no arguments, or run without isolation.",
            ) from error
        return adapter

    def _new_results(self, call: Call, session: Session) -> dict[str, RequestResult]:
        """At the end all results; before, those of requests that have ended since the last reply.

        Should the process die, what these requests gave is known whole.
        """
        if not _ends_requests(call):
            return {}
        results = session.results()
        if call.method != "close":
            results = {
                request: result
                for request, result in results.items()
                if result.finished and request not in self._reported
            }
            self._reported.update(results)
        return results

    @staticmethod
    def _carry_out(call: Call, session: Session) -> Reply:
        match call.method:
            case "submit":
                assert call.request is not None
                session.submit(call.request)
            case "abort":
                session.abort(call.name)
            case "poll":
                return Reply(events=list(session.poll(call.timeout_s)))
            case "close":
                return Reply(events=list(session.close()))
            case "preempt":
                session.preempt(call.name, call.mode)
            case "hold_blocks":
                return Reply(number=session.hold_blocks(call.number))
            case "reset_prefix_cache":
                session.reset_prefix_cache()
            case "reset_running_requests":
                session.reset_running_requests()
            case "set_priority":
                session.set_priority(call.name, call.number)
            case "score":
                return Reply(scores=session.score(call.prompt, call.continuation))
            case _:
                raise ValueError(f"unknown call {call.method!r}")
        return Reply()


def _ends_requests(call: Call) -> bool:
    return call.method in ("poll", "abort", "close")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
