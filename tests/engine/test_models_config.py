"""What a checkpoint's config.json means, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import family_configs

from preempt_engine.errors import ModelNotFoundError, UnsupportedModelError
from preempt_engine.models.config import ModelConfig, RopeParameters, resolve_model

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def _read(directory: Path, keys: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(keys))
    return ModelConfig.from_directory(directory)


def _as(architecture: str, **keys: Any) -> dict[str, Any]:
    return _LLAMA | {"architectures": [architecture]} | keys


@pytest.mark.parametrize("name", list(family_configs()))
def test_what_transformers_writes_is_read_as_it_means_it(name: str, tmp_path: Path) -> None:
    theirs = family_configs()[name]
    architecture = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "opt": "OPTForCausalLM",
    }[theirs.model_type]
    theirs.architectures = [architecture]
    theirs.save_pretrained(tmp_path)

    ours = ModelConfig.from_directory(tmp_path)

    heads = theirs.num_attention_heads
    assert ours.architecture == architecture
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_key_value_heads == (getattr(theirs, "num_key_value_heads", None) or heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == {7}


def test_old_and_new_spelling_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = _LLAMA | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3"} | scaling}
    new = _LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0} | scaling}

    expected = RopeParameters(theta=500.0, rope_type="llama3", **scaling)  # type: ignore[arg-type]
    assert _read(tmp_path, old).rope == expected
    assert _read(tmp_path, new).rope == expected


def test_the_oldest_spelling_of_linear_scaling_is_understood(tmp_path: Path) -> None:
    rope = _read(tmp_path, _LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert rope is not None
    assert (rope.rope_type, rope.theta, rope.factor) == ("linear", 10000.0, 2.0)


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        (_as("LlamaForCausalLM", sliding_window=8), (None, None, None)),
        (_as("MistralForCausalLM", num_key_value_heads=2), (4096, 4096, 4096)),
        (_as("MistralForCausalLM", num_key_value_heads=2, sliding_window=None), (None,) * 3),
        (_as("Qwen2ForCausalLM", num_key_value_heads=2, sliding_window=8), (None,) * 3),
        (
            _as(
                "Qwen2ForCausalLM",
                num_key_value_heads=2,
                sliding_window=8,
                use_sliding_window=True,
                max_window_layers=2,
            ),
            (None, None, 8),
        ),
        (
            _as(
                "Qwen3ForCausalLM",
                num_key_value_heads=2,
                sliding_window=8,
                use_sliding_window=True,
                layer_types=["sliding_attention", "full_attention", "full_attention"],
            ),
            (8, None, None),
        ),
    ],
)
def test_windows_follow_the_rules_of_each_family(
    keys: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert _read(tmp_path, keys).layer_windows == windows


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (_LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (_LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (_LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (_LLAMA | {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        (_LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (_LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (_LLAMA | {"pretraining_tp": 2}, "pretraining_tp"),
        (_LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (_LLAMA | {"logits_scaling": 8.0}, "logits_scaling"),
        (_LLAMA | {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (_LLAMA | {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        (_LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (_LLAMA | {"head_dim": 7}, "head_dim"),
        (_LLAMA | {"vocab_size": "100"}, "vocab_size"),
        (_LLAMA | {"torch_dtype": "float64"}, "torch_dtype"),
        (_as("Qwen2ForCausalLM", mlp_bias=True, num_key_value_heads=4), "mlp_bias"),
        (_as("Qwen2ForCausalLM", attention_bias=False, num_key_value_heads=4), "attention_bias"),
        (_as("MistralForCausalLM", attention_bias=True), "attention_bias"),
        (_OPT | {"do_layer_norm_before": False}, "do_layer_norm_before"),
        (_OPT | {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        (_OPT | {"activation_function": "gelu"}, "activation_function"),
        (_OPT | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (_OPT | {"num_attention_heads": 5}, "num_attention_heads"),
    ],
)
def test_other_mathematics_is_refused_by_name(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        _read(tmp_path, keys)


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'vocab_size'"):
        _read(tmp_path, {k: v for k, v in _LLAMA.items() if k != "vocab_size"})


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*OPT"):
        _read(tmp_path, {"architectures": ["GPT2LMHeadModel"]})


def test_a_directory_without_a_readable_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="not valid JSON"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(ModelNotFoundError, match="not a directory"):
        ModelConfig.from_directory(tmp_path / "absent")


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [([3, 5], 9, {3, 5}), (3, 9, {3}), (None, 9, {9}), (None, None, set())],
)
def test_the_generation_configuration_decides_about_the_end_of_sequence(
    in_generation: object, in_config: object, expected: set[int], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert _read(tmp_path, _LLAMA | {"eos_token_id": in_config}).eos_token_ids == expected


def test_an_existing_directory_is_the_model(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/model", "./model", "~/no-model", "model", "a/b/c", "a\\b"])
def test_what_looks_like_a_path_never_asks_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise AssertionError("asked the network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match="is not a directory"):
        resolve_model(name)


def test_a_hub_id_is_fetched_without_pickled_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(hub_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some-org/some-model") == tmp_path
    assert asked["hub_id"] == "some-org/some-model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in asked["allow_patterns"])


def test_a_hub_id_without_network_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"no route to host.*local directory"):
        resolve_model("some-org/some-model")
