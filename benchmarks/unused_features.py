"""What features cost a request that uses none of them: two versions of the engine, step by step.

    git worktree add /tmp/before <commit>
    python -m benchmarks.unused_features --before /tmp/before/engine

Each version runs in a process of its own, on the exact model, where a step is nothing but the
engine's own work. The two take turns at blocks of plain greedy decode steps; each pair of blocks
gives a ratio of CPU seconds, and the median of the ratios is reported: a change of the machine's
speed meets both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_REQUESTS = 16
STEPS_PER_BLOCK = 10
PROMPT = list(range(1, 33))


def serve() -> None:
    """In the child: time a block of steps for each line on stdin."""
    from preempt_engine import LLM, SamplingParams

    llm = LLM("exact", num_kv_blocks=1 << 16, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True)
    for _ in range(NUM_REQUESTS):
        llm.add_request(PROMPT, params)
    llm.step()
    for _ in sys.stdin:
        start = time.process_time()
        for _ in range(STEPS_PER_BLOCK):
            llm.step()
        print(time.process_time() - start, flush=True)


class Engine:
    """One version of the engine in a child process.

    Args:
        import_root: directory that holds `preempt_engine`.
    """

    def __init__(self, import_root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.unused_features", "--serve"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(import_root), "."])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def time_block(self) -> float:
        """CPU seconds for a block of steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(before: Path, after: Path, num_pairs: int) -> list[float]:
    """Ratios after / before of pairs of blocks; who goes first alternates."""
    engines = [Engine(before), Engine(after)]
    ratios = []
    for pair in range(num_pairs + 1):
        order = (0, 1) if pair % 2 else (1, 0)
        seconds = {index: engines[index].time_block() for index in order}
        if pair:  # the first warms up
            ratios.append(seconds[1] / seconds[0])
    for engine in engines:
        engine.close()
    return ratios


def main() -> None:
    """Print the median ratio and its quartiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="directory that holds the other preempt_engine")
    parser.add_argument("--after", type=Path, default=Path("engine"))
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.before is None:
        parser.error("--before is needed")
    ratios = compare(arguments.before, arguments.after, arguments.pairs)
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"plain greedy decode, {NUM_REQUESTS} requests, {len(ratios)} pairs of "
        f"{STEPS_PER_BLOCK} steps: after / before = {median:.4f} (quartiles {low:.4f}, {high:.4f})"
    )


if __name__ == "__main__":
    main()
