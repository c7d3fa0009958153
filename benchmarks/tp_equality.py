"""Tensor-parallel outputs with and without preemption: equal in every bit, over drawn trials.

    python -m benchmarks.tp_equality [--exact 2000] [--tiny 120] [--ranks 2] [--seed 0]

Each trial runs one drawn workload twice on the same engine: with room, and with so many blocks
held that requests preempt each other, and some forced on top. Tokens and log probabilities must be
equal; those of the exact model must also be the closed form's. A trial in which nothing was
preempted does not count. Exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import machine, print_table
from preempt_engine import LLM, RequestOutput, SamplingParams
from preempt_engine.exact import reference_generate
from preempt_engine.sequence import Request

_NUM_BLOCKS = 256
_TINY_MODELS = ("tiny-llama", "tiny-qwen3", "tiny-opt")


class RandomPreemption:
    """Forces a preemption now and then.

    Args:
        rng: drawn from at every step.
        probability: of each running request, per step.
    """

    def __init__(self, rng: random.Random, probability: float) -> None:
        self._rng = rng
        self._probability = probability

    def select_victims(self, step_id: int, running: Sequence[Request]) -> list[str]:
        """The requests to preempt before this step."""
        return [request.request_id for request in running if self._rng.random() < self._probability]


def draw_workload(
    rng: random.Random, vocab_size: int, block_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts near block boundaries, some of them sharing a prefix; greedy and sampled requests."""
    shared = [rng.randrange(1, vocab_size) for _ in range(2 * block_size)]
    prompts, params = [], []
    for _ in range(rng.randrange(2, 6)):
        length = max(1, rng.randrange(1, 4) * block_size + rng.choice((-1, 0, 1)))
        prompt = [rng.randrange(1, vocab_size) for _ in range(length)]
        prompts.append(shared + prompt if rng.random() < 0.4 else prompt)
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.0, 0.9)),
                top_k=rng.choice((0, 10)),
                max_tokens=rng.randrange(4, 3 * block_size + 8),
                logprobs=rng.choice((None, None, 2)),
                ignore_eos=True,
            )
        )
    return prompts, params


def run_trial(llm: LLM, rng: random.Random, is_exact: bool) -> tuple[int, list[str]]:
    """One workload, twice. Returns the preemptions of the second run and what is wrong."""
    block_size = llm.config.block_size
    prompts, params = draw_workload(rng, llm.vocab_size, block_size)
    longest = max(
        -(-(len(prompt) + param.max_tokens) // block_size)
        for prompt, param in zip(prompts, params, strict=True)
    )
    roomy = _results(llm.generate(prompts, params, use_tqdm=False))
    problems = [] if llm.counters.num_preemptions == 0 else ["preempted with room"]
    llm.reset(preemption_controller=RandomPreemption(rng, rng.choice((0.0, 0.02, 0.1))))
    llm.hold_blocks(_NUM_BLOCKS - longest - rng.randrange(0, 4))
    tight = _results(llm.generate(prompts, params, use_tqdm=False))
    num_preemptions = llm.counters.num_preemptions
    llm.hold_blocks(0)
    llm.reset()
    if tight != roomy:
        problems.append(f"outputs differ: {prompts} {params}")
    if is_exact:
        for prompt, param, (token_ids, _) in zip(prompts, params, roomy, strict=True):
            ranks = llm.config.tensor_parallel_size
            expected = reference_generate(prompt, param.max_tokens, llm.vocab_size, num_ranks=ranks)
            if param.greedy and token_ids != expected:
                problems.append(f"not the closed form: {prompt}")
    return num_preemptions, problems


def _results(outputs: list[RequestOutput]) -> list[tuple[list[int], Any]]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def run_model(
    name: str, open_llm: Callable[[int, int], LLM], num_trials: int, seed: int
) -> tuple[list[str], list[str]]:
    """Trials of one model until so many were preempted; a table row, and what is wrong."""
    rng = random.Random(f"{seed} {name}")
    counted = drawn = preemptions = 0
    problems: list[str] = []
    began = time.monotonic()
    settings = [(1, 64), (4, 9), (4, 64), (16, 64)]  # block size, token budget of a step
    for index, (block_size, budget) in enumerate(settings):
        with open_llm(block_size, budget) as llm:
            while counted < num_trials * (index + 1) // len(settings):
                drawn += 1
                num_preemptions, wrong = run_trial(llm, rng, is_exact=name == "exact")
                counted += num_preemptions > 0
                preemptions += num_preemptions
                problems += wrong
    seconds = time.monotonic() - began
    row = [name, str(counted), str(drawn), str(preemptions), str(len(problems)), f"{seconds:.0f}"]
    return row, problems


def main() -> int:
    """Run both campaigns; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--exact", type=int, default=2000, help="preempted trials")
    parser.add_argument("--tiny", type=int, default=120, help="preempted trials, all models")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(machine())

    def opener(model: str) -> Callable[[int, int], LLM]:
        return lambda block_size, budget: LLM(
            model,
            tensor_parallel_size=arguments.ranks,
            deterministic=True,
            num_kv_blocks=_NUM_BLOCKS,
            block_size=block_size,
            max_num_batched_tokens=budget,
            debug_worker_state=True,
            poison=True,
            skip_tokenizer_init=True,
        )

    rows, problems = [], []
    trials = {"exact": arguments.exact} | dict.fromkeys(
        _TINY_MODELS, -(-arguments.tiny // len(_TINY_MODELS))
    )
    for name, count in trials.items():
        if not count:
            continue
        row, wrong = run_model(name, opener(_resolve(name)), count, arguments.seed)
        rows.append(row)
        problems += wrong
    print_table(["model", "preempted trials", "drawn", "preemptions", "wrong", "seconds"], rows)
    for problem in problems[:10]:
        print(problem)
    return 1 if problems else 0


def _resolve(name: str) -> str:
    from preempt_harness.checkpoints import resolve_model_name

    return str(resolve_model_name(name))


if __name__ == "__main__":
    sys.exit(main())
