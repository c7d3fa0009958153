"""Tiny checkpoints: the files they hold, the features they exercise, and how names resolve."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from preempt_harness.checkpoints import (
    CheckpointError,
    MissingExtraError,
    UnknownCheckpointError,
    errors,
    resolve_model_name,
    tiny_checkpoint,
)
from preempt_harness.checkpoints.recipes import EOS_ID, RECIPES, VOCAB_SIZE
from preempt_harness.checkpoints.smollm2 import check_same_logits
from preempt_harness.checkpoints.weights import model_weights

FAMILIES = list(RECIPES)
# Of names and bytes of all tensors; they change with a recipe and with nothing else.
WEIGHT_DIGESTS = {
    "llama": "372a917017ddacdf",
    "qwen2": "b75b6be3e70296f0",
    "qwen3": "dfe9ffc854c5cd42",
    "mistral": "cb798de4f7f30ec6",
    "opt": "70bde090379f65a7",
}


def config_of(family: str) -> dict[str, object]:
    config: dict[str, object] = json.loads((tiny_checkpoint(family) / "config.json").read_bytes())
    return config


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, preempt_harness.checkpoints;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r};"
    assert subprocess.run([sys.executable, "-c", path + code], check=False).returncode == 0


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnknownCheckpointError, match=r"'gpt7'.*llama, qwen2, qwen3, mistral, opt"):
        tiny_checkpoint("gpt7")
    assert issubclass(UnknownCheckpointError, ValueError)


def test_a_missing_library_is_an_error_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "preempt-harness\[engine\]"'):
        tiny_checkpoint("llama")
    with pytest.raises(MissingExtraError, match=r'pip install "preempt-harness\[smollm2\]"'):
        resolve_model_name("smollm2")


def test_short_names_resolve_and_others_stay() -> None:
    assert resolve_model_name("tiny-llama") == tiny_checkpoint("llama")
    for name in ("exact", "org/model", "/some/path"):
        assert resolve_model_name(name) == name
    with pytest.raises(UnknownCheckpointError, match="'gpt7'"):
        resolve_model_name("tiny-gpt7")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_the_same_on_every_machine(family: str) -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(model_weights(RECIPES[family]).items()):
        assert torch.equal(tensor, tensor.to(torch.bfloat16).float())
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == WEIGHT_DIGESTS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_tensor_and_misses_none(family: str) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(family), output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.config.model_type == family
    assert model.config.vocab_size == VOCAB_SIZE
    assert model.config.max_position_embeddings >= 1024
    assert GenerationConfig.from_pretrained(tiny_checkpoint(family)).eos_token_id == EOS_ID


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_encodes_every_text_and_decodes_every_id(family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(family))
    text = "the rates: \n\t{}  éß漢😀"
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert all(tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE))
    assert tokenizer.eos_token_id == EOS_ID
    assert tokenizer(tokenizer.eos_token).input_ids == [EOS_ID]


def test_each_family_brings_what_sets_it_apart() -> None:
    assert {"q_proj.bias", "k_proj.bias", "v_proj.bias"} <= layer_tensors("qwen2")
    assert {"q_norm.weight", "k_norm.weight"} <= layer_tensors("qwen3")
    assert {"fc1.bias", "out_proj.bias", "final_layer_norm.bias"} <= layer_tensors("opt")
    qwen3 = config_of("qwen3")
    assert qwen3["head_dim"] * qwen3["num_attention_heads"] != qwen3["hidden_size"]  # type: ignore[operator]
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        config = config_of(family)
        assert config["num_attention_heads"] in (4, 8)
        assert config["num_key_value_heads"] == 2


def layer_tensors(family: str) -> set[str]:
    """Last two parts of the names of all tensors, without norms' and biases' neutral values."""
    return {
        ".".join(name.split(".")[-2:])
        for name, tensor in model_weights(RECIPES[family]).items()
        if not (tensor == tensor.flatten()[0]).all()
    }


def test_any_change_of_a_recipe_changes_the_folder() -> None:
    recipe = RECIPES["llama"]
    changes: list[dict[str, Any]] = [
        {field.name: _other(getattr(recipe, field.name))} for field in dataclasses.fields(recipe)
    ]
    changed = [dataclasses.replace(recipe, **change) for change in changes]
    digests = {recipe.digest(), *(other.digest() for other in changed)}
    assert len(digests) == 1 + len(changed)
    assert recipe.digest() in tiny_checkpoint("llama").name


def _other(value: object) -> object:
    if isinstance(value, dict):
        return {**value, "hidden_size": 64}
    return value + (1 if isinstance(value, int | float) else "x")  # type: ignore[operator]


def test_a_conversion_that_changed_a_weight_is_refused() -> None:
    original = load("llama")
    converted = load("llama")
    token_ids = torch.arange(10)[None]
    check_same_logits(original, converted, token_ids)
    with torch.no_grad():
        converted.lm_head.weight[100, 0] += 2**-10
    with pytest.raises(CheckpointError, match="differs from the original"):
        check_same_logits(original, converted, token_ids)


def load(family: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family)).eval()


def test_a_checkpoint_is_small_and_names_its_architecture() -> None:
    config = json.loads((tiny_checkpoint("llama") / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (tiny_checkpoint("llama") / "model.safetensors").stat().st_size < 4 * 2**20
