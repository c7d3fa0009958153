"""The process of one rank: builds its runner, then answers the driver's messages until it ends.

It lives exactly as long as the driver holds the other end of its socket. Kept light: it imports
what its runner needs and nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading

from preempt_engine.executor.failures import describe_failure
from preempt_engine.executor.rank import Rank
from preempt_engine.executor.wire import (
    Frame,
    FrameBuffer,
    MessageKind,
    encode_body,
    make_frame,
)

_CHUNK = 1 << 16


class DriverGoneError(Exception):
    """The driver's end of the socket is closed. (A runner's own `ConnectionError` is no such.)"""


def main(rank: int, socket_fd: int, stacks_fd: int) -> None:
    """Entry point of the process; does not return.

    Args:
        rank: tensor parallel rank.
        socket_fd: the worker's end of the socket pair.
        stacks_fd: where stacks go when the process crashes or the driver asks (SIGUSR1).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(stacks_fd)
    faulthandler.register(signal.SIGUSR1, stacks_fd)
    sock = socket.socket(fileno=socket_fd)
    _exit_with_driver(sock)
    code = 0
    try:
        Worker(rank, sock).serve()
    except DriverGoneError:  # nobody is left to be told
        code = 1
    except BaseException as error:
        code = 1
        with contextlib.suppress(ConnectionError):
            sock.sendall(make_frame(MessageKind.FAILED, encode_body(describe_failure(error))))
    # Not through the interpreter's teardown, which may wait for threads of libraries.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_with_driver(sock: socket.socket) -> None:
    """End this process as soon as the driver is gone, whatever it is doing."""
    poll = select.poll()
    poll.register(sock, 0)  # hang-ups are always reported; nothing else is wanted

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-driver", daemon=True).start()


class Worker:
    """A rank behind a socket.

    Args:
        rank: tensor parallel rank.
        sock: blocking; the driver's messages come and the answers go through it.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self._rank = Rank(rank)
        self._socket = sock
        self._buffer = FrameBuffer()

    def serve(self) -> None:
        """Answer until told to close.

        Raises:
            DriverGoneError: the driver's end of the socket is closed.
            Exception: whatever the runner raises, and WireProtocolError.
        """
        while (answer := self._rank.answer(self._receive())) is not None:
            self._send(*answer)

    def _receive(self) -> Frame:
        while (frame := self._buffer.next_frame()) is None:
            try:
                data = self._socket.recv(_CHUNK)
            except ConnectionError as error:
                raise DriverGoneError from error
            if not data:
                raise DriverGoneError
            self._buffer.feed(data)
        return frame

    def _send(self, kind: MessageKind, body: bytes) -> None:
        try:
            self._socket.sendall(make_frame(kind, body))
        except ConnectionError as error:
            raise DriverGoneError from error
