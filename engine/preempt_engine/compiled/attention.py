"""Attention of single queries through slots, in float32.

A query reads its keys in order of position, and everything about it depends on nothing but its
history: decode, a chunk and a full prefill give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from preempt_engine.compiled.memory import CACHE_LINE, fetch
from preempt_engine.compiled.numbers import Array, compiled, exponential, narrow, widen

_ZERO = np.float32(0)


@compiled
def find_slots(block_tables: Array, block_size: int, slots: Array) -> None:
    """Fill in `slots`, [N, K], from `block_tables`, [N, B] with B * block_size >= K."""
    for sequence in range(slots.shape[0]):
        for position in range(slots.shape[1]):
            block = np.int64(block_tables[sequence, position // block_size])
            slots[sequence, position] = block * block_size + position % block_size


@compiled
def store(
    slot_mapping: Array, heads: Array, first: int, key_slots: Array, value_slots: Array
) -> None:
    """Heads of keys, from `first` on, and of values, behind them -> the slots of T tokens.

    Args:
        slot_mapping: [T].
        heads: [T', H', D].
        first: of H_kv keys.
        key_slots: [num_slots, H_kv, D], changes.
        value_slots: likewise.
    """
    num_kv_heads = key_slots.shape[1]
    for token in range(slot_mapping.shape[0]):
        slot = slot_mapping[token]
        for head in range(num_kv_heads):
            for i in range(heads.shape[2]):
                key_slots[slot, head, i] = heads[token, first + head, i]
                value_slots[slot, head, i] = heads[token, first + num_kv_heads + head, i]


@compiled
def softmax(row: Array) -> None:
    """In place."""
    highest = row[0]
    for i in range(row.shape[0]):
        highest = max(highest, row[i])
    total = _ZERO
    for i in range(row.shape[0]):
        row[i] = exponential(row[i] - highest)
        total += row[i]
    for i in range(row.shape[0]):
        row[i] /= total


@compiled
def _seen(slots: Array, sequences: Array, ends: Array, window: int, token: int) -> Array:
    """The slots that a query sees, in order of position."""
    seen: Array = slots[sequences[token], max(0, ends[token] - window) : ends[token]]
    return seen


@functools.cache
def attention_loop(head_dim: int, num_groups: int) -> Callable[..., None]:
    """Attention for one width of heads, which is a constant of the loops.

    Args:
        head_dim: D.
        num_groups: G, query heads per KV head.

    Returns:
        A function of

        - query: [T', H', D], of which the first H = H_kv * G heads are queries.
        - key_slots, value_slots: [num_slots, H_kv, D].
        - slots: [N, K] of each position.
        - sequences: [T], a query's row of `slots`.
        - ends: [T], a query sees the positions before,
        - window: and of these the last so many.
        - scale: float32 factor of the scores.
        - output: [T', H, D].
        - tokens: the rows of `query` and `output` to compute, in any order and distance.
    """

    @compiled
    def attend(
        query: Array,
        key_slots: Array,
        value_slots: Array,
        slots: Array,
        sequences: Array,
        ends: Array,
        window: int,
        scale: Any,
        output: Array,
        tokens: Array,
    ) -> None:
        wanted = np.empty((num_groups, head_dim), np.float32)
        scores = np.empty((num_groups, slots.shape[1]), np.float32)
        sums = np.empty((num_groups, head_dim), np.float32)
        num_kv_heads = key_slots.shape[1]
        line = CACHE_LINE // key_slots.itemsize
        for m in range(tokens.shape[0]):
            token = tokens[m]
            seen = _seen(slots, sequences, ends, window, token)
            num_seen = seen.shape[0]
            for kv_head in range(num_kv_heads):
                first = kv_head * num_groups
                for g in range(num_groups):
                    for i in range(head_dim):
                        wanted[g, i] = widen(query[token, first + g, i]) * scale
                for p in range(num_seen):
                    key = key_slots[seen[p], kv_head]
                    for i in range(0, head_dim, line):
                        fetch(value_slots, seen[p], kv_head, i)
                    for g in range(num_groups):
                        score = _ZERO
                        for i in range(head_dim):
                            score += wanted[g, i] * widen(key[i])
                        scores[g, p] = score
                for g in range(num_groups):
                    softmax(scores[g, :num_seen])
                sums[:] = _ZERO
                # Meanwhile the keys that come next.
                next_head, next_seen = kv_head + 1, seen
                if next_head == num_kv_heads and m + 1 < tokens.shape[0]:
                    next_seen = _seen(slots, sequences, ends, window, tokens[m + 1])
                next_head %= num_kv_heads
                last = next_seen.shape[0] - 1
                # Four positions at a time: the sums are read and written once for all.
                whole = num_seen - num_seen % 4
                for p in range(0, whole, 4):
                    for ahead in range(p, p + 4):
                        slot = next_seen[min(ahead, last)]
                        for i in range(0, head_dim, line):
                            fetch(key_slots, slot, next_head, i)
                    value_0 = value_slots[seen[p], kv_head]
                    value_1 = value_slots[seen[p + 1], kv_head]
                    value_2 = value_slots[seen[p + 2], kv_head]
                    value_3 = value_slots[seen[p + 3], kv_head]
                    for g in range(num_groups):
                        weight_0, weight_1 = scores[g, p], scores[g, p + 1]
                        weight_2, weight_3 = scores[g, p + 2], scores[g, p + 3]
                        for i in range(head_dim):
                            sums[g, i] += (
                                weight_0 * widen(value_0[i]) + weight_1 * widen(value_1[i])
                            ) + (weight_2 * widen(value_2[i]) + weight_3 * widen(value_3[i]))
                for p in range(whole, num_seen):
                    value = value_slots[seen[p], kv_head]
                    for g in range(num_groups):
                        weight = scores[g, p]
                        for i in range(head_dim):
                            sums[g, i] += weight * widen(value[i])
                for g in range(num_groups):
                    for i in range(head_dim):
                        output[token, first + g, i] = narrow(sums[g, i], output)

    return attend
