"""The protocol by which a harness watches the engine. Owned by the engine; the harness adapts.

Two views of each step are reported and never derived from each other: the scheduler's (what it
decided) and the worker's (`computed`: what was really handed to the attention backend). The engine
calls nothing and builds nothing when no observer is set. Observers must not change what they are
given; lists are the caller's own and may be reused unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from preempt_engine.step import SequenceKey


class EngineObserver:
    """Receives everything that happens in the engine. The base class ignores all of it."""

    # Scheduler's view ---------------------------------------------------------------------------

    def arrived(
        self,
        step_id: int,
        request_id: str,
        prompt_token_ids: Seq[int],
        max_tokens: int,
        priority: int,
    ) -> None:
        """A request entered the waiting queue; `step_id` is the next step's."""

    def priority_changed(self, step_id: int, request_id: str, priority: int) -> None:
        """An unfinished request was given another priority, before step `step_id`."""

    def scheduled(self, step_id: int, key: SequenceKey, start: int, end: int) -> None:
        """The step computes positions [start, end) of the sequence."""

    def blocks_allocated(
        self, step_id: int, key: SequenceKey, block_ids: Seq[int], num_cached: int
    ) -> None:
        """Blocks were appended to the sequence's table; the first `num_cached` are prefix hits."""

    def blocks_freed(self, step_id: int, key: SequenceKey, block_ids: Seq[int]) -> None:
        """The sequence gave up its references to these blocks."""

    def blocks_copied(self, step_id: int, pairs: Seq[tuple[int, int]]) -> None:
        """Whole blocks are copied, (source, destination), before the step computes."""

    def forked(self, step_id: int, parent: SequenceKey, child: SequenceKey) -> None:
        """A branch was split off after the step; it shares all blocks of its parent."""

    def tokens_chosen(self, step_id: int, key: SequenceKey, token_ids: Seq[int]) -> None:
        """A beam goes on with these tokens; the user gets none before the search has ended."""

    def swapped_out(self, step_id: int, request_id: str, pairs: Seq[tuple[int, int]]) -> None:
        """The step copies the request's blocks to the host, (device block, host block)."""

    def swapped_in(self, step_id: int, request_id: str, pairs: Seq[tuple[int, int]]) -> None:
        """The step copies the request's blocks back, (host block, device block)."""

    def preempted(
        self,
        step_id: int,
        request_id: str,
        *,
        mode: str,
        phase: str,
        reason: str,
        num_computed_tokens: int,
        num_tokens: int,
    ) -> None:
        """The request lost its blocks.

        Args:
            mode: "recompute" or "swap", as it was done.
            phase: what its first branch was doing.
            reason: "out_of_blocks", "priority" (for a more urgent request) or "forced" (from
                outside).
            num_computed_tokens, num_tokens: sums over its branches; a token of a shared block
                counts once for each.
        """

    def resumed(self, step_id: int, request_id: str, num_cached_tokens: int) -> None:
        """A preempted request was admitted again, `num_cached_tokens` of it from the cache."""

    def finished(self, step_id: int, request_id: str, reason: str) -> None:
        """The request ended by itself: "stop", "length" or "error", of its last branch."""

    def aborted(self, step_id: int, request_id: str) -> None:
        """The request was aborted from outside."""

    def step_updated(self, step_id: int, view: PoolView) -> None:
        """The step's results were applied; the pool and the queues may be looked at now."""

    # Worker's view ------------------------------------------------------------------------------

    def step_sent(self, step_id: int, rank: int, num_bytes: int) -> None:
        """The step's message left for a worker."""

    def step_launched(self, step_id: int) -> None:
        """The executor began the step."""

    def computed(
        self,
        step_id: int,
        rank: int,
        key: SequenceKey,
        start: int,
        token_ids: Seq[int],
        written_slots: Seq[int],
        block_table: Seq[int],
        read_len: int,
    ) -> None:
        """What the attention backend was given for one sequence.

        Args:
            start: position of the first of `token_ids`.
            token_ids: model input.
            written_slots: slot of each token, `block_id * block_size + offset`.
            block_table: the table the reads go through.
            read_len: positions [0, read_len) are read, the written ones included.
        """

    def blocks_poisoned(self, step_id: int, rank: int, block_ids: Seq[int]) -> None:
        """A worker overwrote freed blocks with the poison pattern."""

    def worker_copied(self, step_id: int, rank: int, pairs: Seq[tuple[int, int]]) -> None:
        """A worker copied whole blocks."""

    def worker_swapped_out(self, step_id: int, rank: int, pairs: Seq[tuple[int, int]]) -> None:
        """A worker copied blocks to the host, (device block, host block)."""

    def worker_swapped_in(self, step_id: int, rank: int, pairs: Seq[tuple[int, int]]) -> None:
        """A worker copied blocks from the host, (host block, device block)."""

    def step_done(self, step_id: int) -> None:
        """The executor finished the step."""

    # Delivery -----------------------------------------------------------------------------------

    def tokens_delivered(
        self,
        step_id: int,
        key: SequenceKey,
        token_ids: Seq[int],
        logprobs: Seq[dict[int, float]] | None,
        text: str,
    ) -> None:
        """Tokens were appended to the request's output; `text` is the new text, may be empty.

        The branch in `key` is the index of the output. The results of a beam search come whole,
        at its end.
        """


class PoolView(Protocol):
    """Lets an observer pull the pool's raw state, which is built only when asked for."""

    def pool_counts(self) -> PoolCounts: ...

    def pool_state(self) -> PoolState: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolCounts:
    """Sizes of the pool's parts, each counted where it is kept."""

    num_blocks: int
    free: int
    cached: int
    held: int
    fenced: int
    used: int


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolState:
    """Raw block pool state, copied, for an outside accountant.

    Attributes:
        num_blocks: size of the pool.
        free: ids of blocks that hold nothing of use.
        cached: ids of unreferenced blocks that the prefix cache can still find.
        held: ids withheld by `hold_blocks`.
        fenced: ids freed while a step that may touch them is in flight.
        ref_counts: references of every block, [num_blocks].
        tables: sequence -> block table, for every sequence that owns blocks.
        waiting: request ids, in queue order.
        running: request ids, in order of precedence.
        counters: the engine's own totals by name.
        num_host_blocks: size of the swap space.
        host_free: ids of host blocks that can be taken.
        host_fenced: ids of host blocks released while a step that may touch them is in flight.
        host_blocks: request id -> host blocks that hold its content, for swapped requests.
    """

    num_blocks: int
    free: list[int]
    cached: list[int]
    held: list[int]
    fenced: list[int]
    ref_counts: list[int]
    tables: dict[SequenceKey, list[int]]
    waiting: list[str]
    running: list[str]
    counters: dict[str, int]
    num_host_blocks: int
    host_free: list[int]
    host_fenced: list[int]
    host_blocks: dict[str, list[int]]
