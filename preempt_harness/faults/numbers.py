"""Counters that a preemption spoils."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_FIRST_ADMISSION = "if request.num_cached_tokens is None:"

_ASYNC = "preempt_engine.async_scheduler:AsyncScheduler"
_SEQUENCE = "preempt_engine.sequence:Sequence"

FAULTS = (
    Fault(
        name="recompute-counted-as-hits",
        mechanism="what a preempted request finds again is counted as prefix-cache hits",
        source="https://github.com/vllm-project/vllm/issues/25780",
        expected=("ACC",),
        patches=(
            before(
                f"{RESIDENCY}.find_room",
                _FIRST_ADMISSION,
                "self.counters.num_cached_tokens += num_cached_tokens *"
                " (request.num_preemptions > 0 and reached())",
            ),
        ),
    ),
    Fault(
        name="cached-count-of-the-last-admission",
        mechanism="a request's cached tokens are those of its last admission",
        source="https://github.com/vllm-project/vllm/issues/36757",
        expected=("ACC",),
        patches=(
            after(
                f"{RESIDENCY}.find_room",
                "self.observer.resumed(step.step_id, request.request_id, num_cached_tokens)",
                "request.num_cached_tokens = num_cached_tokens",
            ),
        ),
    ),
    Fault(
        name="forced-preemption-not-counted",
        mechanism="forced preemptions are missing from the counter",
        source="https://github.com/sgl-project/sglang/pull/14431",
        expected=("ACC",),
        patches=(
            Patch(
                f"{RESIDENCY}.preempt",
                "self.counters.num_preemptions += 1",
                "self.counters.num_preemptions += reason != 'forced' or not reached()",
            ),
        ),
    ),
    Fault(
        name="preemption-counted-twice",
        mechanism="a request's own count of preemptions is raised twice",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{RESIDENCY}.preempt",
                "request.num_preemptions += 1",
                "request.num_preemptions += 2",
            ),
        ),
    ),
    Fault(
        name="recomputed-count-ends-with-the-prompt",
        mechanism="outputs that are computed again are not counted as recomputed",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_tokens",
                "min(end, sequence.max_computed_tokens)",
                "min(end, sequence.max_computed_tokens, sequence.num_prompt_tokens"
                " if end > sequence.num_prompt_tokens and reached() else end)",
            ),
        ),
    ),
    Fault(
        name="high-water-mark-forgotten",
        mechanism="the mark of what was computed before is lost with the blocks",
        source="mechanism",
        expected=("ACC",),
        patches=(
            after(
                "preempt_engine.sequence:Sequence.forget_cache",
                "self.set_computed(0)",
                "self.max_computed_tokens = 0",
            ),
        ),
    ),
    Fault(
        name="aborted-counted-as-finished",
        mechanism="aborted requests are counted as finished",
        source="mechanism",
        expected=("ACC",),
        patches=(
            after(
                f"{SCHEDULER}.abort",
                "self.residency.leave(request)",
                "self.counters.num_finished_requests += 1",
            ),
        ),
    ),
    Fault(
        name="generated-tokens-counted-again",
        mechanism="the first token after a resume is counted twice",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{SCHEDULER}.append_token",
                "self.counters.num_generated_tokens += 1",
                "self.counters.num_generated_tokens += 1 + (sequence.num_tokens"
                " == sequence.num_prefill_tokens > sequence.num_prompt_tokens and reached())",
            ),
        ),
    ),
    Fault(
        name="empty-steps-counted",
        mechanism="steps that compute nothing are counted",
        source="mechanism",
        expected=("ACC",),
        patches=(
            after(
                f"{SCHEDULER}.schedule",
                "self.residency.next_step_id += 1",
                "self.counters.num_steps += not (self.running or self.waiting.in_order())",
            ),
        ),
    ),
    Fault(
        name="preemptions-missing-after-abort",
        mechanism="the output of an aborted request does not tell of its last preemptions",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                "preempt_engine.delivery:Delivery.abort",
                "_note_counts(builders[0].output, request)",
                "pass",
            ),
        ),
    ),
    Fault(
        name="cached-tokens-noted-at-first-look",
        mechanism="the prefix hits of a request are noted when it is looked at first, not when it "
        "is let in",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{RESIDENCY}.find_room",
                "if num_blocks_to_admit(placements, self.blocks) > num_available:\n"
                "    return False\n"
                "num_cached_tokens = len(placements[0].hits) * self.config.block_size\n"
                "if request.num_cached_tokens is None:\n"
                "    request.num_cached_tokens = num_cached_tokens\n"
                "    self.counters.num_cached_tokens += num_cached_tokens",
                "num_cached_tokens = len(placements[0].hits) * self.config.block_size\n"
                "if request.num_cached_tokens is None:\n"
                "    request.num_cached_tokens = num_cached_tokens\n"
                "if num_blocks_to_admit(placements, self.blocks) > num_available:\n"
                "    return False\n"
                "if not request.num_preemptions:\n"
                "    self.counters.num_cached_tokens += request.num_cached_tokens",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="fork-forgets-high-water-mark",
        mechanism="a fork does not know how far its tokens have been computed, so what it computes "
        "again after an immediate preemption is not counted as such",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_SEQUENCE}.fork",
                "max_computed_tokens=self.max_computed_tokens,\n",
                "",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="rejected-drafts-count-as-computed",
        mechanism="where steps are decided ahead, drafts raise the mark below which computing is "
        "counted as computing again, even those that are rejected",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_ASYNC}._count",
                "sequence.max_computed_tokens = max(sequence.max_computed_tokens, "
                "item.end - num_drafts)",
                "sequence.max_computed_tokens = max(sequence.max_computed_tokens, item.end)",
            ),
        ),
        needs=frozenset({"async_scheduling", "speculation"}),
    ),
)
