"""The embedded engine on a CPU, beside its own linear layers, transformers and llama.cpp.

    python -m benchmarks.engine_cpu [--requests N] [--repeats N] [--dtypes float32 bfloat16]
        [--llama-python PYTHON --llama-model FILE.gguf]

SmolLM2-135M-Instruct, greedy, prompts of 32 tokens of real text and 64 output tokens each, once
with room for all and once with 24 blocks of 16 tokens, where requests are preempted. `generate` has
no pool, so it only stands in the first. "linear layers" are the matrix products of the embedded
engine's own schedule and nothing else (`linear_limit`). llama.cpp runs if an interpreter with the
package `xllamacpp` is named, and a GGUF file of the model, which is rewritten in each dtype; it has
no preemption, so it gets as many slots as fit. All variants run in turn; medians over repeats,
ratios within each repeat.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.gguf_dtype import convert
from benchmarks.linear_limit import LinearLimit, ScheduleTap
from benchmarks.measure import machine, median_ratio, paired, print_table
from preempt_engine import LLM, SamplingParams
from preempt_engine.tokenizer import HFTokenizer
from preempt_harness.checkpoints import smollm2_checkpoint
from preempt_harness.prompts import PromptSource

_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 64
_TOKENS = _PROMPT_TOKENS + _OUTPUT_TOKENS
_BLOCK_SIZE = 16
_TIGHT_BLOCKS = 24
_MAX_BATCHED_TOKENS = 2048
_REFERENCE = "generate, room"

Outputs = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-python", help="an interpreter that has xllamacpp")
    parser.add_argument("--llama-model", type=Path, help="a GGUF file of the model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    print(machine())
    print(
        f"torch {torch.__version__} with {arguments.threads} threads, transformers "
        f"{transformers.__version__}; SmolLM2-135M-Instruct, {arguments.requests} x "
        f"({_PROMPT_TOKENS} + {_OUTPUT_TOKENS}) tokens, greedy, {arguments.repeats} repeats"
    )
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            peers = []
            if arguments.llama_python:
                gguf = Path(folder) / f"{dtype}.gguf"
                convert(arguments.llama_model, gguf, dtype)
                slots = (arguments.requests, _TIGHT_BLOCKS * _BLOCK_SIZE // _TOKENS)
                peers = [
                    LlamaCpp(arguments.llama_python, gguf, arguments.threads, n) for n in slots
                ]
            report(dtype, arguments.requests, arguments.repeats, peers)
            for peer in peers:
                peer.close()


def report(dtype: str, num_requests: int, repeats: int, llama: list[LlamaCpp]) -> None:
    """Run all variants with one dtype and print their table.

    Args:
        dtype: of weights and activations.
        num_requests: how many.
        repeats: how often each variant runs.
        llama: llama.cpp with room and in the tight cache, or nothing.
    """
    path = smollm2_checkpoint()
    prompts = real_prompts(HFTokenizer(path), num_requests)
    room = num_requests * -(-_TOKENS // _BLOCK_SIZE) + 8
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    with embedded(path, dtype, room) as roomy, embedded(path, dtype, _TIGHT_BLOCKS) as tight:
        tight_name = f"{_TIGHT_BLOCKS} blocks"
        taps = [ScheduleTap(llm) for llm in (roomy, tight)]
        runs: dict[str, Callable[[], Outputs]] = {
            _REFERENCE: partial(run_generate, model, prompts),
            "continuous batching, room": partial(run_continuous, model, prompts, room),
            "embedded, room": partial(run_embedded, roomy, prompts, taps[0]),
            f"continuous batching, {tight_name}": partial(
                run_continuous, model, prompts, _TIGHT_BLOCKS
            ),
            f"embedded, {tight_name}": partial(run_embedded, tight, prompts, taps[1]),
        }
        outputs: dict[str, Outputs] = {}
        timed: dict[str, Callable[[], float]] = {
            name: partial(_timed, name, runs, outputs) for name in runs
        }
        for tap, where in zip(taps, ("room", tight_name), strict=True):
            timed[f"linear layers, {where}"] = partial(
                LinearLimit(tap.runner).seconds, tap.schedule
            )
        for peer, where in zip(llama, ("room", tight_name), strict=False):
            timed[f"llama.cpp, {where}"] = partial(peer.seconds, prompts)
        for llm, tap in zip((roomy, tight), taps, strict=True):
            run_embedded(llm, prompts, tap)  # for the schedule, and to warm up
        figures = paired(timed, repeats)
        preemptions = [llm.counters.num_preemptions / (repeats + 1) for llm in (roomy, tight)]
        recomputed = tight.counters.num_recomputed_tokens / (repeats + 1)
    rows = []
    for name, seconds in figures.items():
        own = "embedded, room" if name.endswith("room") else f"embedded, {tight_name}"
        pairs = zip(outputs.get(name, []), outputs[_REFERENCE], strict=False)
        equal = sum(one == other for one, other in pairs)
        rows.append(
            [
                name,
                f"{median(seconds):.2f}",
                f"{num_requests * _OUTPUT_TOKENS / median(seconds):.1f}",
                f"{median_ratio(figures[_REFERENCE], seconds):.2f}",
                f"{median_ratio(seconds, figures[own]):.2f}",
                f"{equal}/{num_requests}" if name in outputs else "-",
            ]
        )
    print(f"\n{dtype}")
    print_table(
        [
            "variant",
            "s",
            "output tokens/s",
            "speed to generate",
            "time to embedded",
            "equal outputs",
        ],
        rows,
    )
    print(
        f"embedded, preemptions a run: {preemptions[0]:g} with room, {preemptions[1]:g} in "
        f"{tight_name} ({recomputed:g} tokens computed again)"
    )


def real_prompts(tokenizer: HFTokenizer, number: int) -> list[list[int]]:
    """Prompts of equal length, so that `generate` needs no padding."""
    source = PromptSource(0, 0, tokenizer.encode)
    return [source.take(_PROMPT_TOKENS) for _ in range(number)]


def run_generate(model: Any, prompts: list[list[int]]) -> Outputs:
    """One static batch."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=_generation_config()
        )
    rows: Outputs = out[:, _PROMPT_TOKENS:].tolist()
    return rows


def _generation_config() -> GenerationConfig:
    """Greedy; an end-of-sequence id that no token has keeps every output at full length."""
    return GenerationConfig(
        do_sample=False, max_new_tokens=_OUTPUT_TOKENS, eos_token_id=-1, pad_token_id=0
    )


def run_continuous(model: Any, prompts: list[list[int]], num_blocks: int) -> Outputs:
    """transformers' paged continuous batching."""
    results = model.generate_batch(
        prompts,
        generation_config=_generation_config(),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_BLOCK_SIZE,
            num_blocks=num_blocks,
            max_batch_tokens=_MAX_BATCHED_TOKENS,
            auto_switch_to_flash=False,
        ),
        warmup=False,
    )
    by_prompt = {tuple(item.prompt_ids): item.generated_tokens for item in results.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def embedded(path: Path, dtype: str, num_blocks: int) -> LLM:
    """This repository's engine, built once; loading weights is nobody's time."""
    return LLM(
        path,
        dtype=dtype,
        device="cpu",
        num_kv_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
    )


def run_embedded(llm: LLM, prompts: list[list[int]], tap: ScheduleTap | None = None) -> Outputs:
    """All prompts at once; nothing is left in the prefix cache from the run before."""
    llm.reset_prefix_cache()
    if tap is not None:
        tap.schedule.clear()
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


class LlamaCpp:
    """llama.cpp in a process of its own.

    Args:
        python: an interpreter that has `xllamacpp`.
        model: a GGUF file.
        num_threads: of its own.
        num_slots: requests that run at once.
    """

    def __init__(self, python: str, model: Path, num_threads: int, num_slots: int) -> None:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        numbers = [str(n) for n in (num_threads, num_slots, _TOKENS, _OUTPUT_TOKENS)]
        self._process = subprocess.Popen(
            [python, str(script), str(model), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._answer() == "ready", "llama.cpp did not start"

    def seconds(self, prompts: list[list[int]]) -> float:
        """Time of one run of all prompts."""
        assert self._process.stdin is not None
        print(json.dumps(prompts), file=self._process.stdin, flush=True)
        answer = json.loads(self._answer())
        assert answer["output_tokens"] == len(prompts) * _OUTPUT_TOKENS, answer
        return float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _timed(name: str, runs: dict[str, Callable[[], Outputs]], outputs: dict[str, Outputs]) -> float:
    started = time.perf_counter()
    outputs[name] = runs[name]()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
