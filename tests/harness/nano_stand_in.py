"""A checkout that looks like nano-vllm to its adapter: the same modules, a scheduler of our own.

Where the real package is not installed, the adapter is tested with this.
"""

from __future__ import annotations

from pathlib import Path

SEQUENCE = """
import enum
import itertools

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    block_size = 256
    counter = itertools.count()

    def __init__(self, token_ids, params=SamplingParams()):
        self.seq_id = next(Sequence.counter)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.block_table = []
        self.max_tokens = params.max_tokens
        self.ignore_eos = params.ignore_eos
        self.prefills = True

    num_tokens = property(lambda self: len(self.token_ids))
    num_completion_tokens = property(lambda self: self.num_tokens - self.num_prompt_tokens)
    completion_token_ids = property(lambda self: self.token_ids[self.num_prompt_tokens:])
    is_finished = property(lambda self: self.status is SequenceStatus.FINISHED)
    last_token = property(lambda self: self.token_ids[-1])

    def blocks_for(self, count):
        return -(-count // self.block_size)

    def __getstate__(self):
        known = self.token_ids if {sends_all} else [self.last_token]
        return self.num_tokens, self.block_table, known

    def __setstate__(self, state):
        total, self.block_table, known = state
        self.num_cached_tokens = 0
        if len(known) == total:
            self.token_ids = known
        else:
            self.length, self.last = total, known[-1]
"""

BLOCK_MANAGER = """
from collections import deque


class Block:
    def __init__(self):
        self.hash = -1
        self.ref_count = 0
        self.block_id = 0


class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.blocks = [Block() for _ in range(num_blocks)]
        for index, block in enumerate(self.blocks):
            block.block_id = index
        self.hash_to_block_id = {}
        self.free_block_ids = deque(range(num_blocks))
        self.used_block_ids = set()

    def _allocate_block(self):
        block = self.free_block_ids.popleft()
        self.blocks[block].ref_count = 1
        self.used_block_ids.add(block)
        return block

    def _deallocate_block(self, block):
        self.used_block_ids.remove(block)
        self.free_block_ids.append(block)

    def missing(self, sequence):
        return sequence.blocks_for(sequence.num_tokens) - len(sequence.block_table)

    def allocate(self, sequence):
        while self.missing(sequence):
            sequence.block_table.append(self._allocate_block())

    def may_append(self, sequence):
        self.allocate(sequence)

    def deallocate(self, sequence):
        for block in reversed(sequence.block_table):
            self.blocks[block].ref_count = 0
            self._deallocate_block(block)
        sequence.block_table.clear()
"""

SCHEDULER = """
from collections import deque

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    def __init__(self, config: Config):
        self.eos = config.eos
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting, self.running = deque(), deque()

    def is_finished(self):
        return not self.waiting and not self.running

    def add(self, sequence):
        self.waiting.append(sequence)

    def schedule(self):
        pool, scheduled_seqs = self.block_manager, []
        while self.waiting and pool.missing(self.waiting[0]) <= len(pool.free_block_ids):
            sequence = self.waiting.popleft()
            pool.allocate(sequence)
            sequence.status, sequence.prefills = SequenceStatus.RUNNING, True
            scheduled_seqs.append(sequence)
        if scheduled_seqs:
            self.running.extend(scheduled_seqs)
            return scheduled_seqs, True
        while self.running:
            sequence = self.running.popleft()
            while pool.missing(sequence) > len(pool.free_block_ids) and self.running:
                self.preempt(self.running.pop())
            if pool.missing(sequence) > len(pool.free_block_ids):
                self.preempt(sequence)
                break
            pool.may_append(sequence)
            sequence.prefills = False
            scheduled_seqs.append(sequence)
        assert scheduled_seqs
        self.running.extend(scheduled_seqs)
        return scheduled_seqs, False

    def preempt(self, sequence):
        sequence.status = SequenceStatus.WAITING
        self.block_manager.deallocate(sequence)
        self.waiting.appendleft(sequence)

    def postprocess(self, sequences, token_ids):
        for sequence, token in zip(sequences, token_ids):
            sequence.token_ids.append(token)
            if sequence.num_completion_tokens == sequence.max_tokens:
                sequence.status = SequenceStatus.FINISHED
                self.block_manager.deallocate(sequence)
                self.running.remove(sequence)
"""

PARAMS = """
from dataclasses import dataclass


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
"""

CONTEXT = """
from dataclasses import dataclass
import torch


@dataclass
class Context:
    is_prefill: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None


_CONTEXT = Context()


def get_context():
    return _CONTEXT


def set_context(*fields):
    global _CONTEXT
    _CONTEXT = Context(*fields)
"""

RUNNER = """
import flash_attn_that_nobody_has


class ModelRunner:
    def prepare_block_tables(self, seqs):
        longest = max(len(seq.block_table) for seq in seqs)
        tables = [seq.block_table + [-1] * (longest - len(seq.block_table)) for seq in seqs]
        return torch.tensor(tables, dtype=torch.int32).cuda(non_blocking=True)

    def prepare_prefill(self, seqs):
        ids, positions, slots, ends = [], [], [], [0]
        for seq in seqs:
            ids += seq.token_ids
            for position in range(len(seq.token_ids)):
                positions.append(position)
                block = seq.block_table[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            ends.append(len(ids))
        set_context(True, torch.tensor(ends), torch.tensor(ends), torch.tensor(slots))
        return torch.tensor(ids), torch.tensor(positions)

    def prepare_decode(self, seqs):
        ids, positions, slots, lengths = [], [], [], []
        for index, seq in enumerate(seqs):
            length = getattr(seq, "length", None) or seq.num_tokens
            self._cpu_ids[index] = getattr(seq, "last", None) or seq.last_token
            positions.append(length - 1)
            slots.append(seq.block_table[-1] * self.block_size + (length - 1) % self.block_size)
            lengths.append(length)
        tables = self.prepare_block_tables(seqs)
        set_context(False, None, None, torch.tensor(slots), torch.tensor(lengths), tables)
        return self._cpu_ids[: len(seqs)].cuda(), torch.tensor(positions)
"""


def write_checkout(folder: Path, *, sends_all: str) -> Path:
    """A checkout in this folder.

    Args:
        sends_all: expression over `self`, a sequence: whether a message holds all its token ids.
    """
    files = {
        "engine/sequence.py": SEQUENCE.replace("{sends_all}", sends_all),
        "engine/block_manager.py": BLOCK_MANAGER,
        "engine/scheduler.py": SCHEDULER,
        "engine/model_runner.py": RUNNER,
        "sampling_params.py": PARAMS,
        "utils/context.py": CONTEXT,
        "__init__.py": "raise ImportError('this package needs a GPU')",
    }
    for name, text in files.items():
        path = folder / "nanovllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
