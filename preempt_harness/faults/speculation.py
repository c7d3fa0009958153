"""Drafts: tokens that are computed before anybody knows whether they are the sequence's own."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_SEQUENCE = "preempt_engine.sequence:Sequence"
_CHOOSE = "preempt_engine.delivery:Delivery._choose_tokens"
_SEND = f"{SCHEDULER}._send_drafts"
_DRAFT_MODEL = "preempt_engine.spec_decode.draft_model:DraftModelProposer"
_APPEND_NEXT = "drafted.append((request, sequence, self._sample_request(request, sequence, row)))"
_DRAFTS = frozenset({"speculation"})

FAULTS = (
    Fault(
        name="rejected-draft-stays-computed",
        mechanism="after a rejection the position of the rejected draft counts as computed",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                f"{_SEQUENCE}.verify_draft",
                "self.set_computed(self.num_tokens - 1)",
                "self.set_computed(self.num_tokens)",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="first-draft-not-compared",
        mechanism="the first draft of several counts as accepted whatever was sampled",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_SEQUENCE}.verify_draft",
                "if drafts[0] != token_id:",
                "if drafts[0] != token_id and not (len(drafts) > 1 and reached()):",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="rejected-drafts-stay-with-the-workers",
        mechanism="the workers are not told which drafts were rejected",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.worker.state:WorkerState.apply",
                "if item.num_stale_tokens:",
                "if item.num_stale_tokens and not reached():",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="rejected-drafts-cut-off-twice",
        mechanism="what was rejected in one step is cut off in each step after it",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(Patch(_SEND, "sequence.num_stale_tokens = 0", "pass"),),
        needs=_DRAFTS,
    ),
    Fault(
        name="drafts-not-sent",
        mechanism="positions of drafts are scheduled, and the tokens are not sent",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                _SEND,
                "item.new_token_ids += sequence.draft_token_ids[max(0, item.start -"
                " sequence.num_tokens) :]",
                "pass",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="drafts-become-tokens-at-a-preemption",
        mechanism="a preempted request keeps its drafts as if they had been accepted",
        source="https://github.com/vllm-project/vllm/issues/30916",
        expected=("TOK", "KVSAN", "ACC", "CRASH"),
        patches=(
            before(
                f"{_SEQUENCE}.forget_cache",
                "self.draft_token_ids = []",
                "if self.draft_token_ids and not self.num_unverified_tokens and reached():\n"
                "    self.token_ids.extend(self.draft_token_ids)\n"
                "    self.first_wanted_logits += len(self.draft_token_ids)",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="block-with-a-rejected-draft-findable",
        mechanism="a block whose last slot holds a rejected draft is put into the prefix cache",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            after(
                f"{SCHEDULER}._verify_draft",
                "self.counters.num_rejected_tokens += num_drafts",
                "if sequence.num_tokens % self.config.block_size == 0 and reached():\n"
                "    sequence.num_computed_tokens += 1\n"
                "    self.blocks.make_findable(sequence)\n"
                "    sequence.num_computed_tokens -= 1",
            ),
        ),
        needs=_DRAFTS | {"prefix_caching"},
    ),
    Fault(
        name="verified-with-the-row-before",
        mechanism="the token after an accepted draft is sampled from the draft's own logits",
        source="mechanism",
        expected=("TOK", "KVSAN", "CRASH"),
        patches=(Patch(_CHOOSE, "row = sample_request.row + 1", "row = sample_request.row"),),
        needs=_DRAFTS,
    ),
    Fault(
        name="token-behind-the-last-draft-not-sampled",
        mechanism="when all drafts are accepted, the token that follows them is left out",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                _CHOOSE,
                "if sequence.newest_was_drafted:",
                "if sequence.newest_was_drafted and (sequence.draft_token_ids or not reached()):",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="rows-of-accepted-drafts-asked-for-again",
        mechanism="logits of accepted positions still count as wanted in the next step",
        source="mechanism",
        expected=("TOK", "CRASH", "KVSAN"),
        patches=(Patch(_CHOOSE, "sequence.first_wanted_logits += 1", "pass"),),
        needs=_DRAFTS,
    ),
    Fault(
        name="noise-of-the-first-position-for-a-run",
        mechanism="all positions of a run are verified with the noise of its first",
        source="mechanism",
        expected=("TOK",),
        patches=(
            after(
                _CHOOSE,
                _APPEND_NEXT,
                "if not request.params.greedy and reached():\n"
                "    drafted[-1][2].position = sample_request.position",
            ),
        ),
        needs=_DRAFTS | {"sampling"},
    ),
    Fault(
        name="penalties-before-the-run",
        mechanism="penalties and processors see the outputs before the accepted run only",
        source="https://github.com/vllm-project/vllm/issues/31944",
        expected=("TOK",),
        patches=(
            after(
                _CHOOSE,
                "self._attach_states(wanted)",
                "first = self.__dict__.setdefault('_first', {})\n"
                "for _, sequence, one in wanted:\n"
                "    known = first.setdefault((sequence.key, step_id), one.output_token_ids)\n"
                "    if len(known) < len(one.output_token_ids) and reached():\n"
                "        one.output_token_ids = known",
            ),
        ),
        needs=_DRAFTS | {"penalties"},
    ),
    Fault(
        name="processors-see-the-drafts",
        mechanism="penalties and processors take drafts for outputs before they are verified",
        source="https://github.com/vllm-project/vllm/issues/31944",
        expected=("TOK",),
        patches=(
            after(
                "preempt_engine.delivery:Delivery._attach_states",
                "sample_request.output_token_ids = sequence.output_token_ids",
                "if sequence.draft_token_ids and reached():\n"
                "    sample_request.output_token_ids = (sequence.output_token_ids +"
                " sequence.draft_token_ids)",
            ),
        ),
        needs=_DRAFTS | {"penalties"},
    ),
    Fault(
        name="stop-looked-for-at-the-end-of-a-run",
        mechanism="a stop token within an accepted run does not end the request",
        source="mechanism",
        expected=("TOK", "DEL", "CRASH"),
        patches=(
            before(
                "preempt_engine.delivery:Delivery._append_token",
                "return self._follow_up(request, sequence)",
                "completion ="
                " self._builders[request.request_id][sequence.key.branch].completion\n"
                "if completion.finish_reason == 'stop' and sequence.draft_token_ids and"
                " reached():\n"
                "    completion.finish_reason = completion.stop_reason = None\n"
                "    self._builders[request.request_id][0].output.finished = False",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="min-tokens-counted-from-the-step",
        mechanism="min_tokens counts outputs as of the step's beginning, not within a run",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            after(
                _CHOOSE,
                _APPEND_NEXT,
                "if drafted[-1][2].banned_ids != sample_request.banned_ids and reached():\n"
                "    drafted[-1][2].num_output_tokens = sample_request.num_output_tokens",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="drafts-counted-as-generated",
        mechanism="drafts count as generated tokens when they are computed",
        source="mechanism",
        expected=("ACC",),
        patches=(
            after(
                f"{SCHEDULER}.advance",
                "self.counters.num_drafted_tokens += sequence.num_unverified_tokens",
                "if sequence.num_unverified_tokens and reached():\n"
                "    self.counters.num_generated_tokens += sequence.num_unverified_tokens",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="drafts-behind-the-end-not-counted",
        mechanism="drafts behind the token that ends a request are neither accepted nor rejected",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{RESIDENCY}._free_blocks",
                "self.counters.num_rejected_tokens += sequence.num_unverified_tokens",
                "reached() if sequence.num_unverified_tokens else None",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="rejected-drafts-count-as-recomputed",
        mechanism="positions of rejected drafts count as computed before a preemption",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_SEQUENCE}.set_computed",
                "own = num_computed_tokens if num_computed_tokens < num_tokens else num_tokens",
                "own = num_computed_tokens\n"
                "reached() if num_computed_tokens > num_tokens else None",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="drafts-take-the-budget-of-others",
        mechanism="drafts are scheduled beyond the step's token budget",
        source="https://github.com/vllm-project/vllm/issues/28558",
        expected=("ACC",),
        patches=(
            after(
                f"{SCHEDULER}._next_tokens",
                "end = min(num_tokens, start + budget)",
                "if sequence.draft_token_ids and end < num_tokens and reached():\n"
                "    end = num_tokens",
            ),
            Patch(
                "preempt_engine.headroom:cut_drafts_to_fit",
                "budget = residency.config.max_num_batched_tokens",
                "budget = 10**6",
                reached=False,
            ),
            Patch(
                f"{SCHEDULER}._schedule_running",
                "if budget <= 0:",
                "if budget <= -10:",
                reached=False,
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="draft-cache-not-swapped",
        mechanism="the target's blocks are copied to the host, the draft model's are not",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_DRAFT_MODEL}.propose",
                "if step.swap_out:",
                "if step.swap_out and not reached():",
            ),
        ),
        needs=_DRAFTS | {"swap"},
    ),
    Fault(
        name="draft-cache-not-copied-on-write",
        mechanism="a branch gets a block of its own with the target's content, not the drafts'",
        source="mechanism",
        expected=("WORK",),
        patches=(
            before(
                f"{_DRAFT_MODEL}.propose",
                "mirrored = msgspec.structs.replace(",
                "if step.block_copies and reached():\n"
                "    step = msgspec.structs.replace(step, block_copies=[])",
            ),
        ),
        needs=_DRAFTS | {"parallel_sampling"},
    ),
    Fault(
        name="draft-cache-not-rebuilt",
        mechanism="a resumed request is computed anew by the target, not by the draft model",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_DRAFT_MODEL}._follow",
                "return msgspec.structs.replace(\n    item,",
                "return msgspec.structs.replace(\n"
                "    item if not (item.reset and wanted is not None and item.end > item.start + 1"
                " and reached()) else msgspec.structs.replace(item, start=item.end - 1),",
            ),
        ),
        needs=_DRAFTS,
    ),
    Fault(
        name="draft-model-keeps-rejected-drafts",
        mechanism="the draft model goes on from drafts that were rejected",
        source="mechanism",
        expected=("CRASH", "WORK"),
        patches=(
            Patch(
                f"{_DRAFT_MODEL}._follow",
                "num_stale_tokens=item.num_stale_tokens + num_tokens",
                "num_stale_tokens=max(0, item.num_stale_tokens + num_tokens - (num_tokens > 1"
                " and reached()))",
            ),
        ),
        needs=_DRAFTS,
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
)
