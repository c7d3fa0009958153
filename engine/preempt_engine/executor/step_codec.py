"""The message of a step: `SchedulerOutput` as packed 32-bit words (docs/worker-protocol.md).

A sequence is named once, when it is new to the workers; later steps carry a handle. A sequence
that computes one token, as decoding ones do, then costs 16 bytes whatever its length, and only new
and re-prefilled sequences carry their token ids. Encoder and decoder keep the handles; both see
every step, in order.

    header   step  flags  singles  others  forks  dropped  poison  swap in  copies  swap out
             name bytes
    singles  4 words each:  handle  start  new token  new block
    others   12 words each, then all their token ids, then all their block ids
    forks    3 words each:  parent's handle  child's handle  child's branch
    dropped  1 word each: handle        poison  1 word each
    swap in, copies, swap out  2 words each
    check    number of sequences, then 1 word per scheduled sequence; only with its flag
    names    UTF-8, one after another

Rows keep their order: each of the others carries its row, singles fill the rows that are left.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from preempt_engine.errors import WireProtocolError
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey, StateCheck

_NUM_COUNTS = 11
_SINGLE_WORDS = 4
_OTHER_WORDS = 12
_FORK_WORDS = 3

# Flags of the step.
_REPORT = 1
_CHECKED = 2
# Flags of the others.
_RESET = 1
_FULL_LOGITS = 2
# A single has no word for flags; they are the top bits of its handle.
_SINGLE_FULL_LOGITS = 1 << 31
_SINGLE_NO_LOGITS = 1 << 30
_HANDLE = _SINGLE_NO_LOGITS - 1
# In place of a token or block that is not there: neither has so large an id.
_NONE = (1 << 32) - 1


class StepEncoder:
    """The driver's side. One encoder serves all ranks: they are sent the same bytes."""

    def __init__(self) -> None:
        self._handles: dict[SequenceKey, int] = {}
        self._next_handle = 0

    @property
    def known_keys(self) -> Iterable[SequenceKey]:
        """Sequences that the workers keep."""
        return self._handles

    def reset(self) -> None:
        """Forget every sequence, as the decoders do."""
        self._handles.clear()

    def encode(self, step: SchedulerOutput, *, report: bool) -> bytes:
        """The body of a STEP frame.

        Args:
            step: to send.
            report: ask the workers for what their runners tell an observer.
        """
        forks = [word for parent, child in step.forks for word in self._fork(parent, child)]
        dropped = [self._handles.pop(key) for key in step.dropped]
        singles: list[int] = []
        others: list[int] = []
        token_ids: list[int] = []
        block_ids: list[int] = []
        names: list[bytes] = []
        for row, item in enumerate(step.scheduled):
            if _is_single(item):
                self._add_single(singles, item)
                continue
            others += (row, *self._describe(item, names))
            token_ids += item.new_token_ids
            block_ids += item.new_block_ids
        check = step.state_check
        words = [
            step.step_id,
            report * _REPORT | (check is not None) * _CHECKED,
            len(singles) // _SINGLE_WORDS,
            len(others) // _OTHER_WORDS,
            len(step.forks),
            len(dropped),
            len(step.poison_block_ids),
            len(step.swap_in),
            len(step.block_copies),
            len(step.swap_out),
            sum(map(len, names)),
            *singles,
            *others,
            *token_ids,
            *block_ids,
            *forks,
            *dropped,
            *step.poison_block_ids,
        ]
        for pairs in (step.swap_in, step.block_copies, step.swap_out):
            for pair in pairs:
                words += pair
        if check is not None:
            words += (check.num_sequences, *check.checksums)
        return struct.pack(f"<{len(words)}I", *words) + b"".join(names)

    def _fork(self, parent: SequenceKey, child: SequenceKey) -> tuple[int, int, int]:
        return self._handles[parent], self._new_handle(child), child.branch

    def _new_handle(self, key: SequenceKey) -> int:
        handle = self._handles[key] = self._next_handle
        self._next_handle += 1
        assert self._next_handle <= _HANDLE
        return handle

    def _add_single(self, singles: list[int], item: ScheduledSequence) -> None:
        handle = self._handles[item.key]
        if item.full_logits:
            handle |= _SINGLE_FULL_LOGITS
        if not item.num_logits:
            handle |= _SINGLE_NO_LOGITS
        token = item.new_token_ids[0] if item.new_token_ids else _NONE
        block = item.new_block_ids[0] if item.new_block_ids else _NONE
        singles += (handle, item.start, token, block)

    def _describe(self, item: ScheduledSequence, names: list[bytes]) -> tuple[int, ...]:
        """All words but the first of one of the others; its name goes to `names`."""
        name = b""
        if item.reset:
            name = item.key.request_id.encode()
            names.append(name)
            if item.key not in self._handles:
                self._new_handle(item.key)
        return (
            self._handles[item.key],
            item.start,
            item.end,
            item.logits_start,
            item.reset * _RESET | item.full_logits * _FULL_LOGITS,
            len(item.new_token_ids),
            len(item.new_block_ids),
            item.num_stale_blocks,
            item.num_stale_tokens,
            item.key.branch,
            len(name),
        )


def _is_single(item: ScheduledSequence) -> bool:
    return (
        not item.reset
        and item.end == item.start + 1
        and item.start <= item.logits_start <= item.end
        and len(item.new_token_ids) <= 1
        and len(item.new_block_ids) <= 1
        and not item.num_stale_blocks
        and not item.num_stale_tokens
    )


class StepDecoder:
    """A worker's side."""

    def __init__(self) -> None:
        self._keys: dict[int, SequenceKey] = {}

    def reset(self) -> None:
        """Forget every sequence."""
        self._keys.clear()

    def decode(self, body: bytes) -> tuple[SchedulerOutput, bool]:
        """What `StepEncoder.encode` wrote: the step, and whether reports are wanted.

        Raises:
            WireProtocolError: the body is no step, or names a sequence that was never sent.
        """
        reader = _Reader(body)
        step_id, flags, num_singles, num_others, num_forks, *counts = reader.words(_NUM_COUNTS)
        num_dropped, num_poison, num_swap_in, num_copies, num_swap_out, num_name = counts
        reader.take_names(num_name)
        singles = reader.words(num_singles * _SINGLE_WORDS)
        others = reader.words(num_others * _OTHER_WORDS)
        num_token_ids, num_block_ids = sum(others[6::_OTHER_WORDS]), sum(others[7::_OTHER_WORDS])
        token_ids, block_ids = reader.words(num_token_ids), reader.words(num_block_ids)
        forks = self._forks(reader.words(num_forks * _FORK_WORDS))
        dropped = [self._forget(handle) for handle in reader.words(num_dropped)]
        scheduled = self._others(others, list(token_ids), list(block_ids), reader)
        step = SchedulerOutput(
            step_id=step_id,
            forks=forks,
            dropped=dropped,
            poison_block_ids=list(reader.words(num_poison)),
            swap_in=_pairs(reader.words(2 * num_swap_in)),
            block_copies=_pairs(reader.words(2 * num_copies)),
            scheduled=self._in_rows(scheduled, singles, num_singles + num_others),
            swap_out=_pairs(reader.words(2 * num_swap_out)),
        )
        if flags & _CHECKED:
            (num_sequences,) = reader.words(1)
            checksums = list(reader.words(num_singles + num_others))
            step.state_check = StateCheck(num_sequences, checksums)
        reader.expect_end()
        return step, bool(flags & _REPORT)

    def _forks(self, words: Sequence[int]) -> list[tuple[SequenceKey, SequenceKey]]:
        forks = []
        for index in range(0, len(words), _FORK_WORDS):
            parent_handle, child_handle, branch = words[index : index + _FORK_WORDS]
            parent = self._key(parent_handle)
            child = self._keys[child_handle] = SequenceKey(parent.request_id, branch)
            forks.append((parent, child))
        return forks

    def _others(
        self,
        words: Sequence[int],
        token_ids: list[int],
        block_ids: list[int],
        reader: _Reader,
    ) -> dict[int, ScheduledSequence]:
        """Row -> one of the others."""
        scheduled: dict[int, ScheduledSequence] = {}
        first_token = first_block = 0
        for index in range(0, len(words), _OTHER_WORDS):
            row, handle, start, end, logits_start, flags, *counts = words[
                index : index + _OTHER_WORDS
            ]
            num_tokens, num_blocks, num_stale_blocks, num_stale_tokens, branch, length = counts
            if flags & _RESET:
                self._keys[handle] = SequenceKey(reader.name(length), branch)
            last_token, last_block = first_token + num_tokens, first_block + num_blocks
            scheduled[row] = ScheduledSequence(
                key=self._key(handle),
                start=start,
                end=end,
                logits_start=logits_start,
                reset=bool(flags & _RESET),
                new_token_ids=token_ids[first_token:last_token],
                new_block_ids=block_ids[first_block:last_block],
                num_stale_blocks=num_stale_blocks,
                full_logits=bool(flags & _FULL_LOGITS),
                num_stale_tokens=num_stale_tokens,
            )
            first_token, first_block = last_token, last_block
        return scheduled

    def _in_rows(
        self, others: dict[int, ScheduledSequence], singles: Sequence[int], num_rows: int
    ) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        index = 0
        for row in range(num_rows):
            if row in others:
                scheduled.append(others[row])
                continue
            if index == len(singles):
                raise _unreadable("its rows do not add up")
            flagged, start, token_id, block_id = singles[index : index + _SINGLE_WORDS]
            index += _SINGLE_WORDS
            scheduled.append(
                ScheduledSequence(
                    key=self._key(flagged & _HANDLE),
                    start=start,
                    end=start + 1,
                    logits_start=start + bool(flagged & _SINGLE_NO_LOGITS),
                    reset=False,
                    new_token_ids=[] if token_id == _NONE else [token_id],
                    new_block_ids=[] if block_id == _NONE else [block_id],
                    full_logits=bool(flagged & _SINGLE_FULL_LOGITS),
                )
            )
        return scheduled

    def _key(self, handle: int) -> SequenceKey:
        key = self._keys.get(handle)
        if key is None:
            raise _unreadable(f"sequence handle {handle} was never introduced")
        return key

    def _forget(self, handle: int) -> SequenceKey:
        key = self._key(handle)
        del self._keys[handle]
        return key


class _Reader:
    """Takes words from the front of a body and names from its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._position = 0
        self._words_end = len(body)
        self._name_position = len(body)

    def words(self, count: int) -> tuple[int, ...]:
        """The next so many words."""
        end = self._position + 4 * count
        if end > self._words_end:
            raise _unreadable(f"it should have {end} bytes of words, and has {self._words_end}")
        words = struct.unpack_from(f"<{count}I", self._body, self._position)
        self._position = end
        return words

    def take_names(self, num_bytes: int) -> None:
        """The last so many bytes are names, not words."""
        self._words_end -= num_bytes
        self._name_position = self._words_end

    def name(self, length: int) -> str:
        """The next name."""
        end = self._name_position + length
        raw = self._body[self._name_position : end]
        if len(raw) != length:
            raise _unreadable("a request id is cut off")
        self._name_position = end
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _unreadable("a request id is not UTF-8") from error

    def expect_end(self) -> None:
        """Everything must have been read."""
        if self._position != self._words_end or self._name_position != len(self._body):
            raise _unreadable("it has more bytes than it accounts for")


def _pairs(words: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(words[::2], words[1::2], strict=True))


def _unreadable(why: str) -> WireProtocolError:
    return WireProtocolError(
        f"The message of a step cannot be read: {why}.",
        "Driver and workers must run the same release of preempt_engine.",
    )
