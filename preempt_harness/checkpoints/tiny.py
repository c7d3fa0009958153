"""Tiny checkpoints in Hugging Face format, made on first use and kept in the cache folder."""

from __future__ import annotations

from pathlib import Path

from preempt_harness.checkpoints.cache import cached_folder
from preempt_harness.checkpoints.errors import UnknownCheckpointError, require_extra
from preempt_harness.checkpoints.recipes import RECIPES, TinyRecipe
from preempt_harness.checkpoints.versions import transformers_major


def tiny_checkpoint(family: str) -> Path:
    """A tiny random checkpoint, chosen so that preemption bugs show in its output.

    Two layers, a vocabulary of 512, float32, one to three megabytes; the same weights on every
    machine. The first call takes seconds, later ones milliseconds; processes may call at once.

    Args:
        family: "llama", "qwen2", "qwen3", "mistral" or "opt".

    Returns:
        Directory with config.json, generation_config.json, model.safetensors and a byte-level
        tokenizer. What `measure_quality` finds in it stands in docs/checkpoints.md.

    Raises:
        UnknownCheckpointError: no family has this name.
        MissingExtraError: torch or transformers is not installed.
        CheckpointError: the cache folder cannot be written.
    """
    recipe = RECIPES.get(family)
    if recipe is None:
        raise UnknownCheckpointError(
            f"No tiny checkpoint is named {family!r}.", f"Known: {', '.join(RECIPES)}."
        )
    require_extra("engine", "torch", "transformers", "safetensors")
    name = f"tiny-{family}-{recipe.digest()}-transformers{transformers_major()}"
    return cached_folder(name, lambda folder: write_tiny_checkpoint(folder, recipe))


def write_tiny_checkpoint(folder: Path, recipe: TinyRecipe) -> None:
    """Write all files of a tiny checkpoint into an empty folder."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from preempt_harness.checkpoints.tokenizer import save_byte_tokenizer
    from preempt_harness.checkpoints.weights import model_config, model_weights

    config = model_config(recipe)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    save_file(model_weights(recipe), folder / "model.safetensors", metadata={"format": "pt"})
    save_byte_tokenizer(folder)
