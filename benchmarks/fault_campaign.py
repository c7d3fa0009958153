"""Injects faults into tensor-parallel workers, and counts what is left behind.

    python -m benchmarks.fault_campaign [--faults 240] [--seed 0] [--timeout-s 0.5]

Each fault hits a fresh engine of exact ranks at a random rank and step. It must give the error of
its kind, naming the rank, and leave no process, file descriptor, socket or shared memory. Every
eighth fault kills the driver itself, in a process of its own; its workers must end. Exits 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from preempt_engine import LLM, SamplingParams
from preempt_engine.errors import (
    WorkerDiedError,
    WorkerError,
    WorkerFailedError,
    WorkerOutOfMemoryError,
    WorkerTimeoutError,
)

EXPECTED: dict[str, type[WorkerError]] = {
    "kill": WorkerDiedError,
    "abort": WorkerDiedError,
    "leave": WorkerDiedError,
    "fail": WorkerFailedError,
    "exhaust_memory": WorkerOutOfMemoryError,
    "stall": WorkerTimeoutError,
    "spin": WorkerTimeoutError,
    "stop": WorkerTimeoutError,
}
DRIVER_DEATH = "driver death"
_PROMPTS = [[index + 1] * (5 + index) for index in range(6)]
_PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
_NUM_STEPS = 40

_DRIVER = """
import sys
from preempt_engine import LLM, SamplingParams
llm = LLM("exact", tensor_parallel_size=int(sys.argv[1]), num_kv_blocks=16, block_size=4)
print(*llm.worker_process_ids, flush=True)
params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
while True:
    llm.generate([[1] * 20] * 4, params, use_tqdm=False)
"""


@dataclass(frozen=True)
class Fault:
    """One fault to inject.

    Attributes:
        kind: of `EXPECTED`, or `DRIVER_DEATH`.
        when: hook of `worker_faults` that plants it.
        num_ranks: of the engine.
        rank: that is hit.
        step: at which.
    """

    kind: str
    when: str
    num_ranks: int
    rank: int
    step: int


@dataclass(frozen=True)
class Outcome:
    """What a fault led to.

    Attributes:
        fault: that was injected.
        seconds: from the call of the step that met the fault to its error; of a driver's death,
            to the end of the last worker.
        problems: what should not have been.
    """

    fault: Fault
    seconds: float
    problems: list[str]


def draw_faults(count: int, seed: int) -> list[Fault]:
    """Kinds in turn, everything else at random."""
    rng = random.Random(seed)
    faults = []
    for index in range(count):
        kind = DRIVER_DEATH if index % 8 == 7 else [*EXPECTED][(index - index // 8) % len(EXPECTED)]
        num_ranks = rng.choice((2, 2, 3))
        when = rng.choice(("at_step", "after_step"))
        rank = rng.randrange(num_ranks)
        faults.append(Fault(kind, when, num_ranks, rank, rng.randrange(_NUM_STEPS)))
    return faults


def inject(fault: Fault, timeout_s: float) -> Outcome:
    """Inject one fault and look at what is left."""
    before = _footprint()
    if fault.kind == DRIVER_DEATH:
        seconds, problems = _kill_driver(fault)
    else:
        seconds, problems = _hit_rank(fault, timeout_s)
    after = _footprint()
    problems += [
        f"left behind: {name} {before[name]} -> {after[name]}"
        for name in before
        if after[name] != before[name]
    ]
    return Outcome(fault, seconds, problems)


def _hit_rank(fault: Fault, timeout_s: float) -> tuple[float, list[str]]:
    hook = f"benchmarks.worker_faults:{fault.when}:{fault.kind} {fault.rank} {fault.step}"
    llm = LLM(
        "exact",
        tensor_parallel_size=fault.num_ranks,
        num_kv_blocks=16,
        block_size=4,
        worker_timeout_s=timeout_s,
        worker_hooks=(hook,),
    )
    for prompt in _PROMPTS:
        llm.add_request(prompt, _PARAMS)
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            llm.step()
            if not llm.has_unfinished_requests():
                llm.close()
                return 0.0, ["the fault gave no error"]
    except WorkerError as error:
        seconds = time.monotonic() - began
        problems = []
        if type(error) is not EXPECTED[fault.kind]:
            problems.append(f"{type(error).__name__}: {error}")
        if error.rank != fault.rank:
            problems.append(f"rank {error.rank} was named")
    llm.close()
    return seconds, problems


def _kill_driver(fault: Fault) -> tuple[float, list[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(fault.num_ranks)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    ) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        time.sleep(0.002 * fault.step)
        driver.send_signal(signal.SIGKILL)
        began = time.monotonic()
        while (alive := [w for w in workers if _runs(w)]) and time.monotonic() < began + 10:
            time.sleep(0.001)
        seconds = time.monotonic() - began
    for worker in alive:
        worker.kill()
    return seconds, [f"{len(alive)} workers outlived the driver"] if alive else []


def _runs(process: psutil.Process) -> bool:
    """False also for a dead process that nobody has waited for yet: its parent was the driver."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _footprint() -> dict[str, int]:
    process = psutil.Process()
    return {
        "child processes": len(process.children(recursive=True)),
        "file descriptors": process.num_fds(),
        "listening ports": sum(
            connection.status == psutil.CONN_LISTEN for connection in process.net_connections()
        ),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "threads": process.num_threads(),
    }


def main() -> int:
    """Run the campaign and print its table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=0.5, help="worker_timeout_s")
    arguments = parser.parse_args()
    outcomes = [
        inject(fault, arguments.timeout_s)
        for fault in draw_faults(arguments.faults, arguments.seed)
    ]
    seconds = defaultdict(list)
    for outcome in outcomes:
        seconds[outcome.fault.kind].append(outcome.seconds)
    print(f"{len(outcomes)} faults; worker_timeout_s={arguments.timeout_s}")
    print(f"{'fault':<16}{'count':>6}{'median ms':>11}{'max ms':>9}   expected")
    for kind, times in seconds.items():
        expected = EXPECTED[kind].__name__ if kind in EXPECTED else "all workers end"
        print(
            f"{kind:<16}{len(times):>6}{1000 * statistics.median(times):>11.1f}"
            f"{1000 * max(times):>9.1f}   {expected}"
        )
    bad = [outcome for outcome in outcomes if outcome.problems]
    for outcome in bad:
        print(f"{outcome.fault}: {'; '.join(outcome.problems)}")
    print(f"wrong or left something behind: {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
