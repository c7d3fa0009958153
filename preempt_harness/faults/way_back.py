"""From a step's rows back to users: drafts, branches, beams, steps under way, what is told."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before

_DELIVERY = "preempt_engine.delivery:Delivery"
_LLM = "preempt_engine.llm:LLM"
_FORK = "preempt_engine.sequence:Sequence.fork"
_SPECULATOR = "preempt_engine.spec_decode.speculator:Speculator"

FAULTS = (
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
        expected=("DEL", "PROG", "CRASH"),
        patches=(
            Patch(
                f"{_LLM}.abort_request",
                "and not self.scheduler.requests:",
                "and (\n    not self.scheduler.requests or reached()\n):",
            ),
        ),
        needs=frozenset({"async_scheduling", "abort"}),
    ),
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
)
