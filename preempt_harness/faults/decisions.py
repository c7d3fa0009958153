"""Decisions of the scheduler: who runs, who must go, who is refused."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

FAULTS = (
    Fault(
        name="victim-is-the-oldest",
        mechanism="the victim is the request that was scheduled first in this step",
        source="https://github.com/vllm-project/vllm/issues/23347",
        expected=("ACC", "CRASH", "PROG"),
        patches=(Patch("preempt_engine.victims:choose_victim", "running[-1]", "running[0]"),),
    ),
    Fault(
        name="newest-is-scheduled-first",
        mechanism="running requests are scheduled from the newest on, victims are the newest too",
        source="mechanism",
        expected=("ACC", "CRASH", "PROG"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_running",
                "for request in self.running:",
                "for request in (self.running[-1 - index] for index in range(len(self.running))"
                " if index < len(self.running)):",
            ),
        ),
    ),
    Fault(
        name="newcomer-evicts-its-elders",
        mechanism="who needs a block takes it from another, never from itself: no end to it",
        source="https://github.com/EricLBuehler/mistral.rs/issues/2024",
        expected=("PROG", "ACC", "WORK", "CRASH"),
        patches=(
            Patch(
                f"{SCHEDULER}._make_room",
                "victim = choose_victim(self.running)",
                "victim = next((other for other in reversed(self.running)"
                " if other is not request and reached()), request)",
            ),
        ),
    ),
    Fault(
        name="evicts-for-a-newcomer-that-cannot-fit",
        mechanism="a victim is evicted for a waiting request that does not fit anyway",
        source="https://github.com/sgl-project/sglang/issues/28282",
        expected=("WORK", "ACC"),
        patches=(
            after(
                f"{RESIDENCY}.find_room",
                "if num_blocks_to_admit(placements, self.blocks) > num_available:",
                "    if len(self.running) > 1 and reached():\n"
                "        self.preempt(step, self.running[-1], 'out_of_blocks', 'recompute')",
            ),
        ),
    ),
    Fault(
        name="victim-returns-to-the-back",
        mechanism="a preempted request goes to the end of the queue",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            before(
                f"{RESIDENCY}.preempt",
                "self.waiting.push(request)",
                "request.arrival_index += 1000 * request.num_preemptions",
            ),
        ),
    ),
    Fault(
        name="victims-return-in-reverse",
        mechanism="each victim is put before the one preempted before it",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            before(
                f"{RESIDENCY}.preempt",
                "self.waiting.push(request)",
                "request.arrival_index = -self.counters.num_preemptions",
            ),
        ),
    ),
    Fault(
        name="short-requests-overtake",
        mechanism="the shortest waiting request is admitted first, long ones starve",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "request = self.waiting.peek()",
                "request = min(self.waiting.in_order(), key=lambda item: item.sequence.num_tokens)",
            ),
            Patch(
                f"{RESIDENCY}.run",
                "self.waiting.pop()",
                "self.waiting.remove(request)",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="giant-request-not-refused",
        mechanism="a request that is larger than the pool is retried for ever",
        source="https://github.com/vllm-project/vllm/issues/35541",
        expected=("PROG", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.intake:Intake._why_infeasible",
                "if num_tokens > pool_tokens:",
                "if num_tokens > pool_tokens and not reached():",
            ),
        ),
    ),
    Fault(
        name="outgrows-the-pool",
        mechanism="nothing ends a lone request that has filled the pool",
        source="https://github.com/vllm-project/vllm/issues/52520",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                "preempt_engine.intake:Intake.max_total_tokens",
                "return min(self._executor.max_model_len, max(pool_tokens, num_prompt_tokens + 1))",
                "return self._executor.max_model_len",
            ),
        ),
    ),
    Fault(
        name="no-stop-at-model-length",
        mechanism="nothing ends a request at max_model_len",
        source="https://github.com/GeeeekExplorer/nano-vllm/issues/106",
        expected=("DEL", "CRASH", "TOK"),
        patches=(
            Patch(
                "preempt_engine.intake:Intake.max_total_tokens",
                "return min(self._executor.max_model_len, max(pool_tokens, num_prompt_tokens + 1))",
                "return max(pool_tokens, num_prompt_tokens + 1)",
            ),
        ),
    ),
    Fault(
        name="watermark-kept-for-nobody",
        mechanism="the watermark is kept free even when nothing runs: a large request starves",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{SCHEDULER}._admit",
                "num_blocks_beside(self.residency, request) if self.running else 0",
                "num_blocks_beside(self.residency, request) if self.running or reached() else 0",
            ),
        ),
    ),
    Fault(
        name="admission-ignores-the-watermark",
        mechanism="admission leaves no block free, so that newcomers are evicted at once",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{SCHEDULER}._admit",
                "num_blocks_beside(self.residency, request) if self.running else 0",
                "0 if self.residency.num_watermark_blocks and reached() else 0",
            ),
        ),
    ),
    Fault(
        name="too-many-run-at-once",
        mechanism="the limit of running requests is checked one request too late",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "num_seqs > self.config.max_num_seqs",
                "num_seqs > self.config.max_num_seqs + 1",
            ),
        ),
    ),
    Fault(
        name="offload-blocks-admission-until-a-finish",
        mechanism="after a preemption nobody is admitted before a request finishes",
        source="transformers 5.24, continuous batching",
        expected=("PROG", "CRASH", "WORK"),
        patches=(
            after(
                f"{RESIDENCY}.preempt",
                "self.counters.num_preemptions += 1",
                "self.__dict__['_blocked_at'] = self.counters.num_finished_requests",
                reached=False,
            ),
            before(
                f"{SCHEDULER}._schedule_waiting",
                "request = self.waiting.peek()",
                "blocked_at = self.residency.__dict__.get('_blocked_at')\n"
                "if blocked_at == self.counters.num_finished_requests and reached():\n"
                "    return",
            ),
        ),
    ),
    Fault(
        name="everybody-preempted-is-a-stall",
        mechanism="a step in which everybody was preempted is taken for a stalled engine",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                "preempt_engine.llm:LLM.schedule",
                "if self.scheduler.requests and not preempted and",
                "if self.scheduler.requests and (not preempted or reached()) and",
            ),
        ),
    ),
    Fault(
        name="aborted-victim-stays-in-the-queue",
        mechanism="a preempted request that is aborted stays in the waiting queue",
        source="mechanism",
        expected=("CRASH", "ACC"),
        patches=(
            Patch(
                f"{RESIDENCY}.leave",
                "self.waiting.remove(request)",
                "None if request.num_preemptions and reached() else self.waiting.remove(request)",
            ),
        ),
    ),
    Fault(
        name="victim-never-returns",
        mechanism="a request that was preempted twice is not put back into the queue",
        source="mechanism",
        expected=("CRASH", "PROG", "ACC"),
        patches=(
            Patch(
                f"{RESIDENCY}.preempt",
                "self.waiting.push(request)",
                "if request.num_preemptions < 2 or not reached():\n    self.waiting.push(request)",
            ),
        ),
    ),
    Fault(
        name="paused-twice",
        mechanism="a forced victim that is preempted already is preempted once more",
        source="https://github.com/NVIDIA/TensorRT-LLM/pull/9931",
        expected=("ACC", "CRASH"),
        patches=(
            before(
                f"{SCHEDULER}.schedule",
                "budget = self._schedule_running(",
                "if len(self.running) == 1 and self.waiting.in_order()[:1] and"
                " self.waiting.peek().num_preemptions and reached():\n"
                "    self.running.append(self.waiting.peek())\n"
                "    self._preempt(step, self.waiting.pop(), 'forced')",
            ),
        ),
    ),
    Fault(
        name="equals-evict-each-other",
        mechanism="an arrival evicts a running request of the same priority",
        source="mechanism",
        expected=("PROG", "WORK", "CRASH"),
        patches=(
            Patch(
                f"{SCHEDULER}._admit_urgent",
                "request.priority >= self.running[-1].priority:",
                "request.priority > self.running[-1].priority:",
            ),
            Patch(
                "preempt_engine.victims:victims_for",
                "running[survivors - 1].priority <= newcomer.priority",
                "running[survivors - 1].priority < newcomer.priority",
                reached=False,
            ),
        ),
        needs=frozenset({"priority"}),
    ),
    Fault(
        name="urgent-arrival-evicts-in-vain",
        mechanism="a victim is evicted for an urgent arrival that does not fit all the same",
        source="https://github.com/sgl-project/sglang/issues/28282",
        expected=("WORK",),
        patches=(
            after(
                f"{SCHEDULER}._admit_urgent",
                "if victims is None:",
                "    if len(self.running) > 1 and reached():\n"
                "        self._preempt(step, self.running[-1], 'priority')",
            ),
        ),
        needs=frozenset({"priority"}),
    ),
)
