"""Blocks, references and the prefix cache, without a scheduler."""

from __future__ import annotations

import pytest

from preempt_engine.admission import Placement, num_blocks_to_admit
from preempt_engine.block_manager import BlockManager, block_digest
from preempt_engine.sequence import Sequence
from preempt_engine.step import SequenceKey

BLOCK = 4


def sequence(name: str, tokens: list[int]) -> Sequence:
    return Sequence(SequenceKey(name), list(tokens), num_prompt_tokens=len(tokens))


def compute(blocks: BlockManager, seq: Sequence) -> Sequence:
    """Admit a sequence and pretend that a step computed all of it."""
    blocks.grow(seq, seq.num_tokens)
    seq.set_computed(seq.num_tokens)
    blocks.make_findable(seq)
    return seq


def hits(blocks: BlockManager, tokens: list[int]) -> list[int]:
    return blocks.find_prefix(sequence("probe", tokens), max_tokens=len(tokens) - 1)


PROMPT = list(range(10, 20))  # two full blocks and a half


def test_a_table_grows_to_hold_the_tokens_and_not_more() -> None:
    blocks = BlockManager(8, BLOCK)
    seq = sequence("a", PROMPT)
    assert blocks.grow(seq, 4) == [0]
    assert blocks.grow(seq, 4) == []
    assert blocks.grow(seq, 5) == [1]
    assert blocks.grow(seq, 10) == [2]
    blocks.check_integrity([seq])


def test_a_block_is_findable_only_after_it_was_computed() -> None:
    blocks = BlockManager(8, BLOCK)
    seq = sequence("a", PROMPT)
    blocks.grow(seq, 10)
    assert hits(blocks, PROMPT) == []
    seq.set_computed(7)
    blocks.make_findable(seq)
    assert hits(blocks, PROMPT) == seq.block_table[:1]
    seq.set_computed(8)
    blocks.make_findable(seq)
    assert hits(blocks, PROMPT) == seq.block_table[:2]


def test_a_hit_never_covers_the_whole_prompt() -> None:
    blocks = BlockManager(8, BLOCK)
    seq = compute(blocks, sequence("a", PROMPT[:8]))
    assert hits(blocks, PROMPT[:8]) == seq.block_table[:1]
    assert hits(blocks, PROMPT[:9]) == seq.block_table[:2]


def test_equal_blocks_under_different_parents_are_different() -> None:
    """A digest without the parent takes the end of one prompt for the end of another."""
    blocks = BlockManager(8, BLOCK)
    compute(blocks, sequence("a", [1, 1, 1, 1, 5, 6, 7, 8, 9]))
    assert hits(blocks, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == []
    assert block_digest(bytes(16), [5, 6, 7, 8]) != block_digest(b"x" * 16, [5, 6, 7, 8])


def test_a_digest_has_128_bits() -> None:
    assert len(block_digest(bytes(16), PROMPT[:4])) * 8 == 128


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
def test_drafts_are_not_findable_and_leave_no_trace(num_drafts: int, num_right: int) -> None:
    """A block that drafts have filled is offered when its tokens are known, and as they are."""
    blocks = BlockManager(8, BLOCK)
    tokens = [*PROMPT[:7], *range(70, 75)]
    seq = sequence("a", tokens[:7])
    blocks.grow(seq, 12)
    seq.draft_token_ids = [tokens[7 + n] if n < num_right else 99 for n in range(num_drafts)]
    seq.set_computed(7 + num_drafts)
    blocks.make_findable(seq)
    assert hits(blocks, tokens) == seq.block_table[:1]
    for token in tokens[7:]:
        if seq.draft_token_ids:
            seq.verify_draft(token)
        else:
            seq.set_computed(seq.num_tokens)
            seq.append_token(token)
        blocks.make_findable(seq)
        known = min(seq.num_computed_tokens, seq.num_tokens)
        assert hits(blocks, [*tokens, 0]) == seq.block_table[: known // BLOCK]


def test_freed_blocks_stay_findable_until_they_are_reused() -> None:
    blocks = BlockManager(3, BLOCK)
    seq = compute(blocks, sequence("a", PROMPT))
    table = list(seq.block_table)
    blocks.free(seq)
    blocks.check_integrity([])
    assert hits(blocks, PROMPT) == table[:2]
    other = sequence("b", list(range(50, 58)))
    blocks.grow(other, 8)  # takes the free block, then the cached end of the prefix
    assert hits(blocks, PROMPT) == table[:1]
    assert other.block_table == [table[2], table[1]]
    blocks.check_integrity([other])


def test_a_reused_block_is_not_found_by_its_old_content() -> None:
    blocks = BlockManager(1, BLOCK)
    blocks.free(compute(blocks, sequence("a", PROMPT[:4])))
    second = compute(blocks, sequence("b", [90, 91, 92, 93]))
    assert hits(blocks, PROMPT[:5]) == []
    assert hits(blocks, [90, 91, 92, 93, 94]) == second.block_table


def test_sharing_counts_references() -> None:
    blocks = BlockManager(8, BLOCK)
    first = compute(blocks, sequence("a", PROMPT))
    second = sequence("b", PROMPT)
    blocks.share(second, hits(blocks, PROMPT))
    assert [blocks.ref_counts[block] for block in second.block_table] == [2, 2]
    blocks.free(first)
    assert blocks.num_used_blocks == 2
    blocks.check_integrity([second])
    blocks.free(second)
    blocks.check_integrity([])


def test_two_sequences_with_the_same_content_keep_one_findable() -> None:
    blocks = BlockManager(8, BLOCK)
    first = compute(blocks, sequence("a", PROMPT))
    second = compute(blocks, sequence("b", PROMPT))
    assert hits(blocks, PROMPT) == first.block_table[:2]
    blocks.free(second)
    assert hits(blocks, PROMPT) == first.block_table[:2]
    blocks.check_integrity([first])


def test_admission_counts_a_cached_hit_as_taken() -> None:
    """A cached block is free for others until it is shared: counting it twice lets too many in."""
    blocks = BlockManager(3, BLOCK)
    blocks.free(compute(blocks, sequence("a", PROMPT[:8])))
    found = hits(blocks, PROMPT)
    assert len(found) == 2
    assert num_blocks_to_admit([Placement(sequence("b", PROMPT), found)], blocks) == 3
    longer = Placement(sequence("b", [*PROMPT, 20, 21, 22]), found)
    assert num_blocks_to_admit([longer], blocks) == 4


@pytest.mark.parametrize(("num_blocks", "at_risk"), [(2, []), (3, [1, 2]), (4, [0, 1, 2])])
def test_a_hit_that_is_evicted_cuts_off_those_behind_it(
    num_blocks: int, at_risk: list[int]
) -> None:
    """Two blocks hold nothing, two are cached, the last one first; the third is in use."""
    blocks = BlockManager(5, BLOCK)
    first = compute(blocks, sequence("a", PROMPT))
    blocks.share(sequence("b", PROMPT), first.block_table[2:])
    prefix = list(first.block_table)
    blocks.free(first)
    assert list(blocks.cached_blocks) == [prefix[1], prefix[0]]
    assert blocks.hits_at_risk([prefix], num_blocks) == {prefix[index] for index in at_risk}
    assert blocks.hits_at_risk([prefix, prefix[:1]], num_blocks) == {prefix[i] for i in at_risk}
    assert blocks.hits_at_risk([], num_blocks) == set()


def test_fenced_blocks_wait_for_their_step() -> None:
    blocks = BlockManager(2, BLOCK, enable_prefix_caching=False)
    seq = sequence("a", PROMPT[:8])
    blocks.grow(seq, 8)
    blocks.free(seq, step_in_flight=5)
    assert blocks.num_available_blocks == 0
    blocks.check_integrity([])
    blocks.pass_fence(4)
    assert blocks.num_available_blocks == 0
    blocks.pass_fence(5)
    assert blocks.num_available_blocks == 2
    blocks.check_integrity([])


def test_a_fence_that_was_passed_unseen_holds_nothing_back() -> None:
    """Of two steps under way the first may end without a word: nothing of it was wanted."""
    blocks = BlockManager(6, BLOCK, enable_prefix_caching=False)
    for step in (1000, 1001, 1002):
        seq = sequence("a", PROMPT[:8])
        blocks.grow(seq, 8)
        blocks.free(seq, step_in_flight=step)
    blocks.pass_fence(1001)
    assert blocks.num_available_blocks == 4
    assert set(blocks.fenced_blocks.values()) == {1002}
    blocks.check_integrity([])


def test_a_fenced_block_can_be_shared_but_not_reused() -> None:
    blocks = BlockManager(2, BLOCK)
    seq = compute(blocks, sequence("a", PROMPT[:8]))
    table = list(seq.block_table)
    blocks.free(seq, step_in_flight=1)
    sharer = sequence("b", PROMPT[:8])
    blocks.share(sharer, blocks.find_prefix(sharer, max_tokens=7))
    assert sharer.block_table == table[:1]
    blocks.pass_fence(1)
    blocks.check_integrity([sharer])


@pytest.mark.parametrize("size", [4, 1000])
def test_held_blocks_are_nobodys(size: int) -> None:
    blocks = BlockManager(size, BLOCK)
    assert blocks.hold_blocks(size - 1) == size - 1
    assert blocks.num_available_blocks == 1
    blocks.check_integrity([])
    assert blocks.hold_blocks(2 * size) == size
    assert blocks.hold_blocks(size - 2) == size - 2
    assert blocks.num_available_blocks == 2
    assert blocks.hold_blocks(0) == 0
    assert blocks.num_available_blocks == size
    blocks.check_integrity([])


@pytest.mark.parametrize(("order", "expected"), [("fifo", [2, 3, 0, 1]), ("lifo", [1, 0, 2, 3])])
def test_reuse_order(order: str, expected: list[int]) -> None:
    blocks = BlockManager(4, BLOCK, enable_prefix_caching=False, reuse_order=order)  # type: ignore[arg-type]
    first, second = sequence("a", PROMPT[:4]), sequence("b", PROMPT[:4])
    blocks.grow(first, 4)
    blocks.grow(second, 4)
    blocks.free(first)
    blocks.free(second)
    third = sequence("c", list(range(16)))
    assert blocks.grow(third, 16) == expected


def test_random_reuse_repeats_for_a_seed() -> None:
    def taken(seed: int) -> list[int]:
        blocks = BlockManager(32, BLOCK, reuse_order="random", seed=seed)
        seq = sequence("a", list(range(128)))
        return blocks.grow(seq, 128)

    assert taken(1) == taken(1)
    assert taken(1) != taken(2)
    assert sorted(taken(1)) == list(range(32))


def test_poison_lists_only_blocks_that_are_still_free() -> None:
    blocks = BlockManager(4, BLOCK, enable_prefix_caching=False, reuse_order="lifo", poison=True)
    seq = sequence("a", PROMPT[:8])
    blocks.grow(seq, 8)
    blocks.free(seq)
    other = sequence("b", PROMPT[:4])
    [reused] = blocks.grow(other, 4)
    assert blocks.take_blocks_to_poison() == [1 - reused]
    assert blocks.take_blocks_to_poison() == []


def test_integrity_notices_a_lost_and_a_doubled_block() -> None:
    blocks = BlockManager(4, BLOCK)
    seq = sequence("a", PROMPT)
    blocks.grow(seq, 10)
    blocks.check_integrity([seq])
    with pytest.raises(AssertionError):
        blocks.check_integrity([])
    lost = blocks.free_blocks.pop()
    with pytest.raises(AssertionError, match="is not each of 4 blocks once"):
        blocks.check_integrity([seq])
    blocks.free_blocks.push(lost)
    blocks.free_blocks.push(seq.block_table[0])
    with pytest.raises(AssertionError, match="is not each of 4 blocks once"):
        blocks.check_integrity([seq])


@pytest.mark.parametrize("digest", [bytes(16), b"\xff" * 16, None])
def test_integrity_notices_an_entry_that_finds_other_content(digest: bytes | None) -> None:
    blocks = BlockManager(4, BLOCK)
    seq = compute(blocks, sequence("a", PROMPT))
    blocks._digest_of[seq.block_table[0]] = digest
    with pytest.raises(AssertionError, match="is found by a stale entry"):
        blocks.check_integrity([seq])


def test_integrity_notices_content_of_a_free_block() -> None:
    blocks = BlockManager(4, BLOCK)
    blocks._digest_of[3] = bytes(16)
    with pytest.raises(AssertionError):
        blocks.check_integrity([])


def test_forgetting_all_content_frees_what_nobody_uses() -> None:
    blocks = BlockManager(4, BLOCK)
    user = compute(blocks, sequence("a", PROMPT))
    blocks.free(compute(blocks, sequence("b", [90, 91, 92, 93])))
    blocks.reset_prefix_cache()
    assert hits(blocks, PROMPT) == []
    assert not blocks.cached_blocks
    blocks.check_integrity([user])
