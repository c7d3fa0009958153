"""Step time of the embedded engine on the exact model: flat in context.

    python -m benchmarks.exact_step [--steps N]

One decode step of all running requests, in CPU time of this process, so that other processes on
the machine matter less. No torch.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median, quantiles

from benchmarks.measure import machine, print_table
from preempt_engine import LLM, SamplingParams

_RUNNING = (1, 16, 256)
_CONTEXTS = (100, 4000)
_BLOCK_SIZE = 16
_WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="decode steps per row")
    steps = parser.parse_args().steps
    print(machine())
    rows = []
    for running in _RUNNING:
        medians = []
        for context in _CONTEXTS:
            times_us = [1e6 * seconds for seconds in decode_step_times(running, context, steps)]
            medians.append(median(times_us))
            tenths = quantiles(times_us, n=10)
            rows.append(
                [
                    f"{running}",
                    f"{context}",
                    f"{medians[-1]:.0f}",
                    f"{tenths[-1]:.0f}",
                    f"{medians[-1] / running:.1f}",
                    f"{medians[-1] / medians[0]:.2f}",
                ]
            )
    print_table(
        ["running", "context", "median us", "90 % us", "us per sequence", "to shortest"], rows
    )


def decode_step_times(running: int, context: int, steps: int) -> list[float]:
    """CPU seconds of each of `steps` decode steps of `running` requests at `context` tokens."""
    draw = random.Random(0)
    most_tokens = context + _WARM_UP + steps + 1
    blocks_each = -(-most_tokens // _BLOCK_SIZE)
    with LLM(
        "exact",
        num_kv_blocks=running * blocks_each,
        block_size=_BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=running * context,  # one step prefills all
        max_model_len=most_tokens + 1,
        skip_tokenizer_init=True,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=most_tokens - context, ignore_eos=True)
        for _ in range(running):
            llm.add_request([draw.randrange(llm.vocab_size) for _ in range(context)], params)
        for _ in range(1 + _WARM_UP):
            llm.step()
        times = []
        for _ in range(steps):
            started = time.process_time()
            outputs = llm.step()
            times.append(time.process_time() - started)
            assert len(outputs) == running, "every step must decode all requests"
    return times


if __name__ == "__main__":
    main()
