"""Greedy outputs and logits beside transformers. `python -m benchmarks.parity tiny-llama smollm2`

For each model: 8 prompts, 64 greedy tokens, compared token for token with `generate`; the logits
of every position of prompt and output, fed to both at once, compared in float32.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
from transformers import AutoModelForCausalLM

from preempt_engine import LLM, SamplingParams
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey
from preempt_harness.checkpoints import resolve_model_name

NUM_PROMPTS = 8
NUM_TOKENS = 64
# Of the largest logit: some 80 roundings of float32. Both sum in orders of their own.
MAX_LOGIT_DIFFERENCE = 1e-5
MODELS = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral", "tiny-opt", "smollm2")


def compare(name: str) -> tuple[int, float, float]:
    """Prompts whose outputs are equal, the largest difference of a logit, the largest logit."""
    path = str(resolve_model_name(name))
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    source = random.Random(f"parity/{name}")
    prompts = [
        [source.randrange(4, 500) for _ in range(source.randint(5, 60))] for _ in range(NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(path, dtype="float32", num_kv_blocks=256, skip_tokenizer_init=True) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]
        equal, difference, largest = 0, 0.0, 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            equal += output == _generate(peer, prompt)
            ours, theirs = _logits(llm, prompt + output), _peer_logits(peer, prompt + output)
            difference = max(difference, float((ours - theirs).abs().max()))
            largest = max(largest, float(theirs.abs().max()))
    return equal, difference, largest


@torch.inference_mode()
def _generate(peer: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = peer.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    output: list[int] = tokens[0, len(prompt) :].tolist()
    return output


@torch.inference_mode()
def _peer_logits(peer: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = peer(torch.tensor([tokens])).logits[0]
    return logits


def _logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Rows of all positions in one step, through the engine's own runner."""
    num_blocks = -(-len(tokens) // llm.config.block_size)
    item = ScheduledSequence(
        key=SequenceKey("parity"),
        start=0,
        end=len(tokens),
        logits_start=0,
        reset=True,
        new_token_ids=tokens,
        new_block_ids=list(range(num_blocks)),
    )
    llm.reset()
    logits = llm.execute(SchedulerOutput(step_id=0, scheduled=[item])).result()
    return torch.stack([torch.from_numpy(logits.row(row)) for row in range(len(tokens))])


def main() -> int:
    """Compare the named models; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    failed = False
    for name in parser.parse_args().models:
        equal, difference, largest = compare(name)
        failed |= equal < NUM_PROMPTS or difference > MAX_LOGIT_DIFFERENCE * largest
        print(
            f"{name}: {equal} of {NUM_PROMPTS} outputs of {NUM_TOKENS} tokens equal, "
            f"logits differ by at most {difference:.1e} (largest {largest:.1f})",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
