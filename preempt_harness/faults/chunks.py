"""Chunked prefill: where a chunk ends, and what is kept between chunks."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

FAULTS = (
    Fault(
        name="chunk-computed-before-the-hit",
        mechanism="the tokens to schedule are counted before the hit raises the computed count",
        source="https://github.com/GeeeekExplorer/nano-vllm/pull/207",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{SCHEDULER}._next_tokens",
                "end = min(num_tokens, start + budget)",
                "end = start + min(num_tokens, budget)\n"
                "end = end if start and not sequence.known_to_workers and reached()"
                " else min(num_tokens, start + budget)",
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
                f"{SCHEDULER}.advance",
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
                f"{SCHEDULER}._schedule_tokens",
                "wanted if wanted < end else end,",
                "wanted if wanted < end else end - (end < sequence.num_tokens and reached()),",
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
                f"{RESIDENCY}.find_room",
                "if num_blocks_to_admit(placements, self.blocks) > num_available:",
                "left = self.config.max_num_batched_tokens\n"
                "later = sum(max(0, self.blocks.blocks_for(item.sequence.num_tokens)"
                " - self.blocks.blocks_for(len(item.hits) * self.config.block_size + left))"
                " for item in placements)\n"
                "if num_blocks_to_admit(placements, self.blocks) - later > num_available:",
                reached=False,
            ),
            Patch(
                f"{RESIDENCY}._build_table",
                "self.blocks.grow(sequence, sequence.num_tokens)",
                "end = len(placement.hits) * self.config.block_size"
                " + self.config.max_num_batched_tokens\n"
                "self.blocks.grow(sequence, end if end < sequence.num_tokens and reached()"
                " else sequence.num_tokens)",
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
                f"{SCHEDULER}._schedule_running",
                "budget -= self._schedule_work(step, request, work, num_blocks)",
                "self._schedule_work(step, request, work, num_blocks)",
            ),
            Patch(f"{SCHEDULER}._schedule_running", "budget -= num_tokens", "budget -= 0"),
        ),
    ),
    Fault(
        name="budget-charged-for-hits",
        mechanism="tokens that were found in the cache are taken from the budget too",
        source="mechanism",
        expected=("WORK", "PROG", "CRASH", "ACC"),
        patches=(
            after(
                f"{SCHEDULER}._schedule_waiting",
                "work = self._next_tokens(request, budget)",
                "hits = request.sequence.num_computed_tokens\n"
                "budget -= hits if hits and reached() else 0",
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
                f"{SCHEDULER}.advance",
                "sequence.set_computed(item.end)",
                "sequence.set_computed(0 if self._requests[row].num_preemptions"
                " and item.end < sequence.num_tokens and reached() else item.end)",
            ),
        ),
    ),
)
