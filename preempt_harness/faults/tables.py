"""Block tables, slots and reference counts."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_BLOCKS = "preempt_engine.block_manager:BlockManager"

FAULTS = (
    Fault(
        name="can-grow-one-token-late",
        mechanism="the room for the next token is asked for one token too late",
        source="https://github.com/GeeeekExplorer/nano-vllm/issues/30",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_BLOCKS}.num_to_write",
                "growth = -(-end // size) - len(table)",
                "growth = -(-(end - 1) // size) - len(table)",
            ),
        ),
    ),
    Fault(
        name="can-grow-one-token-early",
        mechanism="the room for the next token is asked for one token too early",
        source="https://github.com/GeeeekExplorer/nano-vllm/issues/66",
        expected=("WORK", "PROG", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.num_to_write",
                "growth = -(-end // size) - len(table)",
                "growth = -(-(end + 1) // size) - len(table)",
            ),
            Patch(
                f"{SCHEDULER}._go_on",
                "end > len(sequence.block_table) * self.config.block_size",
                "end >= len(sequence.block_table) * self.config.block_size",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="can-grow-keeps-one-block",
        mechanism="a reserved block is not counted, so one block of the pool is never used",
        source="https://github.com/vllm-project/vllm/issues/27181",
        expected=("WORK", "PROG", "CRASH"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_running",
                "if num_blocks > self.blocks.num_available_blocks:",
                "if num_blocks and num_blocks >= self.blocks.num_available_blocks:",
            ),
            Patch(
                f"{SCHEDULER}._make_room",
                "while num_blocks > self.blocks.num_available_blocks:",
                "while num_blocks >= self.blocks.num_available_blocks:",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="grow-one-block-short",
        mechanism="a table whose tokens end at a boundary is one block short",
        source="https://github.com/GeeeekExplorer/nano-vllm/issues/150",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_BLOCKS}.grow",
                "self.blocks_for(num_tokens)",
                "(num_tokens // self.block_size + (num_tokens % self.block_size > 1))",
            ),
        ),
    ),
    Fault(
        name="grow-one-block-more-at-a-boundary",
        mechanism="a full table gets the block of the next token already",
        source="mechanism",
        expected=("ACC", "WORK", "CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_BLOCKS}.grow",
                "self.blocks_for(num_tokens)",
                "(num_tokens // self.block_size + 1)",
            ),
        ),
    ),
    Fault(
        name="granted-block-not-sent",
        mechanism="a block that is granted at a boundary never reaches the runner",
        source="vllm-rbln, pull request 662",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_tokens",
                "sequence.block_table[sequence.num_sent_blocks :]",
                "[] if sequence.known_to_workers and start % self.config.block_size == 0"
                " and reached() else sequence.block_table[sequence.num_sent_blocks :]",
            ),
        ),
    ),
    Fault(
        name="last-block-sent-twice",
        mechanism="with a new block the worker gets the block before it once more",
        source="mechanism",
        expected=("KVSAN", "ACC"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_tokens",
                "sequence.block_table[sequence.num_sent_blocks :]",
                "sequence.block_table[max(0, sequence.num_sent_blocks - (len(sequence.block_table)"
                " > sequence.num_sent_blocks > 0 and reached())) :]",
            ),
        ),
    ),
    Fault(
        name="free-forgets-the-partial-block",
        mechanism="freeing rounds down to whole blocks: the partly filled last block leaks",
        source="https://github.com/sgl-project/sglang/issues/4977",
        expected=("ACC", "KVSAN", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.free",
                "reversed(sequence.block_table)",
                "reversed(sequence.block_table[: sequence.num_computed_tokens // self.block_size])",
            ),
        ),
    ),
    Fault(
        name="shared-block-freed-by-the-first",
        mechanism="a shared block is released by the first owner that gives it up",
        source="https://github.com/sgl-project/sglang/issues/7130",
        expected=("KVSAN", "ACC", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.free",
                "if self.ref_counts[block_id] > 0:",
                "if self.ref_counts[block_id] > (1 if self.ref_counts[block_id] and reached()"
                " else 0):",
            ),
        ),
    ),
    Fault(
        name="shared-block-not-counted",
        mechanism="sharing a block that is in use does not raise its reference count",
        source="mechanism",
        expected=("KVSAN", "ACC", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.share",
                "self.ref_counts[block_id] += 1",
                "if not (self.ref_counts[block_id] and reached()):\n"
                "    self.ref_counts[block_id] += 1",
            ),
        ),
    ),
    Fault(
        name="prefill-victim-keeps-its-blocks",
        mechanism="blocks are not released when a request is paused during its prefill",
        source="https://github.com/NVIDIA/TensorRT-LLM/pull/14723",
        expected=("ACC", "KVSAN", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.free",
                "for block_id in reversed(sequence.block_table):",
                "for block_id in ([] if 0 < sequence.num_computed_tokens"
                " < sequence.num_tokens - 1 and reached() else reversed(sequence.block_table)):",
            ),
        ),
    ),
    Fault(
        name="used-blocks-not-given-back",
        mechanism="the count of used blocks is not lowered for blocks that stay in the cache",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_BLOCKS}.free",
                "self.num_used_blocks -= 1",
                "self.num_used_blocks -= self._digest_of[block_id] is None",
            ),
        ),
    ),
    Fault(
        name="used-blocks-forget-revived",
        mechanism="a block that comes back from the cache is not counted as used",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_BLOCKS}.share",
                "self.num_used_blocks += 1",
                "pass",
            ),
        ),
    ),
    Fault(
        name="aborted-prefill-leaks",
        mechanism="a request that is aborted before its first token keeps its blocks",
        source="mechanism",
        expected=("ACC", "KVSAN"),
        patches=(
            Patch(
                f"{RESIDENCY}.leave",
                "for sequence in request.sequences.values():",
                "for sequence in () if request.sequence.block_table"
                " and not request.sequence.num_output_tokens and reached()"
                " else request.sequences.values():",
            ),
        ),
    ),
    Fault(
        name="table-survives-preemption",
        mechanism="blocks are freed, the victim's block table stays and is used again",
        source="mechanism",
        expected=("KVSAN", "ACC", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.free",
                "    sequence.block_table = []",
                "    sequence.block_table = list(sequence.block_table)",
            ),
            Patch(
                "preempt_engine.sequence:Sequence.forget_cache",
                "self.block_table = []",
                "pass",
                reached=False,
            ),
            Patch(
                f"{_BLOCKS}.share",
                "assert not sequence.block_table",
                "pass",
                reached=False,
            ),
        ),
    ),
)
