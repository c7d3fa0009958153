"""The exact KV model: incremental reads equal full reads, and one wrong slot changes the output."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preempt_engine.exact import (
    TOP_GAP,
    ExactCache,
    ExactLogits,
    ReferenceSequence,
    logits_of,
    reference_generate,
)

BLOCK = 4
TOKENS = [7, 3, 3, 60, 21, 5, 9, 9, 40, 2]


def slots(table: list[int], start: int, end: int, block_size: int = BLOCK) -> list[int]:
    return [table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def computed(table: list[int], chunks: list[int]) -> tuple[ExactCache, int]:
    """A cache into which TOKENS were written in chunks, and the last digest."""
    cache = ExactCache(8, BLOCK)
    start, digest = 0, 0
    for size in chunks:
        end = start + size
        cache.write("a", start, TOKENS[start:end], slots(table, start, end), table)
        digest = cache.read("a", end, table, end - 1)[-1]
        start = end
    return cache, digest


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [3, 3, 4], [4, 4, 2], [9, 1]])
@pytest.mark.parametrize("table", [[0, 1, 2], [7, 0, 3]])
def test_digest_depends_on_the_tokens_only(table: list[int], chunks: list[int]) -> None:
    _, digest = computed(table, chunks)
    assert digest == ReferenceSequence(TOKENS).digest


@pytest.mark.parametrize("slot", range(10))
def test_every_slot_that_is_read_matters(slot: int) -> None:
    table = [2, 5, 0]
    cache, digest = computed(table, [10])
    physical = slots(table, slot, slot + 1)[0]
    cache.fill([physical // BLOCK])
    assert cache.read("a", 10, table, 9) != [digest]


def test_exchanging_two_blocks_of_a_table_changes_the_digest() -> None:
    cache, digest = computed([2, 5, 0], [10])
    assert cache.read("b", 10, [5, 2, 0], 9) != [digest]


def test_another_reader_with_the_same_table_reads_the_same() -> None:
    cache, digest = computed([2, 5, 0], [10])
    assert cache.read("b", 10, [2, 5, 0], 9) == [digest]


def test_a_write_by_another_sequence_is_seen_by_the_reader() -> None:
    table = [2, 5, 0]
    cache, digest = computed(table, [10])
    cache.write("intruder", 0, [1], [5 * BLOCK + 1], [5])
    assert cache.read("a", 10, table, 9) != [digest]


def test_copied_blocks_read_like_their_sources() -> None:
    cache, digest = computed([2, 5, 0], [10])
    cache.copy([(2, 1), (5, 3), (0, 2)])
    assert cache.read("b", 10, [1, 3, 2], 9) == [digest]


def test_copies_that_exchange_blocks_read_all_sources_first() -> None:
    cache, digest = computed([2, 5, 0], [10])
    cache.copy([(2, 5), (5, 2)])
    assert cache.read("b", 10, [5, 2, 0], 9) == [digest]


@given(data=st.data())
def test_incremental_reads_equal_reading_everything(data: st.DataObject) -> None:
    """Random writes, fills and copies under two readers: a fresh reader always agrees."""
    cache = ExactCache(6, BLOCK)
    tables = {"a": [0, 1, 2], "b": [0, 3, 4]}
    lengths = {"a": 0, "b": 0}
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(["a", "b"]))
        action = data.draw(st.sampled_from(["append", "stray", "fill", "copy"]))
        if action == "append" and lengths[name] < 12:
            start = lengths[name]
            end = data.draw(st.integers(start + 1, 12))
            cache.write(
                name, start, range(start, end), slots(tables[name], start, end), tables[name]
            )
            lengths[name] = end
        elif action == "stray":
            cache.write(name, 0, [3], [data.draw(st.integers(0, 23))], tables[name])
        elif action == "fill":
            cache.fill([data.draw(st.integers(0, 5))])
        elif action == "copy":
            cache.copy([(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5)))])
        for reader, length in lengths.items():
            if length:
                known = cache.read(reader, length, tables[reader], 0)
                assert known == cache.read(object(), length, tables[reader], 0)
                incremental = cache.read(reader, length, tables[reader], length)
                assert incremental == []


def test_blocks_outside_the_pool_are_refused() -> None:
    cache = ExactCache(2, BLOCK)
    with pytest.raises(IndexError, match="block 2 is not in the pool of 2"):
        cache.write("a", 0, [1], [2 * BLOCK], [2])
    with pytest.raises(IndexError, match="block -1"):
        cache.read("a", 1, [-1], 0)


@given(st.integers(0, 2**64 - 1), st.integers(32, 256))
def test_the_top_token_leads_by_the_gap(digest: int, vocab_size: int) -> None:
    logits = sorted(logits_of(digest, vocab_size))
    assert len(logits) == vocab_size
    assert logits[-1] - logits[-2] >= TOP_GAP
    assert ExactLogits([digest], vocab_size).argmax([0]) == [
        logits_of(digest, vocab_size).index(logits[-1])
    ]


def test_reference_output_does_not_loop() -> None:
    output = reference_generate([5, 6, 7], 200, 64)
    assert len(set(pairwise(output))) > 180


def test_reference_output_is_pinned() -> None:
    """A change of the arithmetic makes old replay strings mean something else."""
    pinned = [30, 4, 32, 60, 37, 44, 15, 20]
    assert reference_generate([1, 2, 3], 8, 64) == pinned
    assert reference_generate([1, 2, 3], 8, 64, salt=1) != pinned


def test_importing_the_exact_model_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.path[:] = sys.argv[1:]; import preempt_engine.exact, "
        "preempt_engine.worker.exact_runner, preempt_engine.llm;"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, *sys.path], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"
