"""`preempt-harness stress`: random requests on the embedded engine in a pool too small for them.

The quickest look at an engine under preemption: throughput, preemptions, tokens computed twice. It
judges only that something was preempted and that every request got its tokens; trials judge more.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.checkpoints import resolve_model_name
from preempt_harness.errors import HarnessError
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

if TYPE_CHECKING:
    from preempt_engine import LLM, RequestOutput


class StressArgumentError(HarnessError, ValueError):
    """Two arguments contradict, or one is out of its range."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; names with underscores are those of common stress scripts."""
    parser.add_argument(
        "--model", default="exact", help="exact, tiny-llama, ..., smollm2, a path or a hub id"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--num_seqs", type=int, default=32, help="number of requests")
    parser.add_argument("--max_input_len", type=int, default=128, help="longest prompt, in tokens")
    parser.add_argument("--min_input_len", type=int, default=16, help="shortest prompt")
    parser.add_argument("--max_output_len", type=int, default=128, help="tokens of each output")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max_model_len", type=int, help="default: the model's limit")
    parser.add_argument("--vocab", type=int, help="draw token ids below this; default: the model's")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and engine")
    parser.add_argument("--gpu_mem_util", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--enforce_eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--num-kv-blocks", type=int, help="default: solved so that it preempts")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")


def run(arguments: argparse.Namespace) -> int:
    """Run the requests; 1 when nothing was preempted or a request did not get its tokens."""
    from preempt_engine import LLM, SamplingParams

    _check(arguments)
    vocab_size = EmbeddedAdapter().vocab_size(_settings(arguments))
    workload = random_workload(arguments, _clamped(arguments.vocab, vocab_size))
    budget = _budget(arguments, workload)
    print(budget.explain())
    params = SamplingParams(
        temperature=arguments.temperature, max_tokens=arguments.max_output_len, ignore_eos=True
    )
    with LLM(
        resolve_model_name(arguments.model),
        tensor_parallel_size=arguments.tp,
        enforce_eager=arguments.enforce_eager,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_mem_util,
        seed=arguments.seed,
        num_kv_blocks=budget.num_blocks,
        block_size=arguments.block_size,
        skip_tokenizer_init=True,
    ) as llm:
        started = time.perf_counter()
        prompts = [request.prompt_token_ids for request in workload.requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        _report(llm, outputs, time.perf_counter() - started)
        num_preemptions = llm.counters.num_preemptions
        expected = [
            min(arguments.max_output_len, llm.max_total_tokens - len(prompt)) for prompt in prompts
        ]
    problems = _short_outputs(outputs, expected)
    if num_preemptions == 0:
        problems.append(f"nothing was preempted: {budget.explain()}")
    for problem in problems:
        print(f"preempt-harness stress: {problem}", file=sys.stderr)
    return 1 if problems else 0


def random_workload(arguments: argparse.Namespace, vocab_size: int) -> Workload:
    """Requests of random ids and lengths that arrive together."""
    draw = random.Random(arguments.seed)
    sampling = SamplingSpec(
        max_tokens=arguments.max_output_len, temperature=arguments.temperature, ignore_eos=True
    )
    lengths = [
        draw.randint(arguments.min_input_len, arguments.max_input_len)
        for _ in range(arguments.num_seqs)
    ]
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[draw.randrange(vocab_size) for _ in range(length)],
                sampling=sampling,
            )
            for index, length in enumerate(lengths)
        ]
    )


def _check(arguments: argparse.Namespace) -> None:
    for name in (
        "tp",
        "num_seqs",
        "min_input_len",
        "max_output_len",
        "max_model_len",
        "vocab",
        "num_kv_blocks",
        "block_size",
    ):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise StressArgumentError(
                f"{name}={value} is not a positive number.", "Give 1 or more."
            )
    low, high, limit = arguments.min_input_len, arguments.max_input_len, arguments.max_model_len
    if low > high:
        raise StressArgumentError(
            f"--min_input_len {low} is above --max_input_len {high}.", "Lower the one."
        )
    if limit is not None and high >= limit:
        raise StressArgumentError(
            f"--max_input_len {high} leaves no room for output within --max_model_len {limit}.",
            "Lower --max_input_len or raise --max_model_len.",
        )


def _settings(arguments: argparse.Namespace) -> EngineSettings:
    return EngineSettings(
        model=arguments.model,
        num_blocks=arguments.num_kv_blocks or 1,
        block_size=arguments.block_size,
        max_model_len=arguments.max_model_len,
        seed=arguments.seed,
        tensor_parallel_size=arguments.tp,
        deterministic=False,
    )


def _clamped(wanted: int | None, vocab_size: int) -> int:
    if wanted is not None and wanted > vocab_size:
        print(f"--vocab {wanted} is larger than the model's vocabulary: clamped to {vocab_size}")
    return min(wanted or vocab_size, vocab_size)


def _budget(arguments: argparse.Namespace, workload: Workload) -> KVBudget:
    admission = EmbeddedAdapter().admission_model(_settings(arguments))
    return KVBudget.solve(workload, admission, arguments.num_kv_blocks or "tight")


def _report(llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> None:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    counters = llm.counters
    rows = {
        "requests": f"{len(outputs)}",
        "prompt tokens": f"{prompt_tokens}",
        "output tokens": f"{output_tokens}",
        "wall time": f"{seconds:.2f} s in {counters.num_steps} steps",
        "throughput": f"{output_tokens / seconds:.1f} output tokens/s, "
        f"{(prompt_tokens + output_tokens) / seconds:.1f} tokens/s in all",
        "preemptions": f"{counters.num_preemptions}",
        "recomputed tokens": f"{counters.num_recomputed_tokens}",
    }
    for name, value in rows.items():
        print(f"{name + ':':<20}{value}")


def _short_outputs(outputs: Sequence[RequestOutput], expected: Sequence[int]) -> list[str]:
    problems = []
    for output, num_tokens in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        if output.error is not None:
            problems.append(f"request {output.request_id}: {output.error}")
        elif len(completion.token_ids) != num_tokens:
            problems.append(
                f"request {output.request_id} got {len(completion.token_ids)} tokens of "
                f"{num_tokens} ({completion.finish_reason})"
            )
    return problems
