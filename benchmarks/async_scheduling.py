"""What deciding steps ahead saves: wall time of greedy runs at depths 0, 1 and 2, in turn.

    python -m benchmarks.async_scheduling exact --ranks 2
    python -m benchmarks.async_scheduling tiny-llama --ranks 2

Ranks in processes of their own compute while the driver decides the next step; with one rank, which
runs in the driver's process, there is nothing to gain.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from benchmarks.measure import machine, median_ratio, paired, print_table
from preempt_engine import LLM, SamplingParams

DEPTHS = (0, 1, 2)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help='"exact", or a model that the harness knows')
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    path = arguments.model
    if path != "exact":
        from preempt_harness.checkpoints import resolve_model_name

        path = str(resolve_model_name(path))
    prompts = [[token_id + index for token_id in range(4, 36)] for index in range(16)]
    prompts = (prompts * arguments.requests)[: arguments.requests]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    outputs: dict[str, list[list[int]]] = {}
    print(machine())
    engines = {
        f"{depth} ahead": LLM(
            path,
            num_kv_blocks=1024,
            tensor_parallel_size=arguments.ranks,
            async_scheduling=depth,
            skip_tokenizer_init=True,
        )
        for depth in DEPTHS
    }

    def timed(name: str, llm: LLM) -> Callable[[], float]:
        def run() -> float:
            llm.reset()
            start = time.perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            outputs[name] = [result.outputs[0].token_ids for result in results]
            return seconds

        return run

    seconds = paired({name: timed(name, llm) for name, llm in engines.items()}, arguments.repeats)
    total = arguments.requests * arguments.tokens
    reference = f"{DEPTHS[0]} ahead"
    rows = [
        [
            name,
            f"{total / median(seconds[name]):.0f}",
            f"{1 / median_ratio(seconds[name], seconds[reference]):.2f}",
            str(outputs[name] == outputs[reference]),
        ]
        for name in engines
    ]
    for llm in engines.values():
        llm.close()
    print_table(["steps decided", "output tokens/s", "to none ahead", "equal outputs"], rows)


if __name__ == "__main__":
    main()
