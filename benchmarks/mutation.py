"""Mutation testing: small changes of the source, and whether the tests notice.

    python -m benchmarks.mutation block_manager --sample 100
    python -m benchmarks.mutation scheduler budget --sample 60 --seed 1
    python -m benchmarks.mutation scheduler --by search     # or suite: is the harness enough?

Needs `pip install cosmic-ray`. The repository's files are staged in a temporary folder, so that the
working tree is never changed. Changes of type annotations, which cannot matter, are left out; of
the rest a sample is drawn. Each is tested by the target's own tests, or by the harness alone, with
its generic search or the suite that ships. The first failure ends it. A list of survivors is
printed: each is a missing test, or a change that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEARCH_TRIALS = 600
CONFIG = """
[cosmic-ray]
module-path = ["{module}"]
timeout = 240.0
excluded-modules = []
test-command = "{command}"

[cosmic-ray.distributor]
name = "local"
"""


@dataclass(frozen=True)
class Target:
    """A module and the tests that look after it, the quickest first."""

    module: str
    tests: tuple[str, ...]


_ENGINE_TESTS = (
    "tests/engine/test_block_manager.py",
    "tests/engine/test_victims.py",
    "tests/engine/test_llm.py",
    "tests/engine/test_abort.py",
    "tests/engine/test_lengths.py",
    "tests/engine/test_fork.py",
    "tests/engine/test_queue_limit.py",
    "tests/engine/test_priority.py",
    "tests/engine/test_parallel_sampling.py",
    "tests/engine/test_swap.py",
    "tests/engine/test_beam_search.py",
    "tests/engine/test_exact.py",
    "tests/engine/test_request_state.py",
    "tests/harness/test_clean_trials.py",
)
_CHECK_TESTS = (
    "tests/harness/test_kvsan.py",
    "tests/harness/test_kvsan_histories.py",
    "tests/harness/test_checks_accounting.py",
    "tests/harness/test_checks_work.py",
    "tests/harness/test_checks_progress.py",
    "tests/harness/test_checks_delivery.py",
    "tests/harness/test_checks_tokens.py",
    "tests/harness/test_checks_run.py",
    "tests/harness/test_clean_trials.py",
    "tests/harness/test_faults.py",
)
TARGETS = {
    "block_manager": Target("engine/preempt_engine/block_manager.py", _ENGINE_TESTS),
    "scheduler": Target("engine/preempt_engine/scheduler.py", _ENGINE_TESTS),
    "residency": Target("engine/preempt_engine/residency.py", _ENGINE_TESTS),
    "branches": Target("engine/preempt_engine/branches.py", _ENGINE_TESTS),
    "victims": Target("engine/preempt_engine/victims.py", _ENGINE_TESTS),
    "admission": Target("engine/preempt_engine/admission.py", _ENGINE_TESTS),
    "swapping": Target("engine/preempt_engine/swapping.py", _ENGINE_TESTS),
    "budget": Target("preempt_harness/budget.py", ("tests/harness/test_budget.py",)),
    "work": Target("preempt_harness/checks/work.py", _CHECK_TESTS),
    "progress": Target("preempt_harness/checks/progress.py", _CHECK_TESTS),
}


def main() -> int:
    """Run a sample for each target; exit status 1 if the tests fail without a change."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--sample", type=int, default=60, help="mutants of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by", choices=("tests", "search", "suite"), default="tests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preempt-mutation-") as folder:
        stage(Path(folder))
        for name in arguments.targets:
            target = TARGETS[name]
            if not passes(Path(folder), command(target, arguments.by)):
                print(f"{name}: the tests fail on the unchanged source", file=sys.stderr)
                return 1
            run(name, target, Path(folder), arguments)
    return 0


def stage(folder: Path) -> None:
    """Copy the files that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)


def command(target: Target, by: str) -> list[str]:
    """What is run for one mutant; a status other than 0 means that it was noticed."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    if by == "tests":
        return [*pytest, *target.tests]
    if by == "suite":
        return [*pytest, "-p", "preempt_harness", "--pyargs", "preempt_harness.suite"]
    search = "benchmarks.strategy_campaign --strategies random --trials"
    return [sys.executable, "-m", *search.split(), str(SEARCH_TRIALS)]


def passes(folder: Path, arguments: Sequence[str]) -> bool:
    """Whether the unchanged source is found to be right."""
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, env=environment())
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


def environment() -> dict[str, str]:
    """Of every run in the staged copy."""
    path = os.pathsep.join((".", "engine"))
    return os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path}


def run(name: str, target: Target, folder: Path, arguments: argparse.Namespace) -> None:
    """Mutate, test, and print what survived."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    started = time.perf_counter()
    test = command(target, arguments.by)
    config = folder / f"{name}.toml"
    config.write_text(CONFIG.format(module=target.module, command=" ".join(test)))
    database = folder / f"{name}.sqlite"
    cosmic_ray(folder, "init", config, database)
    with use_db(database, WorkDB.Mode.open) as work:
        annotations = annotated(folder / target.module)
        items = [item for item in work.work_items if not _within(item, annotations)]
        chosen = random.Random(arguments.seed).sample(items, min(arguments.sample, len(items)))
        wanted = {item.job_id for item in chosen}
        left_out = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
        rest = [item.job_id for item in work.work_items if item.job_id not in wanted]
        work.set_multiple_results(rest, left_out)
    cosmic_ray(folder, "exec", config, database)
    with use_db(database, WorkDB.Mode.open) as work:
        tested = [
            (item.mutations[0], result)
            for item, result in work.completed_work_items
            if item.job_id in wanted
        ]
    survivors = [pair for pair in tested if pair[1].test_outcome == TestOutcome.SURVIVED]
    outcomes = Counter(str(result.test_outcome or result.worker_outcome) for _, result in tested)
    killed = outcomes[str(TestOutcome.KILLED)]
    print(
        f"{name} by {arguments.by}: {killed} of {len(tested)} found "
        f"({killed / max(len(tested), 1):.0%}), drawn from {len(items)}; "
        f"{dict(outcomes)}; {time.perf_counter() - started:.0f} s"
    )
    for mutation, result in sorted(survivors, key=lambda pair: pair[0].start_pos):
        print(f"  line {mutation.start_pos[0]} in {mutation.definition_name}:")
        for line in _changed(result.diff or ""):
            print(f"    {line}")


def cosmic_ray(folder: Path, action: str, *paths: Path) -> None:
    """A subcommand of the tool, in the staged copy."""
    subprocess.run(
        [sys.executable, "-m", "cosmic_ray.cli", action, *map(str, paths)],
        cwd=folder,
        env=environment(),
        check=True,
    )


def annotated(module: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Begin and end (line, column) of every annotation; changes there change nothing."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            found.append(node.returns)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in found
    ]


def _within(item: Any, ranges: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    start = tuple(item.mutations[0].start_pos)
    return any(first <= start < last for first, last in ranges)


def _changed(diff: str) -> list[str]:
    return [
        line
        for line in diff.splitlines()
        if line[:1] in ("+", "-") and not line.startswith(("+++", "---"))
    ]


if __name__ == "__main__":
    sys.exit(main())
