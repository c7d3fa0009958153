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
        name="stall-declared-after-preemption",
        mechanism="a step that preempted and computes nothing is taken for a stall",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_LLM}.schedule",
                "if self.scheduler.requests and not preempted and "
                "not self.scheduler.blocks.held_blocks:",
                "if self.scheduler.requests and not self.scheduler.blocks.held_blocks:",
            ),
        ),
    ),
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
        name="abort-reports-stale-counts",
        mechanism="the output of an aborted request does not tell of its latest preemptions",
        source="mechanism",
        expected=("ACC", "DEL"),
        patches=(
            Patch(
                f"{_DELIVERY}.abort",
                "_note_counts(builders[0].output, request)",
                "pass",
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
        name="branches-share-digests",
        mechanism="a fork has the list of block digests of its parent, not a copy",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_SEQUENCE}.fork",
                "block_digests=list(self.block_digests),",
                "block_digests=self.block_digests,",
            ),
        ),
    ),
    Fault(
        name="drafts-spend-a-block-twice",
        mechanism="the drafts of several requests are all granted the same spare block",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_ALLOWANCE}:cut_drafts",
                "num_spare -= max(0, blocks.blocks_for(end + keep) - num_held)",
                "pass",
            ),
        ),
    ),
    Fault(
        name="abort-of-last-leaves-step-under-way",
        mechanism="nobody waits for the step that runs when the last request is aborted",
        source="mechanism",
        expected=("ACC", "PROG", "CRASH"),
        patches=(
            Patch(
                f"{_LLM}.abort_request",
                "self._pipeline.drain()  # nobody else will",
                "pass",
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
        name="processors-take-output-for-prompt",
        mechanism="processors of a request that comes back are told its outputs as a prompt too",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                f"{_STATES}:ProcessorStates.of",
                "prompt_token_ids = sequence.token_ids[: sequence.num_prompt_tokens]",
                "prompt_token_ids = list(sequence.token_ids)",
            ),
        ),
    ),
    Fault(
        name="drafts-leave-room-for-one-step",
        mechanism="drafts leave room for one step decided ahead, whatever number there are",
        source="mechanism",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_AHEAD}._add_drafts",
                "ahead = item.end + self.config.async_scheduling",
                "ahead = item.end + 1",
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
        name="noise-by-place-among-branches",
        mechanism="a branch's noise is keyed by its place among those that have not ended",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                f"{_DELIVERY}._sample_request",
                "branch=branch,",
                "branch=list(request.sequences).index(branch),",
            ),
        ),
    ),
    Fault(
        name="followers-forgotten-at-swap",
        mechanism="a swap ends the wait of branches whose shared blocks another one computes",
        source="mechanism",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            after(
                "preempt_engine.swapping:Swapper.swap_out",
                "sequence.draft_token_ids = []",
                "if sequence.follows and reached():\n    sequence.follows = False\n"
                "sequence.followers = ()",
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
        name="dropped-not-passed-on",
        mechanism="what a step that nobody wants would have had workers forget is not passed on",
        source="mechanism",
        expected=("CRASH", "ACC", "WORK"),
        patches=(
            Patch(
                f"{_FLIGHTS}.pass_on",
                "following.dropped = step.dropped + following.dropped",
                "if step.dropped:\n    reached()",
            ),
        ),
    ),
)
