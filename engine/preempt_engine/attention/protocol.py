"""What a model and the model runner need of an attention backend.

A backend turns the metadata of a step into a plan, once; every layer then uses the plan. Decode,
chunked prefill and full prefill are one case: a sequence brings the queries of positions
[start, read_len) and reads the keys of [0, read_len) through its block table.

    flattened tokens of a step    | s0 s0 s0 s0 | s1 | s2 s2 | padding ...
    query_start                   0             4    5       7
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from torch import Tensor


class LayerKVCache:
    """The KV memory of one layer, as blocks and as slots of the same memory.

    Args:
        key_blocks: [num_blocks, block_size, H_kv, D].
        value_blocks: [num_blocks, block_size, H_kv, D].

    Attributes:
        key_slots: [num_blocks * block_size, H_kv, D], slot = block_id * block_size + offset.
        value_slots: likewise.
    """

    __slots__ = ("__weakref__", "key_blocks", "key_slots", "value_blocks", "value_slots")

    def __init__(self, key_blocks: Tensor, value_blocks: Tensor) -> None:
        self.key_blocks = key_blocks
        self.value_blocks = value_blocks
        self.key_slots = key_blocks.flatten(0, 1)
        self.value_slots = value_blocks.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step are written and what they read.

    Attributes:
        query_start: [N + 1], on the host; sequence i owns tokens [query_start[i],
            query_start[i + 1]), which are its last positions before read_lens[i].
        read_lens: [N], on the host; sequence i reads positions [0, read_lens[i]).
        slot_mapping: int64 [T] on the device; the slot each token's key and value go to.
        block_tables: int32 [N, B] on the device; rows are padded with block 0 beyond
            ceil(read_len / block_size).
        block_size: tokens per block.
    """

    query_start: list[int]
    read_lens: list[int]
    slot_mapping: Tensor
    block_tables: Tensor
    block_size: int

    @property
    def num_sequences(self) -> int:
        return len(self.read_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_start[-1]

    @property
    def query_lens(self) -> list[int]:
        """[N] tokens that each sequence computes."""
        return [end - start for start, end in pairwise(self.query_start)]


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Where a captured step of N sequences, one query each, finds its numbers; always the same
    memory, filled anew before each run.

    Attributes:
        slot_mapping: int64 [N].
        block_tables: int32 [N, B], B blocks for the longest sequence there may be.
        read_lens: int32 [N], at least 1.
        block_size: tokens per block.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    read_lens: Tensor
    block_size: int


class AttentionPlan(Protocol):
    """One step's work, the same for every layer."""

    def write_kv(self, cache: LayerKVCache, key: Tensor, value: Tensor) -> None:
        """Store keys and values of the step's tokens.

        Args:
            cache: of the layer.
            key: [T', H_kv, D] with T' >= T; rows from T on are padding and are not stored.
            value: likewise.
        """
        ...

    def attend(self, query: Tensor, cache: LayerKVCache, window: int | None) -> Tensor:
        """Causal attention through the block tables, after `write_kv` of the same layer.

        Args:
            query: [T', H, D], H a multiple of H_kv; head h reads KV head h // (H / H_kv).
            cache: of the layer.
            window: a query at p sees positions (p - window, p]; None sees [0, p].

        Returns:
            [T', H, D]; padding rows are finite.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention.

    Attributes:
        name: as in `EngineConfig.attention_backend`.
    """

    name: str

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Prepare indices and masks of one step."""
        ...


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in a CUDA graph."""

    def plan_decode(self, buffers: DecodeBuffers) -> AttentionPlan:
        """A plan that reads everything from the buffers whenever it is run.

        Its launches depend on the buffers' shapes only, never on what they hold.
        """
        ...
