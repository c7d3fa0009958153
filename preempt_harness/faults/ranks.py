"""Tensor parallelism: what only shows with more than one rank."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, before

_SCHEDULE_TOKENS = "preempt_engine.scheduler:Scheduler._schedule_tokens"
_STATE = "preempt_engine.worker.state:WorkerState"
_TP = frozenset({"tensor_parallel"})

FAULTS = (
    Fault(
        name="all-tokens-sent-every-step",
        mechanism="the state sent to the workers holds all token ids in every decode step",
        source="nano-vllm, first fix of pull request 103",
        expected=("WORK",),
        patches=(
            Patch(
                _SCHEDULE_TOKENS,
                "not sequence.known_to_workers,\n"
                "sequence.token_ids[sequence.num_sent_tokens :],\n"
                "sequence.block_table[sequence.num_sent_blocks :]\n"
                "if sequence.num_sent_blocks < len(table)\n"
                "else (),\n"
                "sequence.num_stale_blocks,",
                "True,\nlist(sequence.token_ids),\nlist(sequence.block_table),\n0,",
            ),
        ),
        needs=_TP,
    ),
    Fault(
        name="whole-table-sent-every-step",
        mechanism="the whole block table is sent in every decode step",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                _SCHEDULE_TOKENS,
                "sequence.block_table[sequence.num_sent_blocks :]\n"
                "if sequence.num_sent_blocks < len(table)\n"
                "else (),\n"
                "sequence.num_stale_blocks,",
                "list(sequence.block_table),\n"
                "sequence.num_stale_blocks + sequence.num_sent_blocks,",
            ),
        ),
        needs=_TP,
    ),
    Fault(
        name="second-rank-keeps-its-table",
        mechanism="one rank of two does not take over the new block table of a resumed sequence",
        source="mechanism",
        expected=("KVSAN", "TOK", "ACC"),
        patches=(
            Patch(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self.state.apply(step)",
                "known = vars(self).setdefault('old_tables', {})\n"
                "known.update({key: list(item.block_table) for key, item in"
                " self.state.sequences.items()})\n"
                "self.state.apply(step)\n"
                "for item in step.scheduled:\n"
                "    if self.rank and item.reset and item.key in known and reached():\n"
                "        table = self.state.sequences[item.key].block_table\n"
                "        table[: len(known[item.key])] = known[item.key][: len(table)]",
            ),
        ),
        needs=_TP,
    ),
    Fault(
        name="second-rank-has-another-block-size",
        mechanism="a spawned worker takes the default block size, not the engine's",
        source="nano-vllm, block size as a process-global",
        expected=("KVSAN", "CRASH", "TOK", "ACC"),
        patches=(
            Patch(
                "preempt_engine.worker.exact_runner:ExactRunner._slots",
                "size = self.state.block_size",
                "size = 16 if self.rank and self.state.block_size != 16 and reached()"
                " else self.state.block_size",
            ),
        ),
        needs=_TP,
    ),
    Fault(
        name="second-rank-copies-before-it-swaps-in",
        mechanism="one rank copies a shared block before it has come back from the host",
        source="mechanism",
        expected=("TOK", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self._cache.swap_in(step.swap_in)\nself._cache.copy(step.block_copies)",
                "if self.rank and step.swap_in and step.block_copies and reached():\n"
                "    self._cache.copy(step.block_copies)\n"
                "    self._cache.swap_in(step.swap_in)\n"
                "else:\n"
                "    self._cache.swap_in(step.swap_in)\n"
                "    self._cache.copy(step.block_copies)",
            ),
        ),
        needs=_TP | {"swap", "parallel_sampling"},
    ),
    Fault(
        name="chunk-of-one-token-returns-a-row",
        mechanism="a chunk of a single token is sent as one whose logits are wanted",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                "preempt_engine.executor.step_codec:StepEncoder._add_single",
                "if not item.num_logits:",
                "if not item.num_logits and not reached():",
            ),
        ),
        needs=_TP | {"chunked_prefill"},
    ),
    Fault(
        name="second-rank-copies-out-a-step-late",
        mechanism="one rank copies victims' blocks to the host when the next step's have come in",
        source="mechanism",
        expected=("TOK", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self._cache.swap_in(step.swap_in)",
                "self._cache.swap_in(step.swap_in)\n"
                "late, self._late = getattr(self, '_late', ()), ()\n"
                "if late and reached():\n"
                "    self._cache.swap_out(late)",
            ),
            Patch(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self._cache.swap_out(step.swap_out)",
                "if self.rank:\n"
                "    self._late = tuple(step.swap_out)\n"
                "else:\n"
                "    self._cache.swap_out(step.swap_out)",
                reached=False,
            ),
        ),
        needs=_TP | {"swap"},
    ),
    Fault(
        name="second-rank-keeps-rejected-drafts-at-a-boundary",
        mechanism="one rank does not cut rejected drafts off in a step that brings a new block",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH", "ACC"),
        patches=(
            before(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self.state.apply(step)",
                "for item in step.scheduled:\n"
                "    if self.rank and item.num_stale_tokens and item.new_block_ids and reached():\n"
                "        item.num_stale_tokens = 0",
            ),
        ),
        needs=_TP | {"speculation"},
    ),
    Fault(
        name="handles-dropped-before-forks",
        mechanism="the message of a step gives up handles before it names parents by them",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                "preempt_engine.executor.step_codec:StepEncoder.encode",
                "forks = [word for parent, child in step.forks "
                "for word in self._fork(parent, child)]\n"
                "dropped = [self._handles.pop(key) for key in step.dropped]",
                "dropped = [self._handles.pop(key) for key in step.dropped]\n"
                "forks = [word for parent, child in step.forks "
                "for word in self._fork(parent, child)]",
            ),
        ),
    ),
    Fault(
        name="block-zero-is-no-block",
        mechanism="block 0 is taken for no block in the short form of a message's row",
        source="mechanism",
        expected=("CRASH", "KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.executor.step_codec:StepEncoder._add_single",
                "block = item.new_block_ids[0] if item.new_block_ids else _NONE",
                "block = (item.new_block_ids[0] if item.new_block_ids else 0) or _NONE",
            ),
        ),
    ),
)
