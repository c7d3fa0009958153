"""Whether failures repeat: the same record and findings every time, here and in fresh processes.

    python -m benchmarks.replay_trials [--failures 10] [--repeats 100] [--processes 10] [--seed 0]

Recreated bugs are drawn, the search finds a failing trial of each, and that is run again and again:
in this process, and in fresh ones from its replay string. A digest covers the record without what
differs by nature, such as times. Exits 1 when two differ.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from benchmarks.measure import machine, print_table
from preempt_harness import replay
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.explore.random_trials import RandomTrials
from preempt_harness.explore.search import TrialRunner
from preempt_harness.explore.strategy import SearchTask
from preempt_harness.explore.watchdog import watched
from preempt_harness.faults import Fault
from preempt_harness.faults.catalogue import all_faults, fault_named
from preempt_harness.faults.planting import planted_everywhere
from preempt_harness.trial import Trial

POLL_CPU_S = 10.0
SEARCH = SearchTask(max_trials=600, max_cpu_s=60.0)


def runner() -> TrialRunner:
    """Runs trials of the embedded engine; a step that never ends is cut off."""
    adapter = EmbeddedAdapter()
    return TrialRunner(adapter, open_session=watched(adapter, POLL_CPU_S))


def signature(trial: Trial) -> str:
    """Of the record and of what the checks found in it.

    How a fault comes to worker processes is left out: its marks have a folder of their own.
    """
    result = runner().judge(trial)
    header = result.record.header
    config = {name: value for name, value in header.config.items() if name != "worker_hooks"}
    result.record.header = msgspec.structs.replace(header, config=config)
    text = "\n".join([result.record.digest(), *map(str, result.findings)])
    return hashlib.sha256(text.encode()).hexdigest()


def in_fresh_process(fault: Fault, trial: Trial) -> str:
    """The signature of the trial in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replay_trials", "--once", fault.name],
        input=replay.encode(trial),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def row(fault: Fault, repeats: int, processes: int) -> list[str] | None:
    """A fault's failing trial, repeated; None where the search finds none."""
    with planted_everywhere(fault):
        failure = RandomTrials().explore(runner(), SEARCH).failure
        if failure is None:
            return None
        first = signature(failure.trial)
        equal = sum(signature(failure.trial) == first for _ in range(repeats))
    with ThreadPoolExecutor(2) as pool:
        fresh = pool.map(lambda _: in_fresh_process(fault, failure.trial), range(processes))
        equal_fresh = sum(found == first for found in fresh)
    codes = ", ".join(failure.codes[:2])
    return [fault.name, codes, f"{equal}/{repeats}", f"{equal_fresh}/{processes}"]


def main() -> int:
    """Print a row for each failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--failures", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=100, help="in this process")
    parser.add_argument("--processes", type=int, default=10, help="fresh ones, for each failure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", metavar="FAULT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        with planted_everywhere(fault_named(arguments.once)):
            print(signature(replay.decode(sys.stdin.read())))
        return 0
    print(machine())
    faults = [fault for fault in all_faults() if fault.model == "exact"]
    random.Random(arguments.seed).shuffle(faults)
    rows: list[list[str]] = []
    for fault in faults:
        if len(rows) < arguments.failures:
            found = row(fault, arguments.repeats, arguments.processes)
            rows += [found] if found is not None else []
    print_table(["fault", "codes", "equal here", "in fresh processes"], rows)
    wanted = [f"{arguments.repeats}/{arguments.repeats}"]
    wanted += [f"{arguments.processes}/{arguments.processes}"]
    return 0 if all(found[2:] == wanted for found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
