"""Pace: steps that do less than they could, and admissions that are too timid or too bold."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_SCHEDULE_WAITING = f"{SCHEDULER}._schedule_waiting"

FAULTS = (
    Fault(
        name="admission-rests-after-a-preemption",
        mechanism="nobody is admitted in the three steps after a preemption",
        source="mechanism",
        expected=("WORK",),
        patches=(
            before(
                _SCHEDULE_WAITING,
                "if not len(self.waiting) or budget <= 0:",
                "seen, until = getattr(self, '_rest', (0, 0))\n"
                "if self.counters.num_preemptions != seen:\n"
                "    until = step.step_id + 3\n"
                "self._rest = self.counters.num_preemptions, until\n"
                "if len(self.waiting) and budget > 0 and self.running:\n"
                "    if step.step_id < until and reached():\n"
                "        return",
            ),
        ),
    ),
    Fault(
        name="one-return-a-step",
        mechanism="behind a request that comes back nobody else is admitted in the same step",
        source="mechanism",
        expected=("WORK",),
        patches=(
            after(
                _SCHEDULE_WAITING,
                "budget -= self._schedule_work(step, request, work, num_blocks)",
                "if request.num_preemptions and len(self.waiting) and budget > 0 and reached():\n"
                "    return",
            ),
        ),
    ),
    Fault(
        name="twice-preempted-waits-for-an-empty-engine",
        mechanism="a request preempted twice that is last in the queue is let in when nobody runs",
        source="mechanism",
        expected=("WORK",),
        patches=(
            before(
                _SCHEDULE_WAITING,
                "num_seqs += request.num_seqs",
                "is_last = len(self.waiting) == 1 and request.num_preemptions > 1\n"
                "if is_last and self.running and reached():\n"
                "    return",
            ),
        ),
    ),
    Fault(
        name="reprefill-gets-half-of-the-budget",
        mechanism="a request that comes back is given half of what is left of the token budget",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                _SCHEDULE_WAITING,
                "work = self._next_tokens(request, budget)",
                "most = budget\n"
                "if request.num_preemptions and budget > 1 and reached():\n"
                "    most = budget // 2\n"
                "work = self._next_tokens(request, most)",
            ),
        ),
    ),
    Fault(
        name="returned-prefill-goes-on-every-second-step",
        mechanism="who was preempted in prefill computes in every second step from its return on",
        source="mechanism",
        expected=("WORK",),
        patches=(
            before(
                f"{SCHEDULER}._schedule_running",
                "if request.num_seqs == 1 and (num_tokens := self._go_on(step, request, budget)):",
                "is_prefill = request.num_preemptions and not request.sequence.num_output_tokens\n"
                "if is_prefill and step.step_id % 2 and len(self.running) > 1 and reached():\n"
                "    continue",
            ),
        ),
    ),
    Fault(
        name="victims-give-up-one-place-each",
        mechanism="a victim of several outputs counts for one place when room is made",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                "preempt_engine.victims:victims_for",
                "num_seqs -= victim.num_seqs",
                "num_seqs -= 1 if victim.num_seqs > 1 and reached() else victim.num_seqs",
            ),
        ),
        needs=frozenset({"priority", "parallel_sampling"}),
    ),
    Fault(
        name="returning-ignore-the-watermark",
        mechanism="a request that comes back need leave no block free",
        source="mechanism",
        expected=("WORK",),
        patches=(
            after(
                f"{SCHEDULER}._admit",
                "num_spare = num_blocks_beside(self.residency, request) if self.running else 0",
                "if num_spare and request.num_preemptions and reached():\n    num_spare = 0",
            ),
        ),
        needs=frozenset({"watermark"}),
    ),
    Fault(
        name="victims-do-not-evict",
        mechanism="an urgent request that was preempted evicts nobody who is less urgent",
        source="mechanism",
        expected=("PROG",),
        patches=(
            after(
                f"{SCHEDULER}._admit_urgent",
                "is_owed = request is self._room_made_for",
                "is_urgent = not is_owed and request.priority < self.running[-1].priority\n"
                "if request.num_preemptions and is_urgent and reached():\n"
                "    return",
            ),
        ),
        needs=frozenset({"priority"}),
    ),
    Fault(
        name="change-of-priority-of-the-swapped-ignored",
        mechanism="a swapped request whose priority changes keeps its place in the queue",
        source="mechanism",
        expected=("PROG",),
        patches=(
            after(
                f"{RESIDENCY}.set_priority",
                "is_waiting = request.status is RequestStatus.WAITING",
                "if is_waiting and request.host_blocks and reached():\n"
                "    request.priority = priority\n"
                "    step_id, name = self.next_step_id, request.request_id\n"
                "    if self.observer is not None:\n"
                "        self.observer.priority_changed(step_id, name, priority)\n"
                "    return",
            ),
        ),
        needs=frozenset({"priority", "set_priority", "swap"}),
    ),
    Fault(
        name="change-of-priority-lost-at-a-preemption",
        mechanism="a preempted request is queued with the priority that it arrived with",
        source="mechanism",
        expected=("PROG",),
        patches=(
            after(
                f"{RESIDENCY}.arrive",
                "self.waiting.push(request)",
                "vars(self).setdefault('_first', {})[request.request_id] = request.priority",
                reached=False,
            ),
            before(
                f"{RESIDENCY}.preempt",
                "self.waiting.push(request)",
                "first = vars(self)['_first'][request.request_id]\n"
                "if request.priority != first and reached():\n"
                "    request.priority = first",
            ),
        ),
        needs=frozenset({"priority", "set_priority"}),
    ),
    Fault(
        name="budget-split-with-followers",
        mechanism="the branches of a request get equal shares of the token budget, those that "
        "wait for another's blocks included: it comes back at a fraction of the pace",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{SCHEDULER}._next_tokens",
                "work = []",
                "work = []\nshare = max(1, budget // len(request.sequences))",
                reached=False,
            ),
            Patch(
                f"{SCHEDULER}._next_tokens",
                "end = min(num_tokens, start + budget)",
                "end = min(num_tokens, start + min(budget, share))",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
)
