"""Branches of one request: what is kept, reckoned and told for each, and how each ends."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after
from preempt_harness.faults.places import APPEND, BUILDER_APPEND, DELIVERY

_STATES_OF = "preempt_engine.sampling.history:ProcessorStates.of"
_NEW_STATE = "state = ProcessorState(recipe.build(), prompt_token_ids)"

FAULTS = (
    Fault(
        name="processors-of-later-branches-not-replayed",
        mechanism="after a preemption processors of all branches but the first see no output",
        source="mechanism",
        expected=("TOK",),
        patches=(
            after(
                _STATES_OF,
                _NEW_STATE,
                "is_later = request.num_preemptions and sequence.key.branch\n"
                "if is_later and sequence.num_output_tokens and reached():\n"
                "    state._follow([])\n"
                "    state._seen = sequence.output_token_ids",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="branches-share-processors-after-a-return",
        mechanism="the branches of a request that has come back share one set of processors",
        source="mechanism",
        expected=("TOK", "CRASH"),
        patches=(
            after(
                _STATES_OF,
                _NEW_STATE,
                "for key, (num, other) in self._states.items():\n"
                "    is_of_it = key.request_id == request.request_id\n"
                "    if is_of_it and num == request.num_preemptions > 0 and reached():\n"
                "        state = ProcessorState(other._processors, prompt_token_ids)",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="min-tokens-read-from-the-first-branch",
        mechanism="how many tokens a branch has is read from the request's first branch",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                f"{DELIVERY}._sample_request",
                "num_output_tokens=sequence.num_output_tokens,",
                "num_output_tokens=request.sequence.num_output_tokens\n"
                "if request.sequence is not sequence and reached()\n"
                "else sequence.num_output_tokens,",
            ),
        ),
        needs=frozenset({"parallel_sampling", "min_tokens"}),
    ),
    Fault(
        name="sum-of-a-branch-goes-to-the-first",
        mechanism="a later branch's first log probability after a return is added to the first sum",
        source="mechanism",
        expected=("DEL",),
        patches=(
            after(
                APPEND,
                BUILDER_APPEND,
                "is_first = sequence.num_tokens == sequence.num_prefill_tokens + 1\n"
                "is_first = is_first and request.num_preemptions and sequence.key.branch\n"
                "if is_first and token.logprobs is not None and reached():\n"
                "    outputs = self._builders[request.request_id][0].output.outputs\n"
                "    logprob = token.logprobs[token.token_id]\n"
                "    outputs[sequence.key.branch].cumulative_logprob -= logprob\n"
                "    outputs[0].cumulative_logprob += logprob",
            ),
        ),
        needs=frozenset({"parallel_sampling", "logprobs"}),
    ),
    Fault(
        name="abort-renames-the-ends-of-branches",
        mechanism="an abort after a preemption is told of branches too that had ended before",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                f"{DELIVERY}._finish_branches",
                "if not builder.completion.finished():",
                "has_ended = builder.completion.finished()\n"
                "if has_ended and builder.output.num_preemptions and reached():\n"
                "    has_ended = False\n"
                "if not has_ended:",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="stream-of-an-aborted-victim-has-no-end",
        mechanism="the stream of a victim tells no end where the end brings no token",
        source="mechanism",
        expected=("DEL",),
        patches=(
            Patch(
                "preempt_engine.stream:DeltaReader._delta",
                "if now == told and not branch.finished():",
                "is_silent = now == told and branch.finished()\n"
                "if is_silent and self._output.num_preemptions and reached():\n"
                "    return None\n"
                "if now == told and not branch.finished():",
            ),
        ),
    ),
    Fault(
        name="end-in-the-step-of-the-return-not-told",
        mechanism="who ends with its first token after a return is missing from the step's outputs",
        source="mechanism",
        expected=("CRASH", "DEL"),
        patches=(
            after(
                f"{DELIVERY}._choose_tokens",
                "outputs[output.request_id] = output",
                "is_first = sequence.num_tokens == sequence.num_prefill_tokens + 1\n"
                "if output.finished and request.num_preemptions and is_first and reached():\n"
                "    del outputs[output.request_id]",
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
        name="beams-want-old-logits",
        mechanism="beams do not note which logits they have seen, and read old ones on resume",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            Patch(
                "preempt_engine.delivery:Delivery.deliver",
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
        patches=(
            Patch(
                "preempt_engine.delivery:Delivery._finish_search",
                "_note_counts(output, request)",
                "pass",
            ),
        ),
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
)
