"""Beam search beside transformers. `python -m benchmarks.beam_parity smollm2 --prompts 20`

Every prompt in a pool that preempts: token ids of all beams, best first, compared one by one.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
from transformers import AutoModelForCausalLM

from preempt_engine import LLM, BeamSearchParams
from preempt_harness.checkpoints import resolve_model_name

_PROMPT_TOKENS = 12
_MAX_TOKENS = 12


def main() -> int:
    """Print a line per model; exit status 1 if any beam differs or nothing was preempted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--width", type=int, default=3)
    arguments = parser.parse_args()
    results = [compare(name, arguments.prompts, arguments.width) for name in arguments.models]
    return 0 if all(results) else 1


def compare(name: str, num_prompts: int, width: int) -> bool:
    """Whether all beams of all prompts are equal, and some request was preempted."""
    path = str(resolve_model_name(name))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    source = random.Random(0)
    vocab_size = model.config.vocab_size
    prompts = [
        [source.randrange(4, vocab_size) for _ in range(_PROMPT_TOKENS)] for _ in range(num_prompts)
    ]
    params = BeamSearchParams(beam_width=width, max_tokens=_MAX_TOKENS, ignore_eos=True)
    with LLM(path, dtype="float32", num_kv_blocks=28, block_size=4, max_num_seqs=12) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.counters.num_preemptions
    equal = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=_MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        wanted = expected[:, len(prompt) :].tolist()
        equal += [list(beam.token_ids) for beam in output.outputs] == wanted
    print(f"{name}: {equal} of {num_prompts} prompts equal, {width} beams, {preemptions} preempted")
    return equal == num_prompts and preemptions > 0


if __name__ == "__main__":
    sys.exit(main())
