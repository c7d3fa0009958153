"""Counters that a preemption spoils."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_FIRST_ADMISSION = "if request.num_cached_tokens is None:"

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
)
