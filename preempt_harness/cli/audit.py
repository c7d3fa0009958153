"""`preempt-harness audit`: plants every recreated bug and says who finds it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from preempt_harness.audit import AuditPlan, Kill, Outcome, run_audit, table
from preempt_harness.audit.by_tests import SUITE
from preempt_harness.audit.run import METHODS
from preempt_harness.errors import HarnessError
from preempt_harness.explore.strategy import STRATEGIES
from preempt_harness.faults import all_faults, select_faults
from preempt_harness.faults.catalogue import kind_of

_FORMATS = {"text": table.as_text, "json": table.as_json, "markdown": table.as_markdown}


class AuditArgumentError(HarnessError, ValueError):
    """An argument of `preempt-harness audit` is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--faults", default="*", metavar="GLOBS", help='names or "kind/name", comma-separated'
    )
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    parser.add_argument(
        "--by",
        nargs="+",
        default=list(METHODS),
        choices=METHODS,
        metavar="METHOD",
        help=f"who looks for them: {', '.join(METHODS)}; the last two are yardsticks",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument(
        "--strategy", default="random", choices=sorted(STRATEGIES), help="of the search"
    )
    parser.add_argument("--search-trials", type=int, default=2000, help="most trials for a fault")
    parser.add_argument(
        "--search-cpu-s", type=float, default=60.0, help="most processor seconds for a fault"
    )
    parser.add_argument(
        "--shrink-trials", type=int, default=300, help="most trials to make a failure small"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="PATH", help="your own tests, in place of the suite"
    )
    parser.add_argument("--format", default="text", choices=_FORMATS, help="of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 1 when a fault survives, was not exercised or not applied."""
    if arguments.list:
        for fault in all_faults():
            print(f"{kind_of(fault)}/{fault.name}: {fault.mechanism} ({fault.source})")
        return 0
    if arguments.search_trials < 1:
        raise AuditArgumentError("--search-trials finds nothing below 1.", "Give 1 or more.")
    audit = run_audit(
        AuditPlan(
            faults=tuple(select_faults(arguments.faults)),
            methods=tuple(method for method in METHODS if method in arguments.by),
            seed=arguments.seed,
            strategy=arguments.strategy,
            search_trials=arguments.search_trials,
            search_cpu_s=arguments.search_cpu_s,
            max_shrinks=arguments.shrink_trials,
            tests=tuple(arguments.tests or SUITE),
        ),
        _tell,
    )
    text = _FORMATS[arguments.format](audit)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n")
    return 1 if audit.problems() else 0


def _tell(fault: str, method: str, kill: Kill) -> None:
    """Progress, on standard error."""
    codes = ",".join(kill.codes[:3]) or kill.message[:80]
    detail = f": {codes}" if kill.outcome not in (Outcome.CLEAN, Outcome.SURVIVED) else ""
    print(
        f"{fault or '(no fault)'}, {method}: {kill.outcome} "
        f"({kill.num_trials} trials, {kill.cpu_s:.1f} s){detail}",
        file=sys.stderr,
        flush=True,
    )
