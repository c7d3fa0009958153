"""One end of a worker's socket in the driver: never blocks, whatever the size of a message."""

from __future__ import annotations

import socket
from collections import deque

from preempt_engine.executor.wire import Frame, FrameBuffer

_CHUNK = 1 << 18


class Channel:
    """Frames out of and into a non-blocking socket.

    Args:
        sock: connected stream socket; owned from now on.

    Attributes:
        ended: the other end is closed. Frames that came before it can still be taken.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: deque[memoryview] = deque()
        self._incoming = FrameBuffer()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._outgoing)

    def queue(self, frame: bytes) -> None:
        """Put a frame behind what waits, and write what can be written now."""
        self._outgoing.append(memoryview(frame))
        self.write()

    def write(self) -> None:
        """Write what the socket takes."""
        while self._outgoing:
            try:
                num_sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError:  # the other end is gone; what it said before is still to be read
                self._outgoing.clear()
                return
            if num_sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][num_sent:]

    def read(self) -> None:
        """Take in what has arrived."""
        while not self.ended:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.ended = not data
            self._incoming.feed(data)
            if len(data) < _CHUNK:
                return

    def next_frame(self) -> Frame | None:
        """The next complete frame, if there is one.

        Raises:
            WireProtocolError: what arrived is no frame.
        """
        return self._incoming.next_frame()

    def close(self) -> None:
        """Close the socket; may be called twice."""
        self._outgoing.clear()
        self._socket.close()
