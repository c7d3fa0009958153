"""The engine's side of workers and results: messages, memory of the workers, delivery, reuse."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before

_STEP_CODEC = "preempt_engine.executor.step_codec"
_WORKER = "preempt_engine.worker"
_DELIVERY = "preempt_engine.delivery:Delivery"
_LLM = "preempt_engine.llm:LLM"
_FORK = "preempt_engine.sequence:Sequence.fork"
_SPECULATOR = "preempt_engine.spec_decode.speculator:Speculator"

FAULTS = (
    # Messages to the ranks --------------------------------------------------------------------
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
        expected=("KVSAN", "TOK"),
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
    # What the workers remember and do ------------------------------------------------------------
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
    # Drafts --------------------------------------------------------------------------------------
    Fault(
        name="no-drafts-after-a-return",
        mechanism="nobody drafts for a request that was preempted once",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SPECULATOR}._wanted",
                "if not scheduler.wants_drafts(sequence):",
                "if not scheduler.wants_drafts(sequence) or (\n"
                "    request.num_preemptions and reached()\n"
                "):",
            ),
        ),
        needs=frozenset({"speculation"}),
    ),
    Fault(
        name="drafts-beyond-the-granted-blocks",
        mechanism="who gets some blocks for drafts, not all, drafts as many as were wanted",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_SPECULATOR}._with_blocks",
                "replace(item, limit=limit)",
                "(item if limit < item.limit and reached() else replace(item, limit=limit))",
            ),
        ),
        needs=frozenset({"speculation"}),
    ),
    Fault(
        name="blocks-ahead-of-the-drafts-survive-a-swap",
        mechanism="blocks that only the draft model knows are not cut off in a step that brings a "
        "whole new table: the draft model's table is shifted",
        source="mechanism",
        expected=("KVSAN", "WORK"),
        patches=(
            Patch(
                "preempt_engine.spec_decode.draft_model:DraftModelProposer._follow",
                "num_stale_blocks=item.num_stale_blocks + num_blocks,",
                "num_stale_blocks=item.num_stale_blocks\n"
                "if item.num_stale_blocks and num_blocks and reached()\n"
                "else item.num_stale_blocks + num_blocks,",
            ),
        ),
        needs=frozenset({"speculation", "swap"}),
    ),
    # Rows, branches, beams -----------------------------------------------------------------------
    Fault(
        name="rows-by-place-when-the-numbers-agree",
        mechanism="with as many rows of logits as sequences each is taken to have one, though a "
        "chunk has none and drafts have several",
        source="mechanism",
        expected=("CRASH", "TOK", "DEL"),
        patches=(
            after(
                f"{_DELIVERY}.deliver",
                "first_row = rows.stop",
                "if logits.num_rows == len(step.scheduled):\n"
                "    place = step.scheduled.index(item)\n"
                "    if rows != range(place, place + 1):\n"
                "        reached()\n"
                "    rows = range(place, place + 1)",
            ),
        ),
    ),
    Fault(
        name="rows-of-beams-forgotten-at-a-preemption",
        mechanism="beams that have their logits while others wait for theirs lose them at a "
        "preemption, and nobody asks for them again",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            after(
                f"{_DELIVERY}._search",
                "search = self._searches[request.request_id]",
                'seen = self.__dict__.setdefault("seen_preemptions", {})\n'
                "if seen.get(request.request_id, 0) != request.num_preemptions:\n"
                "    seen[request.request_id] = request.num_preemptions\n"
                "    for beam in search.beams:\n"
                "        if beam.candidates is not None:\n"
                "            reached()\n"
                "        beam.candidates = None",
            ),
        ),
        needs=frozenset({"beam_search"}),
    ),
    Fault(
        name="branches-begin-with-the-prompts-logits",
        mechanism="a fork counts the logits of the prompt's end as due, which its parent has read",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                _FORK,
                "first_wanted_logits=self.first_wanted_logits,",
                "first_wanted_logits=self.num_prompt_tokens - 1,",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="branches-after-a-cache-reset-not-findable",
        mechanism="a fork is taken for one from before the resets of the prefix cache, so that "
        "what it computes is not offered, and is computed again when it comes back",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                _FORK,
                "cache_epoch=self.cache_epoch,",
                "cache_epoch=0 * (self.cache_epoch and reached()),",
            ),
        ),
        needs=frozenset({"parallel_sampling", "prefix_caching", "reset_prefix_cache"}),
    ),
    # Steps decided ahead -------------------------------------------------------------------------
    Fault(
        name="launching-stops-at-a-step-nobody-wants",
        mechanism="of two steps decided ahead the second is not launched when nothing of the first "
        "is wanted any more",
        source="mechanism",
        expected=("CRASH", "PROG", "ACC"),
        patches=(
            Patch(
                "preempt_engine.pipeline:StepPipeline._launch_next",
                "if self._scheduler.launch(step):",
                "wanted = self._scheduler.launch(step)\n"
                "if not wanted and self._decided and reached():\n"
                "    break\n"
                "if wanted:",
            ),
        ),
        needs=frozenset({"async_scheduling"}),
    ),
    Fault(
        name="abort-of-the-last-leaves-its-step-under-way",
        mechanism="nobody waits for the step under way when the last request is aborted: the "
        "blocks that it may touch stay withheld",
        source="mechanism",
        expected=("ACC", "CRASH"),
        patches=(
            Patch(
                f"{_LLM}.abort_request",
                "self._pipeline.drain()  # nobody else will",
                "reached()",
            ),
        ),
        needs=frozenset({"async_scheduling", "abort"}),
    ),
    Fault(
        name="ends-lost-while-an-abort-waits",
        mechanism="an abort waits for what is under way, and drops the outputs that it brings: who "
        "ends in those steps is never told of",
        source="mechanism",
        expected=("DEL", "PROG", "HANG"),
        patches=(
            Patch(
                f"{_LLM}.abort_request",
                "and not self.scheduler.requests:",
                "and (\n    not self.scheduler.requests or reached()\n):",
            ),
        ),
        needs=frozenset({"async_scheduling", "abort"}),
    ),
    # What users get ------------------------------------------------------------------------------
    Fault(
        name="token-of-a-return-told-a-step-late",
        mechanism="outputs of a step in which a preempted request is computed anew are not among "
        "those that the step returns",
        source="mechanism",
        expected=("DEL",),
        patches=(
            before(
                f"{_DELIVERY}.deliver",
                "return list(outputs.values())",
                "for item in step.scheduled:\n"
                "    output = outputs.get(item.key.request_id)\n"
                "    if item.reset and output is not None and not output.finished:\n"
                "        if output.num_preemptions and reached():\n"
                "            del outputs[item.key.request_id]",
            ),
        ),
    ),
    Fault(
        name="stop-strings-wait-for-min-tokens-again",
        mechanism="the text of a request that comes back counts its tokens from there, so that "
        "min_tokens keeps stop strings from ending it once more",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            before(
                f"{_DELIVERY}._append_token",
                "text = self._builders[request.request_id][sequence.key.branch].append(token)",
                'seen = self.__dict__.setdefault("seen_preemptions", {})\n'
                "builder = self._builders[request.request_id][sequence.key.branch]\n"
                "if seen.get(sequence.key, 0) != request.num_preemptions:\n"
                "    seen[sequence.key] = request.num_preemptions\n"
                "    if builder.detokenizer is not None and builder.params.stop and reached():\n"
                "        builder.detokenizer.num_tokens = 0",
            ),
        ),
        needs=frozenset({"stop_strings", "min_tokens"}),
    ),
    Fault(
        name="outputs-in-the-order-of-their-ends",
        mechanism="generate() returns outputs as they ended, which preemptions change",
        source="mechanism",
        expected=("DEL",),
        patches=(
            after(
                f"{_LLM}.generate",
                "outputs: list[RequestOutput] = []",
                "ended: list[RequestOutput] = []",
                reached=False,
            ),
            Patch(
                f"{_LLM}.generate",
                "advance()",
                "advance()\nended.append(output)",
                reached=False,
            ),
            Patch(
                f"{_LLM}.generate",
                "return outputs",
                "if [output.request_id for output in ended] != [\n"
                "    output.request_id for output in outputs\n"
                "]:\n"
                "    reached()\n"
                "return ended",
            ),
        ),
    ),
    Fault(
        name="withdrawn-while-it-waits-goes-on",
        mechanism="a stream that is closed, or a batch that fails, aborts those that run: victims "
        "that wait for their return go on for nobody",
        source="mechanism",
        expected=("ACC", "PROG", "WORK"),
        patches=(
            Patch(
                f"{_LLM}._withdraw",
                "if not output.finished:",
                "running = [request.request_id for request in self.scheduler.running]\n"
                "if not output.finished and (output.request_id in running or not reached()):",
            ),
        ),
    ),
    Fault(
        name="score-of-a-victim-cut-short",
        mechanism="score() waits while its request runs, and is back when that is preempted",
        source="mechanism",
        expected=("DEL", "CRASH"),
        patches=(
            Patch(
                f"{_LLM}.score",
                "while request.request_id in self.scheduler.requests:\n    others += self.step()",
                "while request.num_cached_tokens is None:\n"
                "    others += self.step()\n"
                "while request in self.scheduler.running:\n"
                "    others += self.step()\n"
                "if request.request_id in self.scheduler.requests:\n"
                "    reached()",
            ),
        ),
        needs=frozenset({"score"}),
    ),
    # An engine that is used again ----------------------------------------------------------------
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
        expected=("CRASH", "PROG"),
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
