"""The exact KV model: a language model whose every output depends on every KV slot it reads.

Owns the arithmetic and the simulated cache. No torch, no numpy unless a row of logits is asked for,
and nothing of schedulers or requests, so that any engine's scheduler can be driven with it.

A slot stores a chain value, which pins down the whole history that wrote it:

    v[p] = mix(v[p - 1] as read back through the block table, token[p], p, salt)

The digest at position p covers every slot that attention would read, each at its logical position:

    digest[p] = mix(sum over i <= p of mix(slot value read for position i, i))

Logits are pseudo-random functions of the digest whose two largest values differ by at least
`TOP_GAP`, so there are no ties, and one wrong, missing or exchanged slot changes the next token
with probability 1 - 1/vocabulary. The undisturbed output is a closed form of the prompt:
`reference_generate`.

Under tensor parallelism every rank keeps a cache of its own, salted with its rank, and computes a
share of each digest. The digest is the sum of the shares, as an all-reduce would add them, so one
rank that reads one wrong slot changes the output.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOP_GAP = 1.0
EOS_TOKEN_ID = 0

_MASK = (1 << 64) - 1
_ROOT = 0x9E3779B97F4A7C15  # stands before position 0
_EMPTY = 0x6A09E667F3BCC908  # content of a slot that was never written
_POISON = 0x3C6EF372FE94F82B  # content of a slot that was filled on purpose


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014), a bijection of 64-bit integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def chain_value(previous: int, token_id: int, position: int, salt: int) -> int:
    """Content of the slot of `position`, given the content read for the position before it."""
    return mix(
        (
            previous * 0xD1342543DE82EF95
            + (token_id + 1) * 0x9E3779B97F4A7C15
            + (position + 1) * 0xC2B2AE3D27D4EB4F
            + salt
        )
        & _MASK
    )


def _contribution(value: int, position: int) -> int:
    return mix((value + (position + 1) * 0xA24BAED4963EE407) & _MASK)


class _Reader:
    """What one reader has summed up: positions [0, length) through `table`."""

    __slots__ = ("dirty", "length", "table", "total")

    def __init__(self) -> None:
        self.total = 0
        self.length = 0
        self.table: list[int] = []
        self.dirty = False


class ExactCache:
    """Slots of chain values, written and read through block tables.

    Like an attention layer, a step first writes the slots of all its tokens (`write`, for every
    sequence) and then reads (`read`, for every sequence).

    Reads are incremental: what a reader has summed up stays valid until one of its blocks is
    written by someone else, so a decode step costs the same at any context. The digests are those
    of reading every slot anew.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        salt: makes the chains of two caches differ (ranks, models).
        num_host_blocks: size of the host pool, the other side of `swap_out` and `swap_in`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, salt: int = 0, num_host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.salt = salt
        self.slots = [_EMPTY] * (num_blocks * block_size)
        self.host_blocks = [[_EMPTY] * block_size for _ in range(num_host_blocks)]
        self._readers: dict[Hashable, _Reader] = {}
        self._readers_of_block: dict[int, set[Hashable]] = {}

    def write(
        self,
        reader: Hashable,
        start: int,
        token_ids: Sequence[int],
        slots: Sequence[int],
        block_table: Sequence[int],
    ) -> None:
        """Write the chain values of tokens at positions [start, start + len(token_ids)).

        Args:
            reader: identity of the sequence.
            start: position of the first token.
            token_ids: the tokens.
            slots: where each is written, block * block_size + offset.
            block_table: where the value of the position before each is read back.

        Raises:
            IndexError: a slot or block is outside the pool, or a position outside the table.
        """
        size = self.block_size
        state = self._readers.get(reader)
        if state is not None and start < state.length and not state.dirty:
            self._take_back(state, start)
        known_length = state.length if state else 0
        previous = self._slot_content(block_table, start - 1) if start else _ROOT
        for position, (token_id, slot) in enumerate(zip(token_ids, slots, strict=True), start):
            block_id = slot // size
            self._check_block(block_id)
            value = chain_value(previous, token_id, position, self.salt)
            self.slots[slot] = value
            expected = block_table[position // size] * size + position % size
            readers = self._readers_of_block.get(block_id)
            if readers:
                appends = slot == expected and position >= known_length
                self._invalidate(readers, except_for=reader if appends else None)
            previous = value if slot == expected else self.slots[expected]

    def read(
        self, reader: Hashable, end: int, block_table: Sequence[int], digests_from: int
    ) -> list[int]:
        """Read positions [0, end) through the block table.

        Returns:
            Digests of positions [digests_from, end).
        """
        size = self.block_size
        store = self.slots
        state = self._reader_up_to(reader, min(digests_from, end), block_table)
        total = state.total
        digests = []
        for position in range(state.length, end):
            value = store[block_table[position // size] * size + position % size]
            total = (total + _contribution(value, position)) & _MASK
            if position >= digests_from:
                digests.append(mix(total ^ position))
        state.total = total
        state.length = end
        return digests

    def drop(self, reader: Hashable) -> None:
        """Forget what was kept about a reader; slots stay as they are."""
        state = self._readers.pop(reader, None)
        if state is not None:
            for block_id in state.table:
                self._readers_of_block[block_id].discard(reader)

    def clear(self) -> None:
        """Forget all slots and readers, as in a new cache."""
        self.slots = [_EMPTY] * (self.num_blocks * self.block_size)
        self._readers.clear()
        self._readers_of_block.clear()

    def fill(self, block_ids: Iterable[int]) -> None:
        """Overwrite whole blocks with a value that belongs to no history."""
        for block_id in block_ids:
            self._set_block(block_id, [_POISON] * self.block_size)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination); all sources are read before any write."""
        contents = [(destination, self._block(source)) for source, destination in pairs]
        for destination, values in contents:
            self._set_block(destination, values)

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks to the host, (device block, host block)."""
        for source, destination in pairs:
            self._check_host_block(destination)
            self.host_blocks[destination] = self._block(source)

    def swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks from the host, (host block, device block)."""
        for source, destination in pairs:
            self._check_host_block(source)
            self._set_block(destination, self.host_blocks[source])

    def _take_back(self, state: _Reader, start: int) -> None:
        """Positions from `start` on are about to be written anew (rejected drafts).

        The reader is not dirty, so its slots hold what it has summed up.
        """
        size = self.block_size
        for position in range(start, state.length):
            value = self.slots[state.table[position // size] * size + position % size]
            state.total = (state.total - _contribution(value, position)) & _MASK
        state.length = start

    def _block(self, block_id: int) -> list[int]:
        self._check_block(block_id)
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]

    def _set_block(self, block_id: int, values: list[int]) -> None:
        self._check_block(block_id)
        self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = values
        self._invalidate(self._readers_of_block.get(block_id, ()), except_for=None)

    def _slot_content(self, block_table: Sequence[int], position: int) -> int:
        block_id = block_table[position // self.block_size]
        self._check_block(block_id)
        return self.slots[block_id * self.block_size + position % self.block_size]

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not in the pool of {self.num_blocks} blocks")

    def _check_host_block(self, block_id: int) -> None:
        if not 0 <= block_id < len(self.host_blocks):
            raise IndexError(
                f"host block {block_id} is not in the pool of {len(self.host_blocks)} host blocks"
            )

    def _invalidate(self, readers: Collection[Hashable], except_for: Hashable | None) -> None:
        for reader in readers:
            if reader != except_for:
                self._readers[reader].dirty = True

    def _reader_up_to(self, reader: Hashable, position: int, block_table: Sequence[int]) -> _Reader:
        """The reader's sums, valid for some [0, length) with length <= position."""
        state = self._readers.get(reader)
        if state is not None and (
            state.dirty or state.length > position or state.table != block_table[: len(state.table)]
        ):
            self.drop(reader)
            state = None
        if state is None:
            state = self._readers[reader] = _Reader()
        for block_id in block_table[len(state.table) :]:
            self._check_block(block_id)
            state.table.append(block_id)
            self._readers_of_block.setdefault(block_id, set()).add(reader)
        return state


def combine_digests(shares: Sequence[Sequence[int]]) -> list[int]:
    """Digest of each row from the shares of all ranks; one rank's share is the digest itself.

    Args:
        shares: per rank, its digest of each row.
    """
    return [sum(row) & _MASK for row in zip(*shares, strict=True)]


class ExactLogits:
    """A `LogitsBatch` made of digests; rows of logits are computed only when asked for.

    Args:
        digests: one per row.
        vocab_size: tokens in the vocabulary.
    """

    def __init__(self, digests: list[int], vocab_size: int) -> None:
        self.digests = digests
        self.vocab_size = vocab_size

    @property
    def num_rows(self) -> int:
        return len(self.digests)

    def argmax(self, rows: Sequence[int]) -> list[int]:
        """Most likely token of each row."""
        return [self.digests[row] % self.vocab_size for row in rows]

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one row, float32 [vocab_size]."""
        import numpy as np

        return np.array(logits_of(self.digests[index], self.vocab_size), dtype=np.float32)


def logits_of(digest: int, vocab_size: int) -> list[float]:
    """Logits that belong to a digest: `TOP_GAP` for the top token, the others in [-4, 0)."""
    logits = [
        mix((digest + token_id + 1) & _MASK) * 2.0**-62 - 4.0 for token_id in range(vocab_size)
    ]
    logits[digest % vocab_size] = TOP_GAP
    return logits


class ReferenceSequence:
    """The closed form: digests of a token history, with no cache in between.

    Args:
        token_ids: the history so far.
        salt: as given to the `ExactCache` of rank 0; rank r has salt + r.
        num_ranks: tensor parallel size.
    """

    def __init__(self, token_ids: Iterable[int] = (), salt: int = 0, *, num_ranks: int = 1) -> None:
        self._salts = range(salt, salt + num_ranks)
        self._previous = [_ROOT] * num_ranks
        self._totals = [0] * num_ranks
        self._length = 0
        for token_id in token_ids:
            self.append(token_id)

    def copy(self) -> ReferenceSequence:
        """The same history, to be extended in another way."""
        other = ReferenceSequence()
        other._salts = self._salts
        other._previous = list(self._previous)
        other._totals = list(self._totals)
        other._length = self._length
        return other

    def append(self, token_id: int) -> None:
        """Extend the history by one token."""
        for rank, salt in enumerate(self._salts):
            value = chain_value(self._previous[rank], token_id, self._length, salt)
            self._previous[rank] = value
            self._totals[rank] += _contribution(value, self._length)
        self._length += 1

    @property
    def digest(self) -> int:
        """Digest of the last position; the logits that follow the history derive from it."""
        position = self._length - 1
        shares = [[mix((total & _MASK) ^ position)] for total in self._totals]
        return combine_digests(shares)[0]


def reference_generate(
    prompt_token_ids: Iterable[int],
    max_tokens: int,
    vocab_size: int,
    *,
    salt: int = 0,
    num_ranks: int = 1,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    """Greedy output of the exact model, from the prompt alone.

    Args:
        prompt_token_ids: at least one token.
        max_tokens: most output tokens.
        vocab_size: tokens in the vocabulary.
        salt: as given to the `ExactCache` of rank 0.
        num_ranks: tensor parallel size; another size is another model.
        stop_token_ids: end the output; the stop token is its last.
    """
    sequence = ReferenceSequence(prompt_token_ids, salt, num_ranks=num_ranks)
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = sequence.digest % vocab_size
        output.append(token_id)
        if token_id in stop_token_ids:
            break
        sequence.append(token_id)
    return output
