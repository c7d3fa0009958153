"""Mutation of somebody else's engine: would the generic search notice a small change of nano-vllm?

    python -m benchmarks.peer_mutation CHECKOUT [--sample N] [--seed N] [--trials N]

Needs `pip install cosmic-ray numpy xxhash` and a checkout of nano-vllm. Trials are drawn with the
checkout as it is; those with findings there are left out. Then each changed copy runs them, in a
child process, until one fails. What survives is printed: a change that makes no difference, or
something that no check sees on an engine that tells no more than its adapter can.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import machine
from benchmarks.mutants import Mutant, draw
from preempt_harness.adapters.nano_vllm_source import PATH_VARIABLE
from preempt_harness.adapters.registry import AdapterRegistry
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.explore.search import TrialRunner
from preempt_harness.explore.watchdog import watched
from preempt_harness.trial import Trial

_MODULES = ("scheduler", "block_manager", "sequence")
_POLL_CPU_S = 10.0
_MOST_CPU_S = 120


class Judged(NamedTuple):
    """What became of a changed engine: the first finding's codes, none if there is no finding."""

    codes: tuple[str, ...]
    num_trials: int
    cpu_s: float


def judge(folder: Path, trials: Sequence[Trial]) -> Judged:
    """Run trials on the engine in a folder until one fails."""
    runner = _runner(folder)
    started = time.process_time()
    number = 0
    for number, trial in enumerate(trials, start=1):
        failure = runner.failure(trial)
        if failure is not None:
            return Judged(failure.codes, number, time.process_time() - started)
    return Judged((), number, time.process_time() - started)


def _runner(folder: Path) -> TrialRunner:
    os.environ[PATH_VARIABLE] = str(folder)
    adapter = AdapterRegistry().get("nano-vllm-scheduler")
    return TrialRunner(adapter, open_session=watched(adapter, _POLL_CPU_S))


def sound_trials(folder: Path, count: int) -> list[Trial]:
    """Of so many drawn trials those without a finding."""
    runner = _runner(folder)
    trials = [random_trial(seed, runner.adapter, model="exact") for seed in range(count)]
    return [trial for trial in trials if runner.failure(trial) is None]


def judge_in_child(folder: Path, trials: Sequence[Trial]) -> Judged:
    """The same in a forked process, whose processor time is limited."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
        try:
            judged = judge(folder, trials)
        except Exception as error:  # of the harness: what an engine raises is a finding
            judged = Judged((f"the harness failed: {type(error).__name__}: {error}",), 0, 0.0)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(judged, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(text) if text else Judged(("did not come to an end",), 0, _MOST_CPU_S)


def changed_copy(checkout: Path, mutant: Mutant, folder: Path) -> Path:
    """A copy of the engine with one change."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout / "nanovllm", folder / "nanovllm")
    (folder / mutant.module).write_text(mutant.source)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=400)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a number is one of the changes
    checkout = given.checkout.resolve()
    os.chdir(checkout)
    mutants, total = draw(
        [f"nanovllm/engine/{name}.py" for name in _MODULES], given.sample, given.seed
    )
    print(machine())
    trials = sound_trials(checkout, given.trials)
    print(f"{len(mutants)} of {total} changes; {len(trials)} of {given.trials} trials are sound")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, mutant in enumerate(mutants):
            # A folder of its own for each: modules are known by their place.
            place = Path(folder) / str(number)
            judged = judge_in_child(changed_copy(checkout, mutant, place), trials)
            shutil.rmtree(place)
            where = f"{Path(mutant.module).stem}, line {mutant.line}, {mutant.definition}"
            found = ", ".join(judged.codes[:2]) or "survived"
            print(
                f"{where}: {found} ({judged.num_trials} trials, {judged.cpu_s:.1f} s)", flush=True
            )
            if not judged.codes:
                survivors += 1
                print("\n".join(f"    {line}" for line in mutant.changed_lines()))
    print(f"{len(mutants) - survivors} of {len(mutants)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
