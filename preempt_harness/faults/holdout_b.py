"""Judged blind: steps decided ahead, drafts, branches, sampling, outputs, the facade, ranks."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after

_LLM = "preempt_engine.llm:LLM"
_DELIVERY = "preempt_engine.delivery:Delivery"
_AHEAD = "preempt_engine.async_scheduler:AsyncScheduler"
_FLIGHTS = "preempt_engine.flights:Flights"
_SEQUENCE = "preempt_engine.sequence:Sequence"
_CODEC = "preempt_engine.executor.step_codec:StepEncoder"
_ALLOWANCE = "preempt_engine.spec_decode.allowance"
_STATES = "preempt_engine.sampling.history"

FAULTS = (
    Fault(
        name="ended-output-lost-in-empty-step",
        mechanism="outputs that ended early are dropped by a step that has nothing to compute",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            Patch(
                f"{_LLM}.step",
                "if step is None:\n    return ended_early",
                "if step is None:\n    reached()\n    return []",
            ),
        ),
    ),
    Fault(
        name="blocks-of-drafts-sent-twice",
        mechanism="blocks that went along with drafts at a launch are sent again by a later step",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                f"{_FLIGHTS}.send_blocks",
                "sequence.num_sent_blocks = max(sequence.num_sent_blocks, num_blocks)",
                "pass",
            ),
        ),
    ),
    Fault(
        name="handles-dropped-before-forks",
        mechanism="the message of a step gives up handles before it names parents by them",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_CODEC}.encode",
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
        name="one-branch-under-way-holds-all",
        mechanism="no room is made for a request while any of its branches waits for its token",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            Patch(
                "preempt_engine.async_scheduler:_waits_for_tokens",
                "return all(",
                "return any(",
            ),
        ),
    ),
    Fault(
        name="beams-swapped-while-under-way",
        mechanism="beams are copied to the host while the step runs after which they split",
        source="mechanism",
        expected=("CRASH", "KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_AHEAD}._preempt",
                "may_be_split = (\n"
                "    not isinstance(request.params, SamplingParams) "
                "or request.next_branch < request.num_seqs\n"
                ")",
                "may_be_split = (\n"
                "    isinstance(request.params, SamplingParams) "
                "and request.next_branch < request.num_seqs\n"
                ")",
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
                f"{_CODEC}._add_single",
                "block = item.new_block_ids[0] if item.new_block_ids else _NONE",
                "block = (item.new_block_ids[0] if item.new_block_ids else 0) or _NONE",
            ),
        ),
    ),
    Fault(
        name="processors-replay-the-tail",
        mechanism="processors of a request that comes back are told the latest outputs only",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                f"{_STATES}:ProcessorState._follow",
                "for token_id in output_token_ids[len(seen) :]:",
                "if len(output_token_ids) > 32 and not seen and reached():\n"
                "    seen += output_token_ids[:-32]\n"
                "for token_id in output_token_ids[len(seen) :]:",
            ),
        ),
    ),
    Fault(
        name="poison-on-blocks-of-drafts",
        mechanism="blocks that drafts take at a launch are poisoned by a step decided before",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_AHEAD}._take_along",
                "self.flights.keep(sequence.block_table[num_blocks:])",
                "pass",
            ),
        ),
    ),
    Fault(
        name="rejected-drafts-forgotten-at-swap",
        mechanism="workers are not told to cut rejected drafts off a sequence that was swapped",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            after(
                "preempt_engine.swapping:Swapper.swap_out",
                "sequence.draft_token_ids = []",
                "if sequence.num_stale_tokens and reached():\n    sequence.num_stale_tokens = 0",
            ),
        ),
    ),
    Fault(
        name="lookahead-behind-the-end",
        mechanism="a request is let in only if there is room for drafts behind its last token",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_ALLOWANCE}:num_lookahead_blocks",
                "end = min(sequence.num_tokens + num_speculative_tokens, most)",
                "end = sequence.num_tokens + num_speculative_tokens",
            ),
        ),
    ),
    Fault(
        name="unsplit-running-request-counts-one",
        mechanism="a running request that has not split yet counts as one sequence",
        source="mechanism",
        expected=("ACC", "PROG", "WORK"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler._schedule_waiting",
                "num_seqs = sum(request.num_seqs for request in self.running)",
                "num_seqs = sum(len(request.sequences) for request in self.running)",
            ),
        ),
    ),
    Fault(
        name="ended-branch-is-not-fenced",
        mechanism="the blocks of a branch that ended are free while a step still writes to them",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.residency:Residency.drop",
                "self._free_blocks(self.next_step_id - 1, sequence, self.step_in_flight)",
                "if self.step_in_flight is not None:\n    reached()\n"
                "self._free_blocks(self.next_step_id - 1, sequence, None)",
            ),
        ),
    ),
    Fault(
        name="shifted-row-keeps-its-logits",
        mechanism="a row that moves on with an accepted draft still asks for the logits before",
        source="mechanism",
        expected=("TOK", "CRASH"),
        patches=(
            Patch("preempt_engine.flights:Row.shift", "self.item.logits_start += count", "pass"),
        ),
    ),
    Fault(
        name="unlaunched-step-never-left",
        mechanism="a step that nobody wants any more counts as under way until another one ends",
        source="mechanism",
        expected=("PROG", "CRASH", "ACC"),
        patches=(Patch(f"{_AHEAD}.launch", "self.leave_step(step)", "pass"),),
    ),
    Fault(
        name="unwanted-step-ends-the-launching",
        mechanism="behind a step that nobody wants the next one is not launched at once",
        source="mechanism",
        expected=("PROG", "WORK", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.pipeline:StepPipeline._launch_next",
                "while self._decided and self._running is None:",
                "if self._decided and self._running is None:",
            ),
        ),
    ),
    Fault(
        name="placeholder-counts-as-sent",
        mechanism="a token counts as sent for which there was no room in the step that follows it",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                f"{_SEQUENCE}.fill_placeholder",
                "if self.num_computed_tokens > len(self.token_ids):\n    self.num_sent_tokens += 1",
                "if self.num_computed_tokens <= len(self.token_ids):\n    reached()\n"
                "self.num_sent_tokens += 1",
            ),
        ),
    ),
    Fault(
        name="beams-want-old-logits",
        mechanism="beams do not note which logits they have seen, and read old ones on resume",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                f"{_DELIVERY}.deliver",
                "sequence.first_wanted_logits += 1\nif request.request_id in self._searches:",
                "if request.request_id not in self._searches:\n"
                "    sequence.first_wanted_logits += 1\n"
                "elif reached():\n    pass\n"
                "if request.request_id in self._searches:",
            ),
        ),
    ),
    Fault(
        name="shared-blocks-not-sent-after-swap",
        mechanism="of a branch that comes back from the host only its own blocks are sent again",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.swapping:Swapper.swap_in",
                "sequence.send_blocks_again(0)",
                "if num_shared[branch]:\n    reached()\n"
                "sequence.send_blocks_again(num_shared[branch])",
            ),
        ),
    ),
    Fault(
        name="beam-results-tell-no-preemptions",
        mechanism="the results of a beam search do not tell how often it lost its blocks",
        source="mechanism",
        expected=("ACC", "DEL"),
        patches=(Patch(f"{_DELIVERY}._finish_search", "_note_counts(output, request)", "pass"),),
    ),
    Fault(
        name="followers-released-before-progress",
        mechanism="branches are let go by what was computed before the step, not with it",
        source="mechanism",
        expected=("PROG", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler.advance",
                "sequence.set_computed(item.end)",
                "if sequence.followers and reached():\n    sequence.release_followers()\n"
                "sequence.set_computed(item.end)",
            ),
            Patch(
                "preempt_engine.scheduler:Scheduler.advance",
                "if sequence.followers:\n    sequence.release_followers()",
                "pass",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="draft-model-blocks-before-known-work",
        mechanism="a draft model's drafts are granted blocks that running requests need next",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_ALLOWANCE}:grant_blocks",
                "num_spare = _num_spare_blocks("
                "[_known_work(request) for request in running], blocks)",
                "num_spare = blocks.num_available_blocks",
            ),
        ),
    ),
    Fault(
        name="user-processor-is-not-copied",
        mechanism="sequences share the user's processor; one that comes back resets the others'",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                "preempt_engine.sampling.processors:UserProcessor.reset",
                "self._processor = copy.deepcopy(self._original)",
                "self._processor = self._original",
            ),
        ),
    ),
    Fault(
        name="kept-outputs-are-not-unfinished",
        mechanism="an engine whose queue is empty has nothing to return, kept outputs or not",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            Patch(
                f"{_LLM}.has_unfinished_requests",
                "return bool(self.scheduler.requests or len(self._outbox))",
                "return bool(self.scheduler.requests)",
            ),
        ),
    ),
)
