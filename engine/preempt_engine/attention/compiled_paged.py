"""Paged attention in loops compiled for a CPU: the backend "numba".

A query reads its keys and values where they lie, so nothing is gathered, padded or masked. Its bits
depend on its own history only; `deterministic` needs nothing more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.paged import write_kv
from preempt_engine.attention.protocol import AttentionMetadata, AttentionPlan, LayerKVCache
from preempt_engine.compiled.attention import attention_loop, find_slots
from preempt_engine.compiled.numbers import Array, as_array

# Multiply-adds, some 200 us, for which another thread is worth waking.
_THREAD_WORK = 5_000_000


class CompiledAttention:
    """The backend "numba".

    Args:
        scale: factor of the scores, usually head_dim ** -0.5.
    """

    name = "numba"

    def __init__(self, scale: float) -> None:
        self.scale = np.float32(scale)
        # Weak: memory that a closed runner has given up is not kept alive here.
        self._slots: WeakKeyDictionary[LayerKVCache, Slots] = WeakKeyDictionary()
        self._threads: ThreadPoolExecutor | None = None

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        return CompiledPlan(self, metadata)

    def slots_of(self, cache: LayerKVCache) -> Slots:
        """The arrays of a layer's memory, which is the same in every step."""
        slots = self._slots.get(cache)
        if slots is None:
            arrays = as_array(cache.key_slots), as_array(cache.value_slots)
            slots = self._slots[cache] = Slots(*arrays)
        return slots

    def compile(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Compile the loops for a model, or load what was compiled before: not in the first step.

        Args:
            num_heads: H.
            num_kv_heads: H_kv.
            head_dim: D.
            dtype: of queries and KV cache.
        """
        plan, cache = one_token_step(float(self.scale), num_kv_heads, head_dim, dtype)
        plan.attend(torch.zeros(1, num_heads, head_dim, dtype=dtype), cache, None)

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Threads for long chunks; they end with this object."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), "attention")
        return self._threads


def one_token_step(
    scale: float, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[CompiledPlan, LayerKVCache]:
    """A step of one token, and the memory of one slot that it reads, to compile loops with."""
    shape = (1, 1, num_kv_heads, head_dim)
    cache = LayerKVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    metadata = AttentionMetadata(
        query_start=[0, 1],
        read_lens=[1],
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        block_size=1,
    )
    return CompiledPlan(CompiledAttention(scale), metadata), cache


class Slots(NamedTuple):
    """Of a layer, [num_slots, H_kv, D] each."""

    key: Array
    value: Array


class CompiledPlan:
    """Shapes as in `AttentionPlan`; K is the longest read.

    Args:
        backend: whose plan it is.
        metadata: of the step.

    Attributes:
        slot_mapping: [T], where keys and values go.
    """

    def __init__(self, backend: CompiledAttention, metadata: AttentionMetadata) -> None:
        self.backend = backend
        self.metadata = metadata
        self.slot_mapping = as_array(metadata.slot_mapping)  # [T]
        read_lens = np.array(metadata.read_lens)
        self.sequences = np.repeat(np.arange(len(read_lens)), metadata.query_lens)  # [T]
        self.tokens = np.arange(len(self.sequences))
        starts = read_lens - np.array(metadata.query_start[1:])
        self.ends = self.tokens + starts[self.sequences] + 1  # [T]
        self.slots = np.empty((len(read_lens), read_lens.max()), np.int64)  # [N, K]
        find_slots(as_array(metadata.block_tables), metadata.block_size, self.slots)
        used = (self.slots, self.slot_mapping)
        self.lowest_slot = min(slots.min() for slots in used)
        self.highest_slot = max(slots.max() for slots in used)

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write_kv(self.metadata.slot_mapping, cache, key, value)

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        num_heads = query.shape[1]
        # Rows of padding are to be finite.
        output = torch.zeros(query.shape, dtype=query.dtype)
        heads = as_array(query.contiguous())
        self.attend_slots(heads, num_heads, self.slots_of(cache), window, as_array(output))
        return output

    def attend_slots(
        self, heads: Array, num_heads: int, slots: Slots, window: int | None, output: Array
    ) -> None:
        """As `attend`, in arrays.

        Args:
            heads: [T', H', D], the first H of them queries.
            num_heads: H.
            slots: of the layer, as `slots_of` gives them.
            window: as in `attend`.
            output: [T', H, D], of which T rows are written.
        """
        head_dim = heads.shape[2]
        loop = partial(
            attention_loop(head_dim, num_heads // slots.key.shape[1]),
            heads,
            *slots,
            self.slots,
            self.sequences,
            self.ends,
            self.slots.shape[1] if window is None else window,
            self.backend.scale,
            output,
        )
        num_threads = self._num_threads(num_heads * head_dim)
        if num_threads == 1:
            loop(self.tokens)
        else:
            # Copies: a loop compiled for arrays with gaps may add up in another order.
            parts = [self.tokens[i::num_threads].copy() for i in range(num_threads)]
            list(self.backend.threads.map(loop, parts))

    def slots_of(self, cache: LayerKVCache) -> Slots:
        """The layer's memory, after a check: loops do not look where they read and write.

        Raises:
            IndexError: a block table leads out of the memory.
        """
        slots = self.backend.slots_of(cache)
        num_slots = slots.key.shape[0]
        if self.lowest_slot < 0 or self.highest_slot >= num_slots:
            raise IndexError(
                f"A block table leads to slots {self.lowest_slot} to {self.highest_slot}; "
                f"the memory has {num_slots}."
            )
        return slots

    def _num_threads(self, width: int) -> int:
        if len(self.tokens) * self.slots.shape[1] * width < _THREAD_WORK:  # a bound; soon told
            return 1
        work = int(self.ends.sum()) * width * 2
        return max(1, min(torch.get_num_threads(), work // _THREAD_WORK))
