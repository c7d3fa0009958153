"""The pool of KV blocks: who owns which, what is free, what the prefix cache can find again.

Pure bookkeeping over block ids; knows no tensors, no requests and no policy. Every block is in
exactly one place, which `check_integrity` states as one equation:

    free + cached + held + fenced + used = num_blocks

free    holds nothing of use              cached  unreferenced, findable by its content
held    withheld by `hold_blocks`         fenced  freed while a step that may touch it is in flight
used    referenced by at least one table
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import dropwhile, islice

from preempt_engine.config import BlockReuseOrder
from preempt_engine.free_blocks import make_free_blocks
from preempt_engine.sequence import Sequence

_ROOT_DIGEST = bytes(16)


def block_digest(parent: bytes, token_ids: list[int]) -> bytes:
    """128-bit digest of a full block: its tokens and, through `parent`, all tokens before it."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def num_private_copies(written: Iterable[int], references: Mapping[int, int] | Seq[int]) -> int:
    """Copies with which each writer has its block to itself.

    The last of all who refer to a block may keep it.

    Args:
        written: block of each writer.
        references: block -> how many refer to it.
    """
    writers = Counter(written)
    return sum(min(count, references[block_id] - 1) for block_id, count in writers.items())


class BlockManager:
    """Blocks, references and the prefix cache.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        enable_prefix_caching: keep full, computed blocks findable after they are freed.
        reuse_order: which free block is handed out first.
        seed: for reuse order "random".
        poison: remember freed blocks for the workers to overwrite.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        reuse_order: BlockReuseOrder = "fifo",
        seed: int = 0,
        poison: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.free_blocks = make_free_blocks(reuse_order, range(num_blocks), seed)
        self.cached_blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.held_blocks: list[int] = []
        self.num_used_blocks = 0
        self._num_resets = 0
        self.fenced_blocks: dict[int, int] = {}  # block id -> step in flight when it was freed
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of_digest: dict[bytes, int] = {}
        self._poison = poison
        self._to_poison: list[int] = []

    # Asking -------------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out now: free, or cached and evictable."""
        return len(self.free_blocks) + len(self.cached_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Findable blocks that hold the sequence's first tokens, at most `max_tokens` of them."""
        if not self.enable_prefix_caching:
            return []
        hits: list[int] = []
        for index in range(max_tokens // self.block_size):
            block_id = self._block_of_digest.get(self._digest(sequence, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def num_to_write(self, work: Iterable[tuple[Sequence, int]]) -> int:
        """Blocks to hand out so that sequences can write up to a position each.

        Counts blocks that extend tables, and copies of shared blocks (copy-on-write).

        Args:
            work: (sequence, one past its last position to write).
        """
        size = self.block_size
        ref_counts = self.ref_counts
        num_blocks = 0
        shared: list[int] = []
        for sequence, end in work:
            table = sequence.block_table
            growth = -(-end // size) - len(table)
            if growth > 0:
                num_blocks += growth
            index = sequence.num_computed_tokens // size
            if index < len(table) and ref_counts[table[index]] > 1 and not sequence.followers:
                shared.append(table[index])
        if shared:
            num_blocks += num_private_copies(shared, ref_counts)
        return num_blocks

    def hits_at_risk(self, prefixes: Iterable[Seq[int]], num_blocks: int) -> set[int]:
        """Blocks of prefixes that are not found any more when so many blocks were handed out.

        A block that is evicted cuts off those behind it, even if they are in use.

        Args:
            prefixes: blocks found by `find_prefix`.
            num_blocks: to be handed out.
        """
        num_evicted = max(0, num_blocks - len(self.free_blocks))
        evicted = set(islice(self.cached_blocks, num_evicted))
        at_risk: set[int] = set()
        for prefix in prefixes:
            at_risk.update(dropwhile(lambda block_id: block_id not in evicted, prefix))
        return at_risk

    # Changing -----------------------------------------------------------------------------------

    def share(self, sequence: Sequence, hits: list[int]) -> None:
        """Begin an empty table with blocks found by `find_prefix`."""
        assert not sequence.block_table
        for block_id in hits:
            if self.ref_counts[block_id] == 0:
                self.num_used_blocks += 1
                self.cached_blocks.pop(block_id, None)
                self.fenced_blocks.pop(block_id, None)
            self.ref_counts[block_id] += 1
        sequence.block_table.extend(hits)
        sequence.num_findable_blocks = len(hits)
        sequence.cache_epoch = self._num_resets

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks of its parent; the last is copied when one writes to it."""
        assert not child.block_table
        assert len(parent.block_table) == self.blocks_for(parent.num_computed_tokens)
        for block_id in parent.block_table:
            self.ref_counts[block_id] += 1
        child.block_table = list(parent.block_table)

    def copy_on_write(self, sequence: Sequence) -> tuple[int, int] | None:
        """Exchange the block of the sequence's next position for one of its own, if it is shared.

        Only that block can be: those before it are full, those after it were never shared. Blocks
        that the sequence shares with followers are its own to write.

        Returns:
            (shared block, new block): the step must copy the content. None if nobody shares it.
        """
        table = sequence.block_table
        index = sequence.num_computed_tokens // self.block_size
        if index == len(table) or self.ref_counts[table[index]] == 1 or sequence.followers:
            return None
        source, target = table[index], self._take()
        self.ref_counts[source] -= 1
        self.ref_counts[target] = 1
        self.num_used_blocks += 1
        table[index] = target
        sequence.send_blocks_again(index)
        return source, target

    def rebuild(self, sequence: Sequence, device_of: dict[int, int]) -> int:
        """Give a swapped sequence a table that names blocks as its `swapped_table` did.

        Args:
            device_of: name in a swapped table -> block; filled in for names not met before, so
                that sequences share what they shared.

        Returns:
            How many names had been met before.
        """
        num_shared = 0
        for name in sequence.swapped_table:
            if name in device_of:
                self.ref_counts[device_of[name]] += 1
                num_shared += 1
            else:
                block_id = device_of[name] = self._take()
                self.ref_counts[block_id] = 1
                self.num_used_blocks += 1
            sequence.block_table.append(device_of[name])
        return num_shared

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Extend the table to hold `num_tokens`; returns the new blocks."""
        new_blocks = [
            self._take() for _ in range(self.blocks_for(num_tokens) - len(sequence.block_table))
        ]
        for block_id in new_blocks:
            self.ref_counts[block_id] = 1
        self.num_used_blocks += len(new_blocks)
        sequence.block_table.extend(new_blocks)
        return new_blocks

    def free(self, sequence: Sequence, step_in_flight: int | None = None) -> None:
        """Give up the sequence's references.

        The last block goes first, so that the cache loses the ends of prefixes before their
        beginnings.

        Args:
            step_in_flight: the latest launched step that may still touch the blocks; they are not
                handed out before `pass_fence` of that step.
        """
        for block_id in reversed(sequence.block_table):
            assert self.ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] > 0:
                continue
            self.num_used_blocks -= 1
            if step_in_flight is None:
                self._release(block_id)
            else:
                self.fenced_blocks[block_id] = step_in_flight
        sequence.block_table = []

    def pass_fence(self, step_id: int) -> None:
        """The step is done: blocks that waited for it, or for one before it, can be handed out."""
        if not self.fenced_blocks:
            return
        passed = [block for block, step in self.fenced_blocks.items() if step <= step_id]
        for block_id in passed:
            del self.fenced_blocks[block_id]
            self._release(block_id)

    def make_findable(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks to the prefix cache; call it after they are computed.

        What was begun before a reset is not offered: it builds on content of that time.
        """
        if not self.enable_prefix_caching or sequence.cache_epoch != self._num_resets:
            return
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full <= sequence.num_findable_blocks:
            return
        if sequence.draft_token_ids:  # which are no content
            num_full = min(num_full, sequence.num_tokens // self.block_size)
        for index in range(sequence.num_findable_blocks, num_full):
            digest = self._digest(sequence, index)
            if digest not in self._block_of_digest:
                block_id = sequence.block_table[index]
                self._block_of_digest[digest] = block_id
                self._digest_of[block_id] = digest
        sequence.num_findable_blocks = max(sequence.num_findable_blocks, num_full)

    def hold_blocks(self, num_blocks: int) -> int:
        """Withhold free blocks until `num_blocks` are held, or none is left; returns how many are.

        A smaller number than before gives blocks back; 0 gives all back.
        """
        while len(self.held_blocks) > num_blocks:
            self.free_blocks.push(self.held_blocks.pop())
        while len(self.held_blocks) < num_blocks and self.num_available_blocks:
            self.held_blocks.append(self._take())
        return len(self.held_blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all content; blocks in use stay in use, but cannot be found."""
        self._num_resets += 1
        self._block_of_digest.clear()
        self._digest_of = [None] * self.num_blocks
        while self.cached_blocks:
            block_id, _ = self.cached_blocks.popitem(last=False)
            self._release(block_id)

    def take_blocks_to_poison(self) -> list[int]:
        """Blocks that became free since the last call and are free still."""
        if not self._to_poison:
            return []
        poison, self._to_poison = self._to_poison, []
        return [
            block_id
            for block_id in dict.fromkeys(poison)
            if self.ref_counts[block_id] == 0 and self._digest_of[block_id] is None
        ]

    def put_back_to_poison(self, block_ids: Iterable[int]) -> None:
        """Blocks that were taken to be poisoned by a step which is not run."""
        self._to_poison = [*block_ids, *self._to_poison]

    # Checking -----------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert the conservation equation and that references equal the tables' entries.

        Args:
            sequences: every sequence that may own blocks.
        """
        references = [0] * self.num_blocks
        for sequence in sequences:
            for block_id in sequence.block_table:
                references[block_id] += 1
        assert references == self.ref_counts, (
            f"tables refer to blocks {references} times, the pool counts {self.ref_counts}"
        )
        used = [block_id for block_id, count in enumerate(references) if count]
        assert len(used) == self.num_used_blocks
        places = [
            *self.free_blocks,
            *self.cached_blocks,
            *self.held_blocks,
            *self.fenced_blocks,
            *used,
        ]
        assert sorted(places) == list(range(self.num_blocks)), (
            f"free {len(self.free_blocks)} + cached {len(self.cached_blocks)} "
            f"+ held {len(self.held_blocks)} + fenced {len(self.fenced_blocks)} "
            f"+ used {len(used)} is not each of {self.num_blocks} blocks once"
        )
        for digest, block_id in self._block_of_digest.items():
            assert self._digest_of[block_id] == digest, (
                f"block {block_id} is found by a stale entry"
            )
        assert all(self._digest_of[block_id] is None for block_id in self.free_blocks)

    # Inside -------------------------------------------------------------------------------------

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        digests = sequence.block_digests
        while len(digests) <= index:
            first = len(digests) * self.block_size
            tokens = sequence.token_ids[first : first + self.block_size]
            digests.append(block_digest(digests[-1] if digests else _ROOT_DIGEST, tokens))
        return digests[index]

    def _take(self) -> int:
        """A block to hand out: a free one, else the least recently used cached one."""
        if len(self.free_blocks):
            return self.free_blocks.pop()
        block_id, _ = self.cached_blocks.popitem(last=False)
        self._forget_content(block_id)
        return block_id

    def _release(self, block_id: int) -> None:
        if self._digest_of[block_id] is not None:
            self.cached_blocks[block_id] = None
            return
        self.free_blocks.push(block_id)
        if self._poison:
            self._to_poison.append(block_id)

    def _forget_content(self, block_id: int) -> None:
        digest = self._digest_of[block_id]
        if digest is not None:
            del self._block_of_digest[digest]
            self._digest_of[block_id] = None
