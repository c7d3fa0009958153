"""Mutation testing: small changes of the source, and whether anything notices.

    python -m benchmarks.mutation block_manager --sample 100
    python -m benchmarks.mutation scheduler budget --sample 60 --seed 1
    python -m benchmarks.mutation scheduler --by tests search   # the search judges survivors
    python -m benchmarks.mutation scheduler --by suite          # is the harness enough?
    python -m benchmarks.mutation scheduler --out DIR
    python -m benchmarks.mutation scheduler --again DIR   # what survived or is new, once more

Needs `pip install cosmic-ray`. The repository's files are staged in a temporary folder, so that the
working tree is never changed. A sample is drawn from all changes of a target's modules; each is
judged by the target's tests, by the generic search or by the suite that ships, one after another as
they are named (see `benchmarks.mutant_judge`). The first failure ends it. Survivors are printed:
each is a missing test, or a change that makes no difference, which only a reader can tell. A test
that does not end in time stands apart as a timeout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.mutant_judge import Change, Group, Job, Verdict
from benchmarks.mutants import Mutant, draw


@dataclass(frozen=True)
class Target:
    """Modules that belong together, and the tests that look after them.

    Attributes:
        modules: their files.
        tests: files of tests.
        options: pytest's, of the suite where the embedded engine's default model does not run them.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()


def _engine(*names: str) -> tuple[str, ...]:
    return tuple(f"engine/preempt_engine/{name}.py" for name in names)


def _checks(*names: str) -> tuple[str, ...]:
    return tuple(f"preempt_harness/checks/{name}.py" for name in names)


def _tests(part: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{part}/test_{name}.py" for name in names)


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
    "tests/engine/test_cache_reset.py",
    "tests/engine/test_spec_decode.py",
    "tests/engine/test_async_scheduling.py",
    "tests/engine/test_async_drafts.py",
    "tests/engine/test_exact.py",
    "tests/engine/test_request_state.py",
    "tests/engine/test_headroom.py",
    "tests/engine/test_events.py",
    "tests/harness/test_budget.py",  # the admission model foretells every preemption
)
_CHECK_TESTS = (
    "tests/harness/test_check_bounds.py",
    "tests/harness/test_checks_run.py",
    "tests/harness/test_checks_foreign_events.py",
    "tests/harness/test_faults.py",
)
TARGETS = {
    "block_manager": Target(_engine("block_manager", "free_blocks"), _ENGINE_TESTS),
    "scheduler": Target(
        _engine("scheduler", "residency", "admission", "headroom", "victims", "swapping")
        + _engine("host_pool", "branches", "async_scheduler", "flights"),
        _ENGINE_TESTS,
    ),
    "budget": Target(("preempt_harness/budget.py",), ("tests/harness/test_budget.py",)),
    "work": Target(
        ("preempt_harness/checks/work.py",),
        ("tests/harness/test_checks_work.py", *_CHECK_TESTS),
    ),
    "progress": Target(
        _checks("progress", "_progress_queue", "_conditions"),
        (
            "tests/harness/test_check_bounds.py",
            "tests/harness/test_checks_progress.py",
            *_CHECK_TESTS,
        ),
    ),
    "requests": Target(_engine("sequence", "intake", "step", "reset"), _ENGINE_TESTS),
    "outputs": Target(
        _engine("delivery", "output_builder", "stream", "outbox", "detokenizer", "scoring"),
        (*_ENGINE_TESTS, *_tests("engine", "stream", "detokenizer", "prompt_logprobs")),
    ),
    "beam_search": Target(_engine("beam_search"), _tests("engine", "beam_search")),
    "drafts": Target(
        _engine(*(f"spec_decode/{name}" for name in ("speculator", "allowance", "draft_model")))
        + _engine(*(f"spec_decode/{name}" for name in ("ngram", "proposer", "scripted"))),
        _tests("engine", "spec_decode", "spec_models", "async_drafts", "headroom"),
    ),
    "sampling": Target(
        _engine(*(f"sampling/{name}" for name in ("sampler", "processors", "history")))
        + _engine(*(f"sampling/{name}" for name in ("logprobs", "grammar", "noise"))),
        _tests("engine", "sampling", "processors", "penalties", "noise", "grammar")
        + _tests("engine", "request_state", "prompt_logprobs"),
    ),
    "workers": Target(
        _engine("worker/state", "worker/exact_runner"),
        _tests("engine", "exact", "wire", "multiproc", "swap"),
    ),
    "worker_tensors": Target(
        _engine("worker/block_mover", "worker/swap_space", "worker/step_inputs"),
        _tests("engine", "block_mover", "swap_space", "model_runner"),
        options=("--preempt-model", "tiny-llama"),
    ),
    "messages": Target(
        _engine("executor/step_codec", "executor/shares", "executor/protocol"),
        _tests("engine", "wire", "multiproc", "tp"),
        options=("--preempt-tp", "2"),
    ),
    "kvsan": Target(
        _checks("kvsan", "_kvsan_state", "_kvsan_steady", "sanitizer", "chain", "shadow"),
        _tests("harness", "kvsan", "kvsan_histories", "steady") + _CHECK_TESTS,
    ),
    "trace": Target(
        _checks("trace", "steady", "tables"),
        _tests("harness", "trace", "steady", "kvsan", "checks_accounting") + _CHECK_TESTS,
    ),
    "output_checks": Target(
        _checks("tokens", "delivery", "_delivery_ends", "_delivery_logprobs")
        + _checks("drafts", "own_tokens", "prediction"),
        _tests("harness", "checks_tokens", "checks_delivery", "drafts", "prediction", "near_tie")
        + _CHECK_TESTS,
    ),
    "accounting": Target(
        _checks("_accounting_counters", "_accounting_schedule", "_accounting_reset")
        + _checks("_accounting_pool", "_accounting_worker"),
        _tests("harness", "checks_accounting", "checks_resets", "steady") + _CHECK_TESTS,
    ),
}
_JUDGES = {
    "search": Group("search", ["benchmarks/mutant_search.py"]),
    "suite": Group("suite", ["preempt_harness/suite"]),
}


class _Line(msgspec.Struct, frozen=True):
    """What is kept of a mutant in a folder given by --out."""

    place: tuple[str, str, int]
    line: int
    definition: str
    changed: list[str]
    verdict: Verdict

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.place, *self.changed)


def main() -> int:
    """Run a sample for each target; exit status 1 if the tests fail without a change."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--sample", type=int, default=60, help="mutants of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by", nargs="+", choices=("tests", "search", "suite"), default=["tests"])
    parser.add_argument(
        "--tests", nargs="+", help="instead of the target's; new ones, with --again"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="a new process for each mutant")
    parser.add_argument("--out", type=Path, help="folder to write a file for each target to")
    parser.add_argument("--again", type=Path, help="such a folder: keep what was found there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preempt-mutation-") as folder:
        copies = [Path(folder, str(index)) for index in range(arguments.processes)]
        for copy in copies:
            stage(copy)
        return max([run(name, copies, arguments) for name in arguments.targets])


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


def run(name: str, copies: Sequence[Path], arguments: argparse.Namespace) -> int:
    """Draw, judge, and print what survived."""
    started = time.perf_counter()
    target = TARGETS[name]
    if arguments.tests:
        target = replace(target, tests=tuple(arguments.tests))
    mutants, num_places = draw(target.modules, arguments.sample, arguments.seed)
    found = _found(arguments.again / f"{name}.jsonl") if arguments.again is not None else {}
    keys = [_key(mutant) for mutant in mutants]
    to_judge = [mutant for mutant, key in zip(mutants, keys, strict=True) if key not in found]
    with ThreadPoolExecutor(len(copies)) as pool:
        parts = [
            pool.submit(
                judge,
                target,
                to_judge[index :: len(copies)],
                copy,
                by=arguments.by,
                fresh=arguments.fresh,
            )
            for index, copy in enumerate(copies)
        ]
    judged: list[Verdict] = [Verdict("survived")] * len(to_judge)
    for index, part in enumerate(parts):
        verdicts = part.result()
        if verdicts is None:
            return 1
        judged[index :: len(copies)] = verdicts
    cpu_s = sum(verdict.cpu_s for verdict in judged)
    rest = iter(judged)
    everything = [found[key] if key in found else next(rest) for key in keys]
    print(
        f"{name} by {', '.join(arguments.by)}: {summary(everything)}; seed {arguments.seed} of "
        f"{num_places} places; {len(judged)} judged in {cpu_s:.0f} s of processor, "
        f"{time.perf_counter() - started:.0f} s of wall"
    )
    for mutant, verdict in zip(mutants, everything, strict=True):
        if verdict.outcome == "survived":
            print(f"  {mutant.module}:{mutant.line} in {mutant.definition}:")
            for line in mutant.changed_lines():
                print(f"    {line}")
    if arguments.out is not None:
        _write(arguments.out / f"{name}.jsonl", mutants, everything)
    return 0


def _found(file: Path) -> dict[tuple[object, ...], Verdict]:
    """What an earlier run noticed."""
    lines = [msgspec.json.decode(line, type=_Line) for line in file.read_bytes().splitlines()]
    return {line.key: line.verdict for line in lines if line.verdict.outcome != "survived"}


def _key(mutant: Mutant) -> tuple[object, ...]:
    return mutant.module, mutant.operator, mutant.occurrence, *mutant.changed_lines()


def _write(file: Path, mutants: Sequence[Mutant], verdicts: Sequence[Verdict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        _Line(
            (mutant.module, mutant.operator, mutant.occurrence),
            mutant.line,
            mutant.definition,
            mutant.changed_lines(),
            verdict,
        )
        for mutant, verdict in zip(mutants, verdicts, strict=True)
    ]
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many were killed, by whom, did not end, and survived."""
    killed = [verdict for verdict in verdicts if verdict.outcome == "killed"]
    counts = Counter(verdict.outcome for verdict in verdicts)
    by_group = Counter(verdict.group for verdict in killed)
    noticed = len(verdicts) - counts["survived"]
    return (
        f"{noticed} of {len(verdicts)} found ({noticed / max(len(verdicts), 1):.0%}: "
        f"{', '.join(f'{count} by {group}' for group, count in by_group.items()) or 'none'}, "
        f"{counts['timeout']} by timeout), {counts['survived']} survived"
    )


def judge(
    target: Target, mutants: Sequence[Mutant], folder: Path, *, by: Sequence[str], fresh: bool
) -> list[Verdict] | None:
    """A verdict for each mutant; None when the tests fail on the unchanged source."""
    verdicts, job = folder / "verdicts.jsonl", folder / "job.json"
    verdicts.write_bytes(b"")
    groups = [
        Group("tests", list(target.tests)) if name == "tests" else _JUDGES[name] for name in by
    ]
    job.write_bytes(
        msgspec.json.encode(
            Job(
                groups=groups,
                changes=[Change(mutant.module, mutant.source) for mutant in mutants],
                arguments=["-p", "preempt_harness", *target.options] if "suite" in by else [],
                verdicts=str(verdicts),
                fresh=fresh,
            )
        )
    )
    command = [sys.executable, "-m", "benchmarks.mutant_judge", str(job)]
    done = subprocess.run(command, cwd=folder, env=environment())
    if done.returncode:
        return None
    return [msgspec.json.decode(line, type=Verdict) for line in verdicts.read_bytes().splitlines()]


def environment() -> dict[str, str]:
    """Of the run in the staged copy: one thread, so that processor time means something."""
    return os.environ | {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join((".", "engine")),
        "HYPOTHESIS_PROFILE": "mutation",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
