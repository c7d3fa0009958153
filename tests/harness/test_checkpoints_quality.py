"""The tiny checkpoints are fit to show preemption bugs; unfit models measure as unfit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from preempt_harness.checkpoints import measure_quality, tiny_checkpoint
from preempt_harness.checkpoints.corruption import measure_corruption
from preempt_harness.checkpoints.quality import distinct_bigrams
from preempt_harness.checkpoints.recipes import RECIPES, TinyRecipe
from preempt_harness.checkpoints.weights import model_config, model_weights


@pytest.mark.slow
@pytest.mark.parametrize("family", list(RECIPES))
def test_output_does_not_loop_gaps_exceed_noise_and_corruption_shows(family: str) -> None:
    """The bounds leave room below the figures of docs/checkpoints.md for other machines."""
    quality = measure_quality(tiny_checkpoint(family))
    assert quality.prompts >= 8
    assert quality.distinct_bigrams_min > 0.7
    assert quality.eos_share == 0.0
    # Logits are about 10, a float32 unit in the last place 1e-6 there; measured: 2e-5 to 3e-5.
    assert quality.float32.noise < 1e-4
    assert quality.float32.percentile_1 > 100 * quality.float32.noise
    # Expected of a gap with density 1 / 0.7 at zero: 1536 * 2 * noise / 0.7 = 0.1 positions.
    assert quality.float32.near_tie_share <= 2 / quality.float32.positions
    assert quality.float32.changed_share <= 2 / quality.float32.positions
    assert quality.bfloat16.median > quality.bfloat16.noise
    assert quality.bfloat16.changed_share < 0.03
    for found in quality.corruption:
        soon, later = {1: (0.4, 0.9), 4: (0.8, 0.95), 16: (0.95, 0.99)}[found.slots]
        assert found.changed_within_8 > soon, found
        assert found.changed_within_32 > later, found


def random_prompts(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, 512, (count, length), generator=torch.Generator().manual_seed(3))


def model_of(recipe: TinyRecipe) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_config(model_config(recipe))
    model.load_state_dict(model_weights(recipe))
    return model.eval()


@torch.inference_mode()
def test_a_model_that_ignores_attention_is_not_changed_by_corruption() -> None:
    model = model_of(dataclasses.replace(RECIPES["llama"], attention_gain=0.0))
    prompt, other = random_prompts(2, 24)
    for found in measure_corruption(model, [(prompt, other)], starts_per_prompt=4):
        assert found.trials == 4
        assert found.changed_within_8 == found.changed_within_32 == 0.0


@pytest.mark.slow
def test_a_model_with_the_usual_random_weights_fails_the_bounds(tmp_path: Path) -> None:
    """The reason for recipes: such a model repeats one token and often does not look back."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(RECIPES["llama"])).save_pretrained(tmp_path)
    quality = measure_quality(tmp_path)
    assert quality.distinct_bigrams_min < 0.2
    assert min(found.changed_within_32 for found in quality.corruption) < 0.8


def test_distinct_bigrams_tells_a_loop_from_a_sequence() -> None:
    assert distinct_bigrams(range(64)) == 1.0
    assert distinct_bigrams([1, 2, 3] * 21) == 3 / 62
    assert distinct_bigrams([7] * 64) == 1 / 63
