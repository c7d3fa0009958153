"""Precedence: who is served first, after preemptions, changes of priority and aborts."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import PREEMPT, PUSH, RESIDENCY, SCHEDULER

_ORDER = ("PROG-ORDER", "WORK", "ACC")
_VICTIMS = "preempt_engine.victims"

FAULTS = (
    Fault(
        name="victim-of-the-urgent-demoted",
        mechanism="a request that had to go for a more urgent one is less urgent from then on",
        source="mechanism",
        expected=_ORDER,
        patches=(
            before(
                PREEMPT, PUSH, 'if reason == "priority" and reached():\n    request.priority += 1'
            ),
        ),
        needs=frozenset({"priority"}),
    ),
    Fault(
        name="place-lost-at-the-second-preemption",
        mechanism="a request that is preempted for the second time goes behind all others",
        source="mechanism",
        expected=_ORDER,
        patches=(
            before(
                PREEMPT,
                PUSH,
                "if request.num_preemptions >= 2 and reached():\n"
                "    latest = max(other.arrival_index for other in self.requests.values())\n"
                "    request.arrival_index = latest + 1e-6",
            ),
        ),
    ),
    Fault(
        name="those-preempted-more-often-are-spared",
        mechanism="who lacks blocks gives itself up rather than take those of one that was "
        "preempted more often",
        source="mechanism",
        expected=_ORDER,
        patches=(
            after(
                f"{SCHEDULER}._make_room",
                "victim = choose_victim(self.running)",
                "if request is not self.running[0] and (\n"
                "    victim.num_preemptions > request.num_preemptions and reached()\n"
                "):\n"
                "    victim = request",
            ),
        ),
    ),
    Fault(
        name="returns-as-the-youngest",
        mechanism="a request that comes back is the last among those that run, and the next victim",
        source="mechanism",
        expected=_ORDER,
        patches=(
            Patch(
                f"{RESIDENCY}.run",
                "insort(self.running, request, key=_precedence)",
                "if request.num_preemptions and reached():\n"
                "    self.running.append(request)\n"
                "else:\n"
                "    insort(self.running, request, key=_precedence)",
            ),
        ),
    ),
    Fault(
        name="victim-overtaken-in-the-queue",
        mechanism="when a preempted request does not fit, the next in the queue is let in instead",
        source="mechanism",
        expected=_ORDER,
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "if num_seqs > self.config.max_num_seqs or not self._admit(step, request):\n"
                "    return",
                "most = self.config.max_num_seqs\n"
                "admitted = num_seqs <= most and self._admit(step, request)\n"
                "if not admitted and request.num_preemptions and len(self.waiting) > 1:\n"
                "    self.waiting.pop()\n"
                "    other = self.waiting.peek()\n"
                "    num_seqs += other.num_seqs - request.num_seqs\n"
                "    admitted = num_seqs <= most and self._admit(step, other) and reached()\n"
                "    self.waiting.push(request)\n"
                "    request = other\n"
                "if not admitted:\n"
                "    return",
            ),
        ),
    ),
    Fault(
        name="priority-of-the-waiting-not-applied",
        mechanism="a request whose priority changes while it waits keeps its place in the queue",
        source="mechanism",
        expected=_ORDER,
        patches=(
            Patch(
                f"{RESIDENCY}.set_priority",
                "if is_waiting:\n    self.waiting.remove(request)",
                "if is_waiting and not reached():\n    self.waiting.remove(request)",
            ),
            Patch(
                f"{RESIDENCY}.set_priority",
                "if is_waiting:\n    self.waiting.push(request)",
                "if is_waiting:\n    pass",
                reached=False,
            ),
        ),
        needs=frozenset({"set_priority"}),
    ),
    Fault(
        name="priority-of-the-running-not-applied",
        mechanism="a running request whose priority changes keeps its place among those that run",
        source="mechanism",
        expected=_ORDER,
        patches=(Patch(f"{RESIDENCY}.set_priority", "self.running.sort(key=_precedence)", "pass"),),
        needs=frozenset({"set_priority"}),
    ),
    Fault(
        name="queue-out-of-order-after-a-removal",
        mechanism="taking a request out of the middle of the queue leaves the heap out of order",
        source="mechanism",
        expected=_ORDER,
        patches=(
            Patch(
                "preempt_engine.admission:WaitingQueue.remove", "heapq.heapify(self._heap)", "pass"
            ),
        ),
        needs=frozenset({"abort"}),
    ),
    Fault(
        name="equals-evicted-by-arrival",
        mechanism="urgent is whoever precedes, not whoever has the higher priority: a request that "
        "came back to its place evicts later ones of the same priority",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{SCHEDULER}._admit_urgent",
                "if not is_owed and request.priority >= self.running[-1].priority:",
                "if not is_owed and request.precedence > self.running[-1].precedence:",
                reached=False,
            ),
            Patch(
                f"{_VICTIMS}:victims_for",
                "if not survivors or running[survivors - 1].priority <= newcomer.priority:",
                "if not survivors or running[survivors - 1].precedence <= newcomer.precedence:",
            ),
        ),
        needs=frozenset({"priority"}),
    ),
    Fault(
        name="urgent-forgets-hits-of-victims",
        mechanism="blocks that a more urgent request shares with its victims are counted as shared "
        "and as freed: it evicts too few, and does not fit",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_VICTIMS}:victims_for",
                "num_wanted = num_blocks + freed.num_of(hits) + "
                "(num_watermark_blocks if survivors else 0)",
                "num_wanted = num_blocks + (num_watermark_blocks if survivors else 0)",
            ),
        ),
        needs=frozenset({"prefix_caching", "priority"}),
    ),
)
