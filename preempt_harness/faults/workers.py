"""What a worker does with a step: positions, slots, lengths, and its own memory."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, before

_RUNNER = "preempt_engine.worker.exact_runner:ExactRunner"
_STATE = "preempt_engine.worker.state:WorkerState"

FAULTS = (
    Fault(
        name="reads-to-the-end-of-the-sequence",
        mechanism="attention reads to the sequence's end, not to the chunk's",
        source="https://github.com/GeeeekExplorer/nano-vllm/pull/213",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_RUNNER}.execute",
                "table,\nitem.end,",
                "table,\nlen(sequence.token_ids),",
                reached=False,
            ),
            Patch(
                f"{_RUNNER}.execute",
                "digests += self._cache.read("
                "item.key, item.end, sequence.block_table, item.logits_start)",
                "digests += self._cache.read(item.key, len(sequence.token_ids),"
                " sequence.block_table, item.logits_start)[: item.num_logits]",
            ),
        ),
    ),
    Fault(
        name="slot-of-the-block-before",
        mechanism="the first slot of a block is taken from the block before it",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_RUNNER}._slots",
                "table[p // size] * size",
                "table[(p - 1 if p and p % size == 0 and reached() else p) // size] * size",
            ),
        ),
    ),
    Fault(
        name="slots-count-from-the-chunk",
        mechanism="offsets in a block are counted from the chunk's start",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_RUNNER}._slots",
                "p % size for p",
                "(p - item.start if item.num_scheduled_tokens > 1 else p) % size for p",
            ),
        ),
    ),
    Fault(
        name="drops-after-admitting",
        mechanism="a worker admits before it drops: who left and came back in one message is lost",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_STATE}.apply",
                "for key in step.dropped:\n    self.sequences.pop(key, None)",
                "pass",
                reached=False,
            ),
            before(
                f"{_STATE}.apply",
                "sequence = self.sequences[item.key]",
                "if item.key in step.dropped and reached():\n"
                "    self.sequences.pop(item.key, None)",
            ),
        ),
    ),
    Fault(
        name="worker-positions-of-the-prompt",
        mechanism="the worker computes the last token at the position after the prompt's end",
        source="https://github.com/sgl-project/sglang/issues/13700",
        expected=("KVSAN", "ACC", "TOK"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._schedule_tokens",
                "start,\nend,\n",
                "min(start, sequence.num_prompt_tokens)"
                " if start > sequence.num_prompt_tokens and sequence.known_to_workers"
                " and self.requests[sequence.key.request_id].num_preemptions and reached()"
                " else start,\nend,\n",
            ),
        ),
    ),
    Fault(
        name="workers-not-told-of-the-dropped",
        mechanism="a worker is not told of preempted sequences: its memory of them grows",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                "preempt_engine.residency:Residency._free_blocks",
                "self.dropped.append(sequence.key)",
                "pass",
            ),
        ),
    ),
)
