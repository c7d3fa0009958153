"""Places of the engine that faults of several kinds change, and conditions that they share."""

from __future__ import annotations

SCHEDULER = "preempt_engine.scheduler:Scheduler"
RESIDENCY = "preempt_engine.residency:Residency"
PREEMPT = f"{RESIDENCY}.preempt"
PUSH = "self.waiting.push(request)"
"""In `PREEMPT`: the victim goes back to the queue."""

DELIVERY = "preempt_engine.delivery:Delivery"
APPEND = f"{DELIVERY}._append_token"
INTAKE = "preempt_engine.intake:Intake"
BUILDER = "self._builders[request.request_id][sequence.key.branch]"
"""In `APPEND`: the output of the branch that gets a token."""
BUILDER_APPEND = f"text = {BUILDER}.append(token)"

JUST_RESUMED = "request.num_preemptions and sequence.num_steps_since_admission <= 1"
"""In a step after an admission, the request has come back in it."""
