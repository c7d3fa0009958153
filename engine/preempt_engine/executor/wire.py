"""The messages between the driver and its workers, as bytes (docs/worker-protocol.md).

Owns frames and the control messages; the message of a step has a file of its own, `step_codec`.
Every frame starts with the same header, so that a message of any size, version or kind can be
told apart from noise. Nothing that arrives is unpickled or evaluated. Knows no sockets.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from preempt_engine.config import EngineConfig
from preempt_engine.errors import WireProtocolError
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SequenceKey

MAGIC = 0x4550  # "PE", little-endian
VERSION = 1
# Magic, version, kind, length of the body. Integers are little-endian in every message.
HEADER = struct.Struct("<HBBQ")

T = TypeVar("T")


class MessageKind(enum.IntEnum):
    """What a frame's body is. INIT, STEP, RESET and CLOSE go to workers, the others come back."""

    INIT = 1
    READY = 2
    STEP = 3
    STEP_DONE = 4
    RESET = 5
    RESET_DONE = 6
    CLOSE = 7
    FAILED = 8


_KINDS = frozenset(MessageKind)


class Frame(NamedTuple):
    """One message as it arrived."""

    kind: MessageKind
    body: bytes


def make_frame(kind: MessageKind, body: bytes = b"") -> bytes:
    """A body with its header."""
    return HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


class FrameBuffer:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._wanted = HEADER.size  # so many bytes until there is something new to say

    def feed(self, data: bytes) -> None:
        """Append what arrived."""
        self._bytes += data

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None until more has arrived.

        Raises:
            WireProtocolError: what arrived is no frame, or of another version.
        """
        if len(self._bytes) < self._wanted:
            return None
        magic, version, kind, length = HEADER.unpack_from(self._bytes)
        if magic != MAGIC or kind not in _KINDS:
            raise WireProtocolError(
                f"A message starts with {bytes(self._bytes[: HEADER.size]).hex()}, which is no "
                "header of the worker protocol.",
                "Something else wrote to the worker's socket; worker code must not.",
            )
        if version != VERSION:
            raise WireProtocolError(
                f"A message is of version {version} of the worker protocol, this is {VERSION}.",
                "Driver and workers must run the same release of preempt_engine.",
            )
        self._wanted = HEADER.size + length
        if len(self._bytes) < self._wanted:
            return None
        body = bytes(memoryview(self._bytes)[HEADER.size : self._wanted])
        del self._bytes[: self._wanted]
        self._wanted = HEADER.size
        return Frame(MessageKind(kind), body)


# Control messages -----------------------------------------------------------------------------


class Init(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to build its runner; `model` is a local directory, or "exact".

    Attributes:
        config: of the engine.
        store_fd: file descriptor, open in the worker, where ranks find each other; -1 if they
            need not.
    """

    config: EngineConfig
    store_fd: int = -1


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """What a runner says of itself."""

    num_kv_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """An exception in a worker; the worker exits after it.

    Attributes:
        kind: name of the exception's class.
        message: its text; of an engine's error, without the advice.
        advice: of an engine's error, else "".
        traceback: as Python prints it.
        out_of_memory: an allocation failed.
    """

    kind: str
    message: str
    advice: str
    traceback: str
    out_of_memory: bool


def encode_body(message: msgspec.Struct) -> bytes:
    """A control message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode_body(body: bytes, message_type: type[T]) -> T:
    """What `encode_body` wrote.

    Raises:
        WireProtocolError: it is not of that type.
    """
    try:
        return msgspec.msgpack.decode(body, type=message_type)
    except msgspec.DecodeError as error:
        raise WireProtocolError(
            f"The body of a {message_type.__name__} message cannot be read: {error}.",
            "Driver and workers must run the same release of preempt_engine.",
        ) from error


# A step's answer --------------------------------------------------------------------------------

_STEP_DONE = struct.Struct("<QQ")  # step, length of the share


class ComputedReport(msgspec.Struct, frozen=True, array_like=True, tag="computed"):
    """`EngineObserver.computed` in a worker."""

    request_id: str
    branch: int
    start: int
    token_ids: list[int]
    written_slots: list[int]
    block_table: list[int]
    read_len: int

    def replay(self, observer: EngineObserver, step_id: int, rank: int) -> None:
        observer.computed(
            step_id,
            rank,
            SequenceKey(self.request_id, self.branch),
            self.start,
            self.token_ids,
            self.written_slots,
            self.block_table,
            self.read_len,
        )


class PoisonedReport(msgspec.Struct, frozen=True, array_like=True, tag="poisoned"):
    """`EngineObserver.blocks_poisoned` in a worker."""

    block_ids: list[int]

    def replay(self, observer: EngineObserver, step_id: int, rank: int) -> None:
        observer.blocks_poisoned(step_id, rank, self.block_ids)


class CopiedReport(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """`EngineObserver.worker_copied` in a worker."""

    pairs: list[tuple[int, int]]

    def replay(self, observer: EngineObserver, step_id: int, rank: int) -> None:
        observer.worker_copied(step_id, rank, self.pairs)


class SwappedOutReport(msgspec.Struct, frozen=True, array_like=True, tag="swapped_out"):
    """`EngineObserver.worker_swapped_out` in a worker."""

    pairs: list[tuple[int, int]]

    def replay(self, observer: EngineObserver, step_id: int, rank: int) -> None:
        observer.worker_swapped_out(step_id, rank, self.pairs)


class SwappedInReport(msgspec.Struct, frozen=True, array_like=True, tag="swapped_in"):
    """`EngineObserver.worker_swapped_in` in a worker."""

    pairs: list[tuple[int, int]]

    def replay(self, observer: EngineObserver, step_id: int, rank: int) -> None:
        observer.worker_swapped_in(step_id, rank, self.pairs)


Report = ComputedReport | PoisonedReport | CopiedReport | SwappedOutReport | SwappedInReport


@dataclass(slots=True, frozen=True)
class StepDone:
    """The acknowledgement of a step.

    Attributes:
        step_id: of the step.
        share: this rank's part of the result, see `shares`.
        reports: what the runner told its observer; empty unless the step asked for them.
    """

    step_id: int
    share: bytes
    reports: list[Report]


def encode_step_done(done: StepDone) -> bytes:
    """The body of a STEP_DONE frame; the share stands apart, for MessagePack ends at 4 GiB."""
    reports = msgspec.msgpack.encode(done.reports) if done.reports else b""
    return _STEP_DONE.pack(done.step_id, len(done.share)) + done.share + reports


def decode_step_done(body: bytes) -> StepDone:
    """What `encode_step_done` wrote.

    Raises:
        WireProtocolError: it is nothing of that kind.
    """
    if len(body) < _STEP_DONE.size:
        raise _bad_answer("it is too short")
    step_id, length = _STEP_DONE.unpack_from(body)
    end = _STEP_DONE.size + length
    if end > len(body):
        raise _bad_answer(f"its share should have {length} bytes")
    reports: list[Report] = []
    if end < len(body):
        reports = decode_reports(body[end:])
    return StepDone(step_id, body[_STEP_DONE.size : end], reports)


def decode_reports(data: bytes) -> list[Report]:
    """Reports of one step, in order."""
    try:
        return msgspec.msgpack.decode(data, type=list[Report])
    except msgspec.DecodeError as error:
        raise _bad_answer(f"its reports cannot be read: {error}") from error


def _bad_answer(why: str) -> WireProtocolError:
    return WireProtocolError(
        f"The answer to a step cannot be read: {why}.",
        "Driver and workers must run the same release of preempt_engine.",
    )
