"""Speed on a GPU: attention backends, CUDA graphs, deterministic mode, prefill and swap.

    PYTHONPATH=.:engine python -m benchmarks.gpu_speed [--repeats N] [--layers N] [--device cpu]

A Llama of 1 billion parameters with random weights in bfloat16, made in a temporary folder.
Variants take turns; medians over repeats, ratios to the first variant within each repeat.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measure import median_ratio, paired, print_table
from preempt_engine import LLM, SamplingParams
from preempt_engine.worker.swap_space import SwapSpace

_OUTPUT_TOKENS = 64
_PROMPT_TOKENS = 128
_PREFILL_TOKENS = 2048
_VARIANTS: dict[str, dict[str, Any]] = {
    "triton, graphs": {"attention_backend": "triton"},
    "triton, eager": {"attention_backend": "triton", "enforce_eager": True},
    "triton, deterministic": {"attention_backend": "triton", "deterministic": True},
    "torch, eager": {"attention_backend": "torch"},
    "auto, blocks of 256": {"attention_backend": "auto", "block_size": 256},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variants", nargs="+", choices=list(_VARIANTS), default=list(_VARIANTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.layers, arguments.width)
        report_generation(Path(folder), arguments)
    report_swap(arguments.device, arguments.repeats)


def save_model(folder: Path, layers: int, width: int) -> None:
    """Random weights."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def report_generation(folder: Path, arguments: argparse.Namespace) -> None:
    """Output tokens a second for each batch, and prompt tokens a second."""
    rows = []
    for batch in [*arguments.batches, 0]:
        variants: dict[str, Callable[[], float]] = {}
        engines = [
            LLM(
                str(folder),
                device=arguments.device,
                dtype="bfloat16",
                max_num_seqs=max(batch, 1),
                max_model_len=4096,
                num_kv_blocks=_num_blocks(max(batch, 1), _VARIANTS[name].get("block_size", 16)),
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
                **_VARIANTS[name],
            )
            for name in arguments.variants
        ]
        for name, llm in zip(arguments.variants, engines, strict=True):
            run = partial(decode_rate, llm, batch) if batch else partial(prefill_rate, llm)
            run()  # kernels are compiled when they are first used
            variants[name] = run
        figures = paired(variants, arguments.repeats)
        first = figures[arguments.variants[0]]
        label = f"decode, {batch} requests" if batch else f"prefill, {_PREFILL_TOKENS} tokens"
        rows += [
            (f"{label}: {name}", f"{median(found):.0f}", f"{median_ratio(found, first):.2f}")
            for name, found in figures.items()
        ]
        for llm in engines:
            llm.close()
    print_table(("variant", "tokens/s", "ratio"), rows)


def _num_blocks(batch: int, block_size: int) -> int:
    tokens = max(_PREFILL_TOKENS, batch * (_PROMPT_TOKENS + _OUTPUT_TOKENS + block_size))
    return -(-tokens // block_size) + batch


def _prompts(count: int, length: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    prompts: list[list[int]] = generator.integers(0, 32000, (count, length)).tolist()
    return prompts


def decode_rate(llm: LLM, batch: int) -> float:
    """Output tokens a second of a batch, its prefill included."""
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(_prompts(batch, _PROMPT_TOKENS), params, use_tqdm=False)
    return batch * _OUTPUT_TOKENS / (time.perf_counter() - start)


def prefill_rate(llm: LLM) -> float:
    """Prompt tokens a second of one prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(_prompts(1, _PREFILL_TOKENS - 8), params, use_tqdm=False)
    return _PREFILL_TOKENS / (time.perf_counter() - start)


def report_swap(device: str, repeats: int) -> None:
    """Bytes a second out of the pool and back."""
    pool = torch.zeros(16, 2, 512, 16, 8, 64, dtype=torch.bfloat16, device=device)
    space = SwapSpace(pool, 256)
    gigabytes = 256 * pool[:, :, 0].numel() * pool.itemsize / 1e9
    out = [(2 * index, index) for index in range(256)]
    back = [(host, block) for block, host in out]

    def rate(copy: Callable[[], None]) -> float:
        _finish(device)
        start = time.perf_counter()
        copy()
        space.wait()
        _finish(device)
        return gigabytes / (time.perf_counter() - start)

    variants = {
        "out": partial(rate, partial(space.swap_out, out)),
        "in": partial(rate, partial(space.swap_in, back)),
    }
    figures = paired(variants, repeats + 1)
    print_table(
        ("swap of 256 blocks", "GB/s"),
        [(name, f"{median(found[1:]):.1f}") for name, found in figures.items()],
    )


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
