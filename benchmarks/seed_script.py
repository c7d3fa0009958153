"""A stress script as users of small engines write it; for another engine, change its import.

    python -m benchmarks.seed_script CHECKPOINT [--num_seqs N]

Random token prompts, one `generate` call. Nothing here belongs to the harness: it shows that the
embedded engine takes the same calls, `from nanovllm import LLM, SamplingParams` being the line that
differs. `preempt-harness stress` is the tool.
"""

import argparse
from collections.abc import Sequence
from random import Random
from time import perf_counter

from preempt_engine import LLM, SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--num_seqs", type=int, default=16)
    parser.add_argument("--min_input_len", type=int, default=16)
    parser.add_argument("--max_input_len", type=int, default=64)
    parser.add_argument("--max_output_len", type=int, default=32)
    parser.add_argument("--max_model_len", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    random = Random(args.seed)
    prompts = [
        [
            random.randrange(args.vocab)
            for _ in range(random.randint(args.min_input_len, args.max_input_len))
        ]
        for _ in range(args.num_seqs)
    ]
    llm = LLM(
        args.path,
        tensor_parallel_size=1,
        enforce_eager=True,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=0.9,
    )
    params = SamplingParams(temperature=0.6, max_tokens=args.max_output_len, ignore_eos=True)
    started = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - started
    tokens = sum(len(output["token_ids"]) for output in outputs)
    print(f"{len(outputs)} outputs, {tokens} tokens, {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
