"""Whether a checkpoint is fit to test preemption with: measured, never assumed.

Three properties matter. Greedy output must not loop, or a lost token goes unseen. The gap between
the two best logits must stay far above float noise, or harmless differences change tokens. And the
output must depend on every old KV slot, or a corrupted one goes unseen. Uses transformers alone,
as an opinion from outside the embedded engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from preempt_harness.checkpoints.corruption import Corruption, measure_corruption
from preempt_harness.checkpoints.decoding import forward, greedy, new_cache
from preempt_harness.checkpoints.errors import require_extra

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PROMPT_LENGTHS = (5, 100, 200)
PROMPTS_PER_LENGTH = 8
OUTPUT_TOKENS = 64
CORRUPTED_LENGTHS = (100, 200)
STARTS_PER_PROMPT = 16
# Not the prompts that the recipes were searched with: those would flatter them.
_PROMPT_SEED = 21


@dataclass(frozen=True)
class GapStatistics:
    """The gap between the two largest logits at every greedily generated position.

    Attributes:
        positions: number of positions.
        minimum: smallest gap.
        percentile_1: 1 % of the gaps are smaller.
        percentile_10: 10 % of the gaps are smaller.
        median: half of the gaps are smaller.
        noise: largest difference of any logit between decoding token by token in a batch of 8, one
            forward pass over all tokens, and the same pass with a batch of 1.
        near_tie_share: share of positions whose gap is at most twice the noise, where another
            batch mix may choose another token.
        changed_share: share of positions where the forward pass over all tokens did choose another
            token than decoding.
    """

    positions: int
    minimum: float
    percentile_1: float
    percentile_10: float
    median: float
    noise: float
    near_tie_share: float
    changed_share: float


@dataclass(frozen=True)
class Quality:
    """What `measure_quality` found.

    Attributes:
        prompts: random prompts decoded greedily, 64 tokens each.
        distinct_bigrams_min: distinct pairs of neighbouring tokens / all pairs, in the output that
            repeats itself most; an output that loops with period p has p / 63 or a little more.
        eos_share: share of generated tokens that are the end-of-sequence token.
        float32: gaps and noise in float32.
        bfloat16: the same prompts with weights, activations and cache in bfloat16.
        corruption: effect of corrupted KV slots, in float32.
    """

    prompts: int
    distinct_bigrams_min: float
    eos_share: float
    float32: GapStatistics
    bfloat16: GapStatistics
    corruption: tuple[Corruption, ...]


def measure_quality(path: Path) -> Quality:
    """Measure a checkpoint on random prompts of 5 to 200 tokens; takes seconds for a tiny one.

    Args:
        path: directory in Hugging Face format.

    Raises:
        MissingExtraError: torch or transformers is not installed.
    """
    require_extra("engine", "torch", "transformers")
    import torch

    with _one_thread(), torch.inference_mode():
        model = _load(path, "float32")
        prompts = _prompts(model.config.vocab_size)
        outputs, float32 = _measure_gaps(model, prompts)
        _, bfloat16 = _measure_gaps(_load(path, "bfloat16"), prompts)
        corruption = measure_corruption(
            model,
            [
                (ids[row], ids[row + 1])
                for ids in prompts
                if ids.shape[1] in CORRUPTED_LENGTHS
                for row in (0, 2)
            ],
            STARTS_PER_PROMPT,
        )
    rows = [row for ids in outputs for row in ids.tolist()]
    eos_token_id = model.config.eos_token_id
    return Quality(
        prompts=len(rows),
        distinct_bigrams_min=min(distinct_bigrams(row) for row in rows),
        eos_share=sum(row.count(eos_token_id) for row in rows) / (len(rows) * OUTPUT_TOKENS),
        float32=float32,
        bfloat16=bfloat16,
        corruption=corruption,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def distinct_bigrams(token_ids: Sequence[int]) -> float:
    """Distinct pairs of neighbouring tokens / all pairs; 1 when nothing repeats."""
    pairs = list(pairwise(token_ids))
    return len(set(pairs)) / len(pairs)


def _load(path: Path, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval()


def _prompts(vocab_size: int) -> list[Tensor]:
    """Random ids [PROMPTS_PER_LENGTH, length], for each length."""
    import numpy as np
    import torch

    generator = np.random.RandomState(_PROMPT_SEED)
    return [
        torch.from_numpy(generator.randint(0, vocab_size, (PROMPTS_PER_LENGTH, length)))
        for length in PROMPT_LENGTHS
    ]


def _measure_gaps(
    model: PreTrainedModel, prompts: list[Tensor]
) -> tuple[list[Tensor], GapStatistics]:
    """Outputs [batch, OUTPUT_TOKENS] per batch of prompts, and statistics over all positions."""
    import torch

    outputs, gaps, noises, changed = [], [], [], []
    for prompt_ids in prompts:
        output_ids, logits = greedy(model, prompt_ids, OUTPUT_TOKENS, new_cache(model))
        best, second = logits.topk(2, dim=-1).values.unbind(dim=-1)  # [batch, OUTPUT_TOKENS] each
        outputs.append(output_ids)
        gaps.append((best - second).flatten())
        token_ids = torch.cat([prompt_ids, output_ids], dim=1)
        # The positions whose logits chose the output: the last prompt token and those after it.
        chose = slice(prompt_ids.shape[1] - 1, -1)
        batched = forward(model, token_ids)[:, chose]
        alone = forward(model, token_ids[:1])[:, chose]
        noises.append(_largest_difference(logits, batched))
        noises.append(_largest_difference(logits[:1], alone))
        noises.append(_largest_difference(batched[:1], alone))
        changed.append((batched.argmax(dim=-1) != output_ids).flatten())
    return outputs, _statistics(torch.cat(gaps), max(noises), torch.cat(changed))


def _largest_difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


def _statistics(gaps: Tensor, noise: float, changed: Tensor) -> GapStatistics:
    def percentile(percent: float) -> float:
        return float(gaps.quantile(percent / 100))

    return GapStatistics(
        positions=gaps.numel(),
        minimum=float(gaps.min()),
        percentile_1=percentile(1),
        percentile_10=percentile(10),
        median=percentile(50),
        noise=noise,
        near_tie_share=float((gaps <= 2 * noise).float().mean()),
        changed_share=float(changed.float().mean()),
    )
