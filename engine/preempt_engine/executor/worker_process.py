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
import traceback
from typing import TYPE_CHECKING

from preempt_engine.errors import EngineError
from preempt_engine.executor.reports import ReportCollector
from preempt_engine.executor.shares import ShareCodec, select_share_codec
from preempt_engine.executor.step_codec import StepDecoder
from preempt_engine.executor.wire import (
    Failed,
    Frame,
    FrameBuffer,
    Init,
    MessageKind,
    Ready,
    StepDone,
    decode_body,
    encode_body,
    encode_step_done,
    make_frame,
)
from preempt_engine.worker.build import build_runner
from preempt_engine.worker.hooks import run_worker_hooks

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Runner

_CHUNK = 1 << 18


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


def describe_failure(error: BaseException) -> Failed:
    """An exception as the driver is told of it."""
    # Told apart by name, because torch must not be imported for it; torch's CPU allocator raises
    # a plain RuntimeError.
    out_of_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
    message, advice = str(error), ""
    if isinstance(error, EngineError):
        message, advice = error.message, error.advice
    return Failed(
        kind=type(error).__name__,
        message=message,
        advice=advice,
        traceback="".join(traceback.format_exception(error)),
        out_of_memory=out_of_memory,
    )


class Worker:
    """Answers one driver.

    Args:
        rank: tensor parallel rank.
        sock: blocking; the driver's messages come and the answers go through it.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self._rank = rank
        self._socket = sock
        self._buffer = FrameBuffer()
        self._decoder = StepDecoder()
        self._reports = ReportCollector()

    def serve(self) -> None:
        """Build the runner, then take steps until told to close.

        Raises:
            DriverGoneError: the driver's end of the socket is closed.
            Exception: whatever the runner raises, and WireProtocolError.
        """
        runner, codec = self._start(decode_body(self._receive().body, Init))
        while True:
            frame = self._receive()
            if frame.kind is MessageKind.STEP:
                self._step(runner, codec, frame.body)
            elif frame.kind is MessageKind.RESET:
                self._decoder.reset()
                runner.reset()
                self._send(MessageKind.RESET_DONE, b"")
            else:
                assert frame.kind is MessageKind.CLOSE, frame.kind
                runner.close()
                return

    def _start(self, init: Init) -> tuple[Runner, ShareCodec]:
        runner = build_runner(init.config, self._rank, init.store_fd)
        run_worker_hooks(init.config.worker_hooks, runner)
        ready = Ready(
            num_kv_blocks=runner.num_kv_blocks,
            num_host_blocks=runner.num_host_blocks,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            eos_token_ids=sorted(runner.eos_token_ids),
        )
        self._send(MessageKind.READY, encode_body(ready))
        return runner, select_share_codec(init.config, runner.vocab_size)

    def _step(self, runner: Runner, codec: ShareCodec, body: bytes) -> None:
        step, wants_reports = self._decoder.decode(body)
        runner.observer = self._reports if wants_reports else None
        share = codec.encode(self._rank, step, runner.execute(step))
        done = StepDone(step.step_id, share, self._reports.take())
        self._send(MessageKind.STEP_DONE, encode_step_done(done))

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
