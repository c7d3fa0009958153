"""Steps decided ahead: outputs under way when their request is preempted, ends or is aborted."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch

_ASYNC = "preempt_engine.async_scheduler:AsyncScheduler"
_NEEDS = frozenset({"async_scheduling"})
_DRAFTS = _NEEDS | {"speculation"}

FAULTS = (
    Fault(
        name="late-output-of-a-victim-applied",
        mechanism="an output under way at a preemption is applied after the request came back",
        source="https://github.com/vllm-project/vllm/issues/48245",
        expected=("CRASH", "ACC", "TOK", "KVSAN", "DEL"),
        patches=(
            Patch(
                "preempt_engine.flights:Flights.is_live",
                "and sequence.incarnation == row.incarnation",
                "and (sequence.incarnation == row.incarnation or reached())",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="placeholder-reaches-the-model",
        mechanism="the placeholder of a token to come is computed as if it were one",
        source="https://github.com/vllm-project/vllm/issues/46899",
        expected=("KVSAN", "CRASH", "TOK"),
        patches=(
            Patch(
                f"{_ASYNC}._fill",
                "if PLACEHOLDER in item.new_token_ids:",
                "if PLACEHOLDER in item.new_token_ids and not reached():",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="placeholders-stay-inflated",
        mechanism="a placeholder stays when its token has come",
        source="https://github.com/vllm-project/vllm/issues/49860",
        expected=("CRASH", "TOK", "KVSAN", "DEL", "ACC"),
        patches=(
            Patch(
                "preempt_engine.sequence:Sequence.fill_placeholder",
                "del self.draft_token_ids[0]",
                "pass",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="rows-of-the-ended-are-launched",
        mechanism="a step decided ahead is launched with rows of requests that have ended since",
        source="mechanism",
        expected=("KVSAN", "CRASH", "ACC"),
        patches=(
            Patch(
                f"{_ASYNC}.launch",
                "if self.flights.is_live(row):",
                "if self.flights.is_live(row) or reached():",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="blocks-freed-under-a-step",
        mechanism="freed blocks are handed out while a step that copies or reads them is under way",
        source="https://github.com/vllm-project/vllm/issues/29870",
        expected=("KVSAN", "TOK", "CRASH", "ACC"),
        patches=(
            Patch(
                "preempt_engine.block_manager:BlockManager.free",
                "if step_in_flight is None:",
                "if step_in_flight is None or reached():",
            ),
        ),
        needs=_NEEDS | {"swap"},
    ),
    Fault(
        name="blocks-taken-for-tokens-to-come",
        mechanism="requests are preempted for blocks of a token that is not known yet",
        source="mechanism",
        expected=("PROG", "WORK", "CRASH"),
        patches=(
            Patch(
                f"{_ASYNC}._make_room",
                "not _waits_for_tokens(request) and",
                "(not _waits_for_tokens(request) or reached()) and",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="decided-rows-stay-when-drafts-come-true",
        mechanism="a step decided ahead computes where it would if no draft had been right",
        source="mechanism",
        expected=("KVSAN", "CRASH", "TOK"),
        patches=(Patch(f"{_ASYNC}._accept", "row.shift(1)", "reached() or row.shift(1)"),),
        needs=_DRAFTS,
    ),
    Fault(
        name="drafts-under-way-outlive-a-preemption",
        mechanism="drafts of the step under way are verified though their request lost its blocks",
        source="mechanism",
        expected=("KVSAN", "CRASH", "TOK", "ACC"),
        patches=(
            Patch(
                f"{_ASYNC}._preempt",
                "self._reject(sequence)",
                "reached() if sequence.drafts_in_flight else None",
            ),
        ),
        needs=_DRAFTS | {"swap"},
    ),
    Fault(
        name="rejected-drafts-under-way-not-cut-off",
        mechanism="the workers keep rejected drafts when the next step was decided before them",
        source="mechanism",
        expected=("KVSAN", "CRASH", "TOK"),
        patches=(
            Patch(
                f"{_ASYNC}._reject",
                "first.item.num_stale_tokens += num_rejected",
                "num_rejected and reached()",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="blocks-of-drafts-poisoned-by-the-next-step",
        mechanism="a step decided ahead poisons blocks as free that were taken at a launch since",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.flights:Flights.keep",
                "for flight in self.queued if block_ids else ():",
                "if any(set(block_ids) & set(flight.step.poison_block_ids)"
                " for flight in self.queued):\n"
                "    reached()\n"
                "for flight in ():",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="launched-steps-not-counted",
        mechanism="tokens computed by steps that were decided ahead are counted when decided",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_ASYNC}.schedule",
                "setattr(counters, name, value)",
                "if name != 'num_computed_tokens' or not reached():\n"
                "    setattr(counters, name, value)",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="goes-on-by-the-length-of-the-whole-text",
        mechanism="whether a sequence goes on before its token has come is told by all its tokens "
        "instead of its outputs: one with a long prompt stands still in every second step",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ASYNC}._goes_on",
                "num_outputs = num_known + 1 - sequence.num_prompt_tokens",
                "num_outputs = num_known + 1\nreached()",
            ),
        ),
        needs=_NEEDS,
    ),
    Fault(
        name="drafts-ahead-pay-for-what-is-computed",
        mechanism="what is left of the token budget for drafts is counted as if a step computed "
        "all that its sequences have: long texts get none",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ASYNC}._add_drafts",
                "budget = self.config.max_num_batched_tokens - flight.step.num_scheduled_tokens",
                "reached()\n"
                "budget = self.config.max_num_batched_tokens - sum(\n"
                "    item.end for item in flight.step.scheduled\n"
                ")",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="blocks-of-drafts-sent-twice",
        mechanism="blocks that went along with drafts at a launch are sent again by a later step",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.flights:Flights.send_blocks",
                "sequence.num_sent_blocks = max(sequence.num_sent_blocks, num_blocks)",
                "pass",
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
                "preempt_engine.async_scheduler:AsyncScheduler._preempt",
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
        name="poison-on-blocks-of-drafts",
        mechanism="blocks that drafts take at a launch are poisoned by a step decided before",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.async_scheduler:AsyncScheduler._take_along",
                "self.flights.keep(sequence.block_table[num_blocks:])",
                "pass",
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
        patches=(
            Patch(
                "preempt_engine.async_scheduler:AsyncScheduler.launch",
                "self.leave_step(step)",
                "pass",
            ),
        ),
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
                "preempt_engine.sequence:Sequence.fill_placeholder",
                "if self.num_computed_tokens > len(self.token_ids):\n    self.num_sent_tokens += 1",
                "if self.num_computed_tokens <= len(self.token_ids):\n    reached()\n"
                "self.num_sent_tokens += 1",
            ),
        ),
    ),
)
