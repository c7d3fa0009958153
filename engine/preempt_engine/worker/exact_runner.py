"""The exact KV model behind the same interface as the real model's runner. No torch."""

from __future__ import annotations

from preempt_engine.config import DEFAULT_EXACT_BLOCKS, EngineConfig
from preempt_engine.exact import EOS_TOKEN_ID, ExactCache, ExactLogits
from preempt_engine.observer import EngineObserver
from preempt_engine.step import ScheduledSequence, SchedulerOutput
from preempt_engine.worker.state import WorkerSequence, WorkerState

DEFAULT_MAX_MODEL_LEN = 1 << 20
_SLOT_BYTES = 8


class ExactRunner:
    """Runs steps on an `ExactCache`.

    Args:
        config: of the engine; `num_kv_blocks` defaults to 4,096 here.
        rank: tensor parallel rank; each rank's chains have their own salt.

    Attributes:
        num_kv_blocks: size of the pool.
        num_host_blocks: size of the swap space; a slot counts as 8 bytes.
        vocab_size: of the exact model.
        max_model_len: most tokens of a sequence.
        eos_token_ids: ids that end a sequence.
        rank: tensor parallel rank.
        state: what this rank knows of the sequences.
        observer: is told what was computed; None costs nothing.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.num_kv_blocks = config.num_kv_blocks or DEFAULT_EXACT_BLOCKS
        block_bytes = config.block_size * _SLOT_BYTES
        self.num_host_blocks = config.num_host_blocks(
            block_bytes, default_bytes=self.num_kv_blocks * block_bytes
        )
        self.vocab_size = config.exact_vocab_size
        self.max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        self.observer: EngineObserver | None = None
        self.rank = rank
        self.state = WorkerState(config.block_size)
        self._cache = ExactCache(
            self.num_kv_blocks, config.block_size, salt=rank, num_host_blocks=self.num_host_blocks
        )

    def execute(self, step: SchedulerOutput) -> ExactLogits:
        """Run one step; rows as `LogitsBatch` orders them.

        Blocks are swapped out at the latest moment that the protocol allows, so that a scheduler
        that hands out a source too early is found out.
        """
        self.state.apply(step)
        for key in step.dropped:
            self._cache.drop(key)
        self._cache.fill(step.poison_block_ids)
        self._cache.swap_in(step.swap_in)
        self._cache.copy(step.block_copies)
        self._report_block_operations(step)
        for item, sequence in self.state.rows(step):
            slots = self._slots(item, sequence)
            token_ids = sequence.token_ids[item.start : item.end]
            table = sequence.block_table
            self._cache.write(item.key, item.start, token_ids, slots, table)
            if self.observer is not None:
                self.observer.computed(
                    step.step_id,
                    self.rank,
                    item.key,
                    item.start,
                    token_ids,
                    slots,
                    table,
                    item.end,
                )
        digests: list[int] = []
        for item, sequence in self.state.rows(step):
            digests += self._cache.read(item.key, item.end, sequence.block_table, item.logits_start)
        self._cache.swap_out(step.swap_out)
        if step.swap_out and self.observer is not None:
            self.observer.worker_swapped_out(step.step_id, self.rank, step.swap_out)
        return ExactLogits(digests, self.vocab_size)

    def reset(self) -> None:
        """Forget every sequence and slot: nothing of a trial reaches the next."""
        self.state.sequences.clear()
        self._cache.clear()

    def close(self) -> None:
        """Release the cache."""
        self.reset()
        self._cache.slots = []
        self._cache.host_blocks = []

    def _slots(self, item: ScheduledSequence, sequence: WorkerSequence) -> list[int]:
        size = self.state.block_size
        table = sequence.block_table
        return [table[p // size] * size + p % size for p in range(item.start, item.end)]

    def _report_block_operations(self, step: SchedulerOutput) -> None:
        if self.observer is None:
            return
        if step.poison_block_ids:
            self.observer.blocks_poisoned(step.step_id, self.rank, step.poison_block_ids)
        if step.swap_in:
            self.observer.worker_swapped_in(step.step_id, self.rank, step.swap_in)
        if step.block_copies:
            self.observer.worker_copied(step.step_id, self.rank, step.block_copies)
