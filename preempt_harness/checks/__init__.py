"""The checks: pure functions from a trial record to findings.

They import neither torch nor an engine, and judge a live trial and a log alike. docs/findings.md
explains every code.
"""

from preempt_harness.checks.finding import CheckResult, Code, Finding
from preempt_harness.checks.kvsan import KVSan
from preempt_harness.checks.run import CHECK_NAMES, CheckOptions, CheckReport, run_checks
from preempt_harness.checks.tokens import Comparison, TokenVerdict, Tolerance, compare_tokens

__all__ = [
    "CHECK_NAMES",
    "CheckOptions",
    "CheckReport",
    "CheckResult",
    "Code",
    "Comparison",
    "Finding",
    "KVSan",
    "TokenVerdict",
    "Tolerance",
    "compare_tokens",
    "run_checks",
]
