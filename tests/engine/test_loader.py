"""Weights from safetensors: what is loaded, and how a misfit is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Driver, family_configs, make_runner, random_tokens, save_checkpoint

from preempt_engine.errors import ModelNotFoundError, UnsupportedModelError
from preempt_engine.models.loader import load_weights, weight_files

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    config = family_configs()["llama-untied-biases"]
    save_checkpoint(config, tmp_path / "one")
    save_checkpoint(config, tmp_path / "many", max_shard_size="100KB")
    assert len(weight_files(tmp_path / "one")) == 1
    assert len(weight_files(tmp_path / "many")) > 2

    rows = []
    for name in ("one", "many"):
        driver = Driver(make_runner(tmp_path / name))
        rows.append(driver.run({driver.add("a", random_tokens(9, 0)): 9}))
    assert all((a == b).all() for a, b in zip(*rows, strict=True))


def test_misfits_are_reported_together_and_by_name(tmp_path: Path) -> None:
    save_checkpoint(family_configs()["llama"], tmp_path)
    _rewrite(
        tmp_path,
        **{
            "model.norm.weight": None,
            "model.layers.0.self_attn.k_proj.weight": torch.zeros(3, 48),
            "model.layers.0.self_attn.k_proj.bias": torch.zeros(24),
        },
    )
    with pytest.raises(UnsupportedModelError) as caught:
        make_runner(tmp_path)
    assert "missing model.norm.weight" in str(caught.value)
    assert "unexpected model.layers.0.self_attn.k_proj.bias" in str(caught.value)
    assert "k_proj.weight has shape [3, 48], expected [24, 48]" in str(caught.value)


def test_a_head_stored_beside_tied_embeddings_is_not_needed(tmp_path: Path) -> None:
    save_checkpoint(family_configs()["llama"], tmp_path)
    _rewrite(tmp_path, **{"lm_head.weight": torch.zeros(160, 48)})
    driver = Driver(make_runner(tmp_path))
    (row,) = driver.run({driver.add("a", [5]): 1})
    assert row.any()


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    save_checkpoint(family_configs()["llama-untied-biases"], tmp_path)
    _rewrite(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(UnsupportedModelError, match=r"missing lm_head\.weight"):
        make_runner(tmp_path)


def test_buffers_that_follow_from_the_configuration_are_not_unexpected(tmp_path: Path) -> None:
    save_file({"a.rotary_emb.inv_freq": torch.ones(3)}, tmp_path / "model.safetensors")
    load_weights(tmp_path, {})


def test_weights_are_converted_to_the_dtype_of_their_destination(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.5], dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    destination = torch.zeros(1)
    load_weights(tmp_path, {"w": destination})
    assert destination.item() == 1.5


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin.*save_pretrained"):
        weight_files(tmp_path)


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither model\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize("shard", ["absent.safetensors", "../outside.safetensors"])
def test_an_index_may_only_name_files_beside_it(shard: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    index = {"weight_map": {"w": shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match="shards that are not there"):
        weight_files(directory)


def test_a_damaged_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    with pytest.raises(ModelNotFoundError, match="not a readable safetensors file"):
        load_weights(tmp_path, {})
