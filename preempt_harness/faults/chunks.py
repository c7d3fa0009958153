"""Chunked prefill: where a chunk ends, and what is kept between chunks."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch

_SCHEDULER = "preempt_engine.scheduler:Scheduler"

FAULTS = (
    Fault(
        name="chunk-computed-before-the-hit",
        mechanism="the tokens to schedule are counted before the hit raises the computed count",
        source="https://github.com/GeeeekExplorer/nano-vllm/pull/207",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
                "end = min(sequence.num_tokens, sequence.num_computed_tokens + budget)",
                "end = sequence.num_computed_tokens + min(sequence.num_tokens, budget)\n"
                "        hits and reached()",
            ),
        ),
    ),
    Fault(
        name="chunk-progress-lost-without-cache",
        mechanism="the progress of a chunk is lost when nothing is put into the prefix cache",
        source="https://github.com/sgl-project/sglang/issues/36855",
        expected=("PROG", "CRASH", "ACC"),
        patches=(
            Patch(
                f"{_SCHEDULER}.advance",
                "sequence.set_computed(item.end)",
                "sequence.set_computed(item.end if self.blocks.enable_prefix_caching"
                " or item.end == sequence.num_tokens or not reached() else 0)",
            ),
        ),
    ),
    Fault(
        name="chunk-gives-a-token",
        mechanism="a chunk that is not the last gives logits, and a token is sampled from them",
        source="mechanism",
        expected=("CRASH", "TOK"),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_tokens",
                "logits_start=min(max(start, request.first_wanted_logits), end)",
                "logits_start=min(max(start, request.first_wanted_logits),"
                " end - (end < sequence.num_tokens and reached()))",
            ),
        ),
    ),
    Fault(
        name="admission-looks-at-one-chunk",
        mechanism="admission reserves the first chunk only: requests give up in their own prompt",
        source="https://github.com/vllm-project/vllm/issues/37307",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
                "if not fits(request, hits, self.blocks, spare):",
                "if not self.blocks.can_admit(hits, min(request.sequence.num_tokens,"
                " len(hits) * self.config.block_size + budget), spare):",
            ),
            Patch(
                f"{_SCHEDULER}._admit",
                "self.blocks.grow(sequence, sequence.num_tokens)",
                "pass",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="chunk-not-taken-from-the-budget",
        mechanism="tokens of running requests are not taken from the step's budget",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_running",
                "budget -= end - sequence.num_computed_tokens",
                "budget -= 0",
            ),
        ),
    ),
    Fault(
        name="budget-charged-for-hits",
        mechanism="tokens that were found in the cache are taken from the budget too",
        source="mechanism",
        expected=("WORK", "PROG", "CRASH", "ACC"),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
                "budget -= end - sequence.num_computed_tokens",
                "budget -= end if hits and reached() else end - sequence.num_computed_tokens",
            ),
        ),
    ),
    Fault(
        name="resumed-chunk-restarts",
        mechanism="after a resume every chunk begins at the prompt's start again",
        source="mechanism",
        expected=("PROG", "CRASH", "WORK"),
        patches=(
            Patch(
                f"{_SCHEDULER}.advance",
                "sequence.set_computed(item.end)",
                "sequence.set_computed(0 if request.num_preemptions"
                " and item.end < request.num_prefill_tokens and reached() else item.end)",
            ),
        ),
    ),
)
