"""The audit: how many recreated bugs are found, by what, how fast, how small.

`preempt-harness audit` plants every fault of `preempt_harness.faults` and lets the shipped suite,
a search with a fixed seed and two usual recipes look for it; the same without a fault is the
control and must be clean.
"""

from preempt_harness.audit.kill import Audit, AuditRow, Kill, Outcome
from preempt_harness.audit.run import AuditPlan, run_audit

__all__ = ["Audit", "AuditPlan", "AuditRow", "Kill", "Outcome", "run_audit"]
