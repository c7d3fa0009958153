"""Forks share blocks, and copy the one they write to; a trivial block manager is the reference."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from trivial_block_manager import TrivialBlockManager

from preempt_engine.block_manager import BlockManager, num_private_copies
from preempt_engine.sequence import Sequence
from preempt_engine.step import SequenceKey

BLOCK = 4


def computed(blocks: BlockManager, num_tokens: int) -> Sequence:
    """A sequence whose tokens are all computed."""
    sequence = Sequence(SequenceKey("r"), list(range(num_tokens)), num_prompt_tokens=num_tokens)
    blocks.grow(sequence, num_tokens)
    sequence.set_computed(num_tokens)
    return sequence


def fork(blocks: BlockManager, parent: Sequence, branch: int) -> Sequence:
    child = parent.fork(SequenceKey("r", branch))
    blocks.fork(parent, child)
    return child


def test_a_fork_takes_no_block() -> None:
    blocks = BlockManager(4, BLOCK)
    parent = computed(blocks, 6)
    child = fork(blocks, parent, 1)
    assert child.block_table == parent.block_table
    assert child.block_table is not parent.block_table
    assert blocks.num_used_blocks == 2
    blocks.check_integrity([parent, child])


def test_the_last_who_shares_a_block_keeps_it() -> None:
    blocks = BlockManager(8, BLOCK)
    parent = computed(blocks, 6)
    branches = [parent, fork(blocks, parent, 1), fork(blocks, parent, 2)]
    shared = parent.block_table[1]
    for sequence in branches:
        sequence.append_token(9)
    assert blocks.num_to_write([(sequence, 7) for sequence in branches]) == 2
    copies = [blocks.copy_on_write(sequence) for sequence in branches]
    assert [copy and copy[0] for copy in copies] == [shared, shared, None]
    assert branches[2].block_table[1] == shared
    assert len({sequence.block_table[1] for sequence in branches}) == 3
    assert len({sequence.block_table[0] for sequence in branches}) == 1
    blocks.check_integrity(branches)


def test_nothing_is_copied_at_a_block_boundary() -> None:
    blocks = BlockManager(8, BLOCK)
    parent = computed(blocks, 2 * BLOCK)
    child = fork(blocks, parent, 1)
    for sequence in (parent, child):
        sequence.append_token(9)
        assert blocks.num_to_write([(sequence, 2 * BLOCK + 1)]) == 1
        assert blocks.copy_on_write(sequence) is None
        blocks.grow(sequence, 2 * BLOCK + 1)
    assert parent.block_table[:2] == child.block_table[:2]
    assert parent.block_table[2] != child.block_table[2]


def test_workers_are_told_of_the_copy_only() -> None:
    blocks = BlockManager(8, BLOCK)
    parent = computed(blocks, 6)
    parent.num_sent_blocks = 2
    child = fork(blocks, parent, 1)
    child.append_token(9)
    blocks.copy_on_write(child)
    assert (child.num_sent_blocks, child.num_stale_blocks) == (1, 1)
    assert (parent.num_sent_blocks, parent.num_stale_blocks) == (2, 0)


@pytest.mark.parametrize(
    ("written", "references", "copies"),
    [
        ([], {}, 0),
        ([5], {5: 2}, 1),
        ([5, 5], {5: 2}, 1),
        ([5, 5], {5: 3}, 2),
        ([5, 6], {5: 2, 6: 1}, 1),
    ],
)
def test_copies_are_one_less_than_writers_when_all_write(
    written: list[int], references: dict[int, int], copies: int
) -> None:
    assert num_private_copies(written, references) == copies


class AgainstTrivial(RuleBasedStateMachine):
    """Sequences grow, fork, find prefixes and leave; both managers must read the same history.

    Memory is a list of slots; a slot holds the tokens that led to it.
    """

    @initialize(caching=st.booleans(), order=st.sampled_from(["fifo", "lifo", "random"]))
    def build(self, caching: bool, order: str) -> None:
        self.blocks = BlockManager(
            24,
            BLOCK,
            enable_prefix_caching=caching,
            reuse_order=order,  # type: ignore[arg-type]
        )
        self.memory: list[tuple[int, ...]] = [()] * (24 * BLOCK)
        self.trivial = TrivialBlockManager(400, BLOCK)
        self.trivial_memory: list[tuple[int, ...]] = [()] * (400 * BLOCK)
        self.sequences: dict[int, Sequence] = {}
        self.next_key = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK))
    def admit(self, tokens: list[int]) -> None:
        sequence = Sequence(SequenceKey("r", self.next_key), tokens, num_prompt_tokens=len(tokens))
        hits = self.blocks.find_prefix(sequence, max_tokens=len(tokens) - 1)
        revived = sum(block in self.blocks.cached_blocks for block in hits)
        needed = self.blocks.blocks_for(len(tokens)) - len(hits) + revived
        if needed > self.blocks.num_available_blocks or len(self.sequences) == 6:
            return
        self.blocks.share(sequence, hits)
        sequence.set_computed(len(hits) * BLOCK)
        self.sequences[self.next_key] = sequence
        self.compute(self.next_key)
        self.next_key += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences[key]
        num_tokens = sequence.num_tokens + len(tokens)
        if self.blocks.num_to_write([(sequence, num_tokens)]) > self.blocks.num_available_blocks:
            return
        sequence.token_ids += tokens
        self.compute(key)

    @precondition(lambda self: 0 < len(self.sequences) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        used = self.blocks.num_used_blocks
        child = fork(self.blocks, self.sequences[key], self.next_key)
        assert self.blocks.num_used_blocks == used
        self.sequences[self.next_key] = child
        for pair in self.trivial.fork(key, self.next_key):
            self.copy(self.trivial_memory, pair)
        self.next_key += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        self.blocks.free(self.sequences.pop(key))
        self.trivial.free(key)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.blocks.reset_prefix_cache()

    def compute(self, key: int) -> None:
        """Write all tokens that are not computed, in both memories."""
        sequence = self.sequences[key]
        tokens = sequence.token_ids
        needed = self.blocks.num_to_write([(sequence, len(tokens))])
        available = self.blocks.num_available_blocks
        copy = self.blocks.copy_on_write(sequence)
        if copy is not None:
            self.copy(self.memory, copy)
        self.blocks.grow(sequence, len(tokens))
        assert available - self.blocks.num_available_blocks == needed
        self.trivial.grow(key, len(tokens))
        for position in range(sequence.num_computed_tokens, len(tokens)):
            self.memory[slot(sequence.block_table, position)] = tuple(tokens[: position + 1])
        for position in range(len(tokens)):
            place = slot(self.trivial.tables[key], position)
            self.trivial_memory[place] = tuple(tokens[: position + 1])
        sequence.set_computed(len(tokens))
        self.blocks.make_findable(sequence)

    @staticmethod
    def copy(memory: list[tuple[int, ...]], pair: tuple[int, int]) -> None:
        source, target = (block * BLOCK for block in pair)
        memory[target : target + BLOCK] = memory[source : source + BLOCK]

    @invariant()
    def both_read_the_same(self) -> None:
        for key, sequence in getattr(self, "sequences", {}).items():
            for position in range(sequence.num_tokens):
                ours = self.memory[slot(sequence.block_table, position)]
                assert ours == self.trivial_memory[slot(self.trivial.tables[key], position)]

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.sequences.values())
            used = sum(len(table) for table in self.trivial.tables.values())
            assert self.blocks.num_used_blocks <= used


def slot(table: list[int], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK


AgainstTrivial.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_tables_read_what_a_trivial_manager_reads = AgainstTrivial.TestCase
