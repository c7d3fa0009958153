"""What `deterministic=True` costs on a CPU: step times beside the same engine without, and beside
the bare linear layers.

    python -m benchmarks.deterministic_cpu [--batches 1 4 16] [--repeats N] [--threads N]

SmolLM2-135M-Instruct, prompts of 32 tokens, all in one first step ("prefill"), then decode steps of
which the median counts. The variants run in turn in one process; with one thread the CPU time is
taken, since it suffers less from other work on the machine. Ratios within each repeat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.linear_limit import LinearLimit, ScheduleTap
from benchmarks.measure import machine, median_ratio, paired, print_table
from preempt_engine import LLM, SamplingParams
from preempt_harness.checkpoints import smollm2_checkpoint

_PROMPT_TOKENS = 32
_DECODE_STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine(), f"torch {torch.__version__}, {arguments.threads} threads")
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    for dtype in arguments.dtypes:
        with _engine(dtype, False) as plain, _engine(dtype, True) as deterministic:
            limit = LinearLimit(ScheduleTap(plain).runner)
            rows = []
            for batch in arguments.batches:
                tokens = batch * _PROMPT_TOKENS
                for phase, schedule in (("prefill", [(tokens, batch)]), ("decode", [(batch,) * 2])):
                    timed = {
                        "plain": partial(_step_time, plain, batch, phase, clock),
                        "deterministic": partial(_step_time, deterministic, batch, phase, clock),
                        "linear": partial(_limit_time, limit, schedule, clock),
                    }
                    figures = paired(timed, arguments.repeats)
                    rows.append(
                        [
                            f"{phase} {batch}",
                            *(f"{median(figures[name]) * 1e3:.1f}" for name in timed),
                            f"{median_ratio(figures['deterministic'], figures['plain']):.2f}",
                            f"{median_ratio(figures['linear'], figures['plain']):.2f}",
                        ]
                    )
        print(f"\n{dtype}")
        head = ["batch", "plain ms", "deterministic ms", "linear ms"]
        print_table([*head, "deterministic to plain", "linear to plain"], rows)


def _engine(dtype: str, deterministic: bool) -> LLM:
    return LLM(
        smollm2_checkpoint(),
        dtype=dtype,
        device="cpu",
        num_kv_blocks=128,
        deterministic=deterministic,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def _step_time(llm: LLM, batch: int, phase: str, clock: Callable[[], float]) -> float:
    """Seconds of the first step of new requests, or the median of the steps after it."""
    params = SamplingParams(temperature=0.0, max_tokens=_DECODE_STEPS + 1, ignore_eos=True)
    for i in range(batch):
        llm.add_request([(7 * i + j) % 400 + 5 for j in range(_PROMPT_TOKENS)], params)
    seconds = []
    while llm.has_unfinished_requests():
        started = clock()
        llm.step()
        seconds.append(clock() - started)
    return seconds[0] if phase == "prefill" else median(seconds[1:])


def _limit_time(
    limit: LinearLimit, schedule: list[tuple[int, int]], clock: Callable[[], float]
) -> float:
    return median(limit.seconds(schedule, clock) for _ in range(5))


if __name__ == "__main__":
    main()
