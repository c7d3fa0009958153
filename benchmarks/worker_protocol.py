"""What the worker protocol costs: bytes of a step, and the time of an empty one.

    python -m benchmarks.worker_protocol [--steps 2000]

Bytes are those of real messages, by number of decoding sequences and context, beside all token ids
of the same sequences pickled, which is what sending whole sequences would take. The time of a step
is beside a round trip of as many bytes through a bare pipe, in turn within the same run.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import time
from statistics import median

from benchmarks.measure import machine, print_table
from preempt_engine.config import EngineConfig
from preempt_engine.executor.multiproc import MultiprocExecutor
from preempt_engine.executor.step_codec import StepEncoder
from preempt_engine.executor.wire import MessageKind, make_frame
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey

_BLOCK_SIZE = 16
_ECHO = """
import os
while data := os.read(0, 65536):
    os.write(1, data)
"""


def decode_bytes(num_sequences: int, context: int) -> tuple[float, int, int]:
    """Bytes of decode steps at a context: mean and maximum per step and rank; then pickled ids.

    Averaged over as many steps as a block has tokens, so that every sequence gets its new block
    once.
    """
    encoder = StepEncoder()
    keys = [SequenceKey(f"request-{index}") for index in range(num_sequences)]
    num_blocks = -(-context // _BLOCK_SIZE)
    encoder.encode(
        SchedulerOutput(
            0,
            scheduled=[
                ScheduledSequence(
                    key, 0, context, context - 1, True, [7] * context, list(range(num_blocks))
                )
                for key in keys
            ],
        ),
        report=False,
    )
    sizes = []
    for start in range(context, context + _BLOCK_SIZE):
        new_blocks = [start // _BLOCK_SIZE] if start % _BLOCK_SIZE == 0 else []
        step = SchedulerOutput(
            start,
            scheduled=[
                ScheduledSequence(key, start, start + 1, start, False, [7], new_blocks, False)
                for key in keys
            ],
        )
        sizes.append(len(make_frame(MessageKind.STEP, encoder.encode(step, report=False))))
    token_ids = [[20_000 + position for position in range(context)] for _ in keys]
    pickled = len(pickle.dumps(token_ids, protocol=pickle.HIGHEST_PROTOCOL))
    return sum(sizes) / len(sizes), max(sizes), pickled


def print_bytes() -> bool:
    """Print the table; whether every step is within 64 + 16 bytes per sequence."""
    rows = []
    within = True
    for num_sequences in (1, 64, 256):
        bound = 64 + 16 * num_sequences
        for context in (100, 1000, 4000):
            mean, most, pickled = decode_bytes(num_sequences, context)
            within = within and most <= bound
            rows.append(
                [
                    str(num_sequences),
                    f"{context:,}",
                    f"{mean:,.0f}",
                    f"{most:,}",
                    f"{bound:,}",
                    f"{pickled:,}",
                    f"{pickled / most:,.0f}x",
                ]
            )
    print("Bytes per decode step and rank")
    head = ["sequences", "context", "mean", "max", "bound", "pickled ids", "ratio"]
    print_table(head, rows)
    return within


class PipeEcho:
    """A process that sends back what it is sent, and nothing else."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def round_trip(self, data: bytes) -> None:
        """Send and wait for all of it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        os.write(stdin.fileno(), data)
        received = 0
        while received < len(data):
            received += len(os.read(stdout.fileno(), 65536))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure_latency(num_ranks: int, num_steps: int) -> list[str]:
    """Microseconds: a pipe round trip, an empty step, and its driver's part; medians and tails."""
    config = EngineConfig(model="exact", tensor_parallel_size=num_ranks)
    executor, echo = MultiprocExecutor(config), PipeEcho()
    try:
        size = len(make_frame(MessageKind.STEP, StepEncoder().encode(_empty(0), report=False)))
        bare, whole, sending = [], [], []
        for step_id in range(num_steps):
            began = time.perf_counter()
            echo.round_trip(bytes(size))
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            handle = executor.execute(_empty(step_id))
            sending.append(time.perf_counter() - began)
            handle.result()
            whole.append(time.perf_counter() - began)
    finally:
        executor.close()
        echo.close()
    figures = [median(bare), _tail(bare), median(whole), _tail(whole), median(sending)]
    return [str(num_ranks), *(f"{1e6 * figure:.0f}" for figure in figures)]


def _empty(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id)


def _tail(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def main() -> int:
    """Print both tables; the exit status is 1 if a step is larger than its bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(machine(), end="\n\n")
    within = print_bytes()
    print("\nMicroseconds of an empty step, driver to all ranks and back, beside a bare pipe")
    head = ["ranks", "pipe median", "pipe p99", "step median", "step p99", "of it sending"]
    print_table(head, [measure_latency(ranks, arguments.steps) for ranks in (1, 2, 4)])
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
