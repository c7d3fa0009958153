"""The workers' side: their messages, their memory, their copies, and sizes after a reset."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before

_STEP_CODEC = "preempt_engine.executor.step_codec"
_WORKER = "preempt_engine.worker"

FAULTS = (
    Fault(
        name="handles-numbered-by-how-many-there-are",
        mechanism="a sequence that is new to the workers gets the number of those they know, which "
        "another may have since one was dropped",
        source="mechanism",
        expected=("CRASH", "TOK", "KVSAN"),
        patches=(
            Patch(
                f"{_STEP_CODEC}:StepEncoder._new_handle",
                "handle = self._handles[key] = self._next_handle",
                "handle = len(self._handles)\n"
                "if handle in self._handles.values():\n"
                "    reached()\n"
                "self._handles[key] = handle",
            ),
        ),
        needs=frozenset({"tensor_parallel"}),
    ),
    Fault(
        name="exchanged-block-sent-as-one-more",
        mechanism="the short form of a row does not say that a block replaces another: a copy on "
        "write, or the only block after a swap, is appended to the worker's table",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                f"{_STEP_CODEC}:_is_single",
                "and not item.num_stale_blocks",
                "and (not item.num_stale_blocks or reached())",
            ),
        ),
        needs=frozenset({"tensor_parallel"}),
    ),
    Fault(
        name="chunks-of-a-returned-request-bring-it-all-again",
        mechanism="each chunk of a prefill after a preemption sends all tokens and the whole table",
        source="mechanism",
        expected=("WORK",),
        patches=(
            after(
                "preempt_engine.scheduler:Scheduler._schedule_tokens",
                "start, table = sequence.num_computed_tokens, sequence.block_table",
                "if (\n"
                "    request.num_preemptions\n"
                "    and sequence.known_to_workers\n"
                "    and 0 < start < sequence.num_prefill_tokens\n"
                "    and reached()\n"
                "):\n"
                "    sequence.known_to_workers = False\n"
                "    sequence.num_sent_tokens = 0\n"
                "    sequence.num_sent_blocks = 0\n"
                "    sequence.num_stale_blocks = 0",
            ),
        ),
        needs=frozenset({"tensor_parallel"}),
    ),
    Fault(
        name="nothing-copied-out-when-no-logits-are-wanted",
        mechanism="a step whose rows want no logits is over before victims' blocks are copied",
        source="mechanism",
        expected=("KVSAN", "TOK", "ACC"),
        patches=(
            before(
                f"{_WORKER}.exact_runner:ExactRunner.execute",
                "self._cache.swap_out(step.swap_out)",
                "if not digests and (not step.swap_out or reached()):\n"
                "    return ExactLogits(digests, self.vocab_size)",
            ),
        ),
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="idle-sequences-forgotten-by-the-worker",
        mechanism="a worker forgets what was not scheduled in a dozen steps, such as the swapped",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            before(
                f"{_WORKER}.state:WorkerState.apply",
                "for item in step.scheduled:",
                'last_used = self.__dict__.setdefault("last_used", {})\n'
                "for key in list(self.sequences):\n"
                "    if step.step_id - last_used.get(key, step.step_id) > 12 and reached():\n"
                "        del self.sequences[key]\n"
                "last_used.update((item.key, step.step_id) for item in step.scheduled)",
            ),
        ),
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="rejected-drafts-stay-over-a-swap",
        mechanism="with the table, which is sent anew after a swap, the rejected drafts that the "
        "workers are to cut off count as done",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            after(
                "preempt_engine.swapping:Swapper.swap_in",
                "sequence.send_blocks_again(0)",
                "if sequence.num_stale_tokens and reached():\n    sequence.num_stale_tokens = 0",
            ),
        ),
        needs=frozenset({"swap", "speculation"}),
    ),
    Fault(
        name="host-run-over-a-gap",
        mechanism="host blocks that rise are copied in one run, consecutive or not: others between "
        "them are overwritten",
        source="mechanism",
        expected=("TOK", "CRASH"),
        patches=(
            Patch(
                f"{_WORKER}.swap_space:_runs",
                "if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:",
                "if (\n"
                "    index == len(block_ids)\n"
                "    or block_ids[index] < block_ids[index - 1]\n"
                "    or (block_ids[index] > block_ids[index - 1] + 1 and not reached())\n"
                "):",
            ),
        ),
        model="tiny-llama",
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="swap-of-one-block-is-none",
        mechanism="batches of copies end one pair early when they hold one pair",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                f"{_WORKER}.swap_space:SwapSpace._for_batches",
                "for first in range(0, len(pairs), self._batch):",
                "last = len(pairs) - (len(pairs) % self._batch == 1 and reached())\n"
                "for first in range(0, last, self._batch):",
            ),
        ),
        model="tiny-llama",
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="rows-of-tables-kept-by-their-length",
        mechanism="the row of a block table that attention reads is kept between steps, and made "
        "anew when its length changes, not when its blocks do",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_WORKER}.step_inputs:_block_tables",
                "for row, count, (_, sequence) in zip(tables, counts, state.rows(step), "
                "strict=True):\n"
                "    row[:count] = sequence.block_table[:count]",
                'kept = state.__dict__.setdefault("kept_rows", {})\n'
                "for row, count, (item, sequence) in zip(\n"
                "    tables, counts, state.rows(step), strict=True\n"
                "):\n"
                "    known = kept.get(item.key, [])\n"
                "    if len(known) != count:\n"
                "        known = kept[item.key] = sequence.block_table[:count]\n"
                "    elif known != sequence.block_table[:count]:\n"
                "        reached()\n"
                "    row[:count] = known",
            ),
        ),
        model="tiny-llama",
    ),
    Fault(
        name="copies-skipped-beside-a-swap-in",
        mechanism="a step that brings blocks back from the host makes no copies on write",
        source="mechanism",
        expected=("TOK", "ACC"),
        patches=(
            Patch(
                f"{_WORKER}.model_runner:ModelRunner._move_blocks",
                "if step.block_copies:",
                "if step.block_copies and not (step.swap_in and reached()):",
            ),
        ),
        model="tiny-llama",
        needs=frozenset({"swap", "parallel_sampling"}),
    ),
    Fault(
        name="no-swap-space-taken-for-the-default-after-a-reset",
        mechanism="a reset to no swap space leaves as much as the engine was built with",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                "preempt_engine.building:build_scheduler",
                "if num_host_blocks is None:",
                "if num_host_blocks is None or (\n"
                "    num_host_blocks == 0 and executor.num_host_blocks and reached()\n"
                "):",
            ),
        ),
        model="tiny-llama",
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="lengths-limited-by-the-pool-as-built",
        mechanism="how long outputs may become is reckoned with the pool that the engine was built "
        "with, not with the smaller one of a reset",
        source="mechanism",
        expected=("CRASH", "PROG", "ACC"),
        patches=(
            Patch(
                "preempt_engine.intake:Intake.max_total_tokens",
                "self.scheduler.blocks.num_blocks - num_shared",
                "self._executor.num_kv_blocks - num_shared",
            ),
        ),
        model="tiny-llama",
        needs=frozenset({"pool_limit"}),
    ),
)
