"""Calls of the engine that run the steps: batches that are generated whole, and streams."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch

_LLM = "preempt_engine.llm:LLM"
_OWN_LOOP = frozenset({"own_loop"})

FAULTS = (
    Fault(
        name="unread-streams-outlive-their-end",
        mechanism="a stream that is closed before anything of it was read leaves its request",
        source="mechanism",
        expected=("CRASH", "DEL"),
        patches=(
            Patch(
                f"{_LLM}.stream",
                "next(deltas)",
                "reached()",
            ),
            Patch(
                f"{_LLM}._deltas",
                'yield StreamDelta(output.request_id, 0, "", [], None, None, None)',
                "pass",
                reached=False,
            ),
        ),
        needs=_OWN_LOOP | {"abort"},
    ),
    Fault(
        name="closed-stream-leaves-who-waits-to-return",
        mechanism="closing a stream withdraws its request only if it runs: a victim that waits for "
        "its return comes back",
        source="mechanism",
        expected=("CRASH", "DEL"),
        patches=(
            Patch(
                f"{_LLM}._withdraw",
                "if not output.finished:",
                "request = self.scheduler.requests.get(output.request_id)\n"
                "if not output.finished and not (\n"
                "    request is not None\n"
                "    and request not in self.scheduler.running\n"
                "    and request.num_preemptions\n"
                "    and reached()\n"
                "):",
            ),
        ),
        needs=_OWN_LOOP | {"abort"},
    ),
    Fault(
        name="batch-returns-when-nobody-runs",
        mechanism="a batch is taken for done when nobody runs: those who were preempted at once "
        "are given back unfinished",
        source="mechanism",
        expected=("CRASH", "DEL", "TOK"),
        patches=(
            Patch(
                f"{_LLM}.generate",
                "while len(outputs) < len(listed) or self.has_unfinished_requests():",
                "while len(outputs) < len(listed) or (\n"
                "    self.has_unfinished_requests()\n"
                "    and not (outputs and not self.scheduler.running and reached())\n"
                "):",
            ),
        ),
        needs=_OWN_LOOP,
    ),
    Fault(
        name="batch-counts-victims-as-room-in-the-queue",
        mechanism="the prompts of a batch wait while the queue is full of newcomers; victims that "
        "stand in it are not counted, and prompts are refused",
        source="mechanism",
        expected=("TOK", "DEL", "CRASH"),
        patches=(
            Patch(
                f"{_LLM}.generate",
                "while not self._intake.queue_is_full() and (arrival := next(arrivals, None)):",
                "while (\n"
                "    not self._intake.queue_is_full()\n"
                "    or (any(r.num_preemptions for r in self.scheduler.waiting.in_order())\n"
                "    and reached())\n"
                ") and (arrival := next(arrivals, None)):",
            ),
        ),
        needs=_OWN_LOOP | {"queue_limit"},
    ),
    Fault(
        name="ended-output-lost-in-empty-step",
        mechanism="outputs that ended early are dropped by a step that has nothing to compute",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            Patch(
                "preempt_engine.llm:LLM.step",
                "if step is None:\n    return ended_early",
                "if step is None:\n    reached()\n    return []",
            ),
        ),
    ),
    Fault(
        name="kept-outputs-are-not-unfinished",
        mechanism="an engine whose queue is empty has nothing to return, kept outputs or not",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            Patch(
                "preempt_engine.llm:LLM.has_unfinished_requests",
                "return bool(self.scheduler.requests or len(self._outbox))",
                "return bool(self.scheduler.requests)",
            ),
        ),
    ),
)
