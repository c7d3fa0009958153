"""What a checkpoint is: where it lies, and the sizes and switches of its mathematics.

Owns the reading of Hugging Face configurations of the implemented families. Knows no tensors and
nothing of how the engine runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preempt_engine.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from preempt_engine.models.config_reader import ConfigReader, read_json

LLAMA_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
OPT_ARCHITECTURES = ("OPTForCausalLM",)
ARCHITECTURES = LLAMA_ARCHITECTURES + OPT_ARCHITECTURES

# What a hub snapshot needs; pickled weights and code are never fetched.
_HUB_PATTERNS = [
    "*.safetensors",
    "*.json",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "*.jinja",
]


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """Rotary position embedding, as `transformers.modeling_rope_utils` defines the types.

    Attributes:
        rope_type: "default", "linear" (positions divided by `factor`) or "llama3" (low
            frequencies divided by `factor`, a smooth ramp between the two wavelengths).
        theta: base of the wavelengths.
        factor: of "linear" and "llama3".
        low_freq_factor: of "llama3".
        high_freq_factor: of "llama3".
        original_max_position_embeddings: of "llama3".
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model. Names are Hugging Face's where they have one.

    Attributes:
        architecture: the checkpoint's class, one of `ARCHITECTURES`.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; each serves a group of query heads.
        head_dim: width of one head.
        max_position_embeddings: most positions the model was made for.
        norm_eps: of RMSNorm or LayerNorm.
        hidden_act: "silu" or "relu".
        tie_word_embeddings: the head's weight is the embedding's.
        qkv_bias: of the query, key and value projections.
        output_bias: of the attention's output projection.
        mlp_bias: of the feed-forward layer.
        qk_norm: RMSNorm over each query and key head (Qwen3).
        rope: rotary embedding; None where positions are learned (OPT).
        layer_windows: per layer, how many positions a query sees, itself included; None is all.
        dtype: the checkpoint's, "float32", "bfloat16" or "float16".
        eos_token_ids: ids that end a generation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeParameters | None
    layer_windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: frozenset[int]

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`) of a checkpoint.

        Raises:
            ModelNotFoundError: nothing readable is there.
            UnsupportedModelError: the architecture, or a key that changes the mathematics, is
                not implemented; both are named.
        """
        reader = ConfigReader(Path(path))
        architecture = _architecture(reader)
        reader.refuse_unknown_mathematics()
        if architecture in OPT_ARCHITECTURES:
            config = cls(architecture=architecture, **_opt_fields(reader))
        else:
            config = cls(architecture=architecture, **_llama_fields(reader, architecture))
        if config.num_attention_heads % config.num_key_value_heads:
            raise reader.refusal(
                "num_key_value_heads",
                config.num_key_value_heads,
                f"It must divide num_attention_heads={config.num_attention_heads}",
            )
        return config

    def truncated(self, num_hidden_layers: int) -> ModelConfig:
        """The model of the first so many layers; norm and head are those of the whole.

        Raises:
            ConfigError: it has fewer layers.
        """
        if num_hidden_layers > self.num_hidden_layers:
            raise ConfigError(
                f"num_hidden_layers={num_hidden_layers}: the checkpoint has "
                f"{self.num_hidden_layers} layers.",
                "Take at most as many, or leave it out for all.",
            )
        return dataclasses.replace(
            self,
            num_hidden_layers=num_hidden_layers,
            layer_windows=self.layer_windows[:num_hidden_layers],
        )


def resolve_model(name_or_path: str | Path) -> Path:
    """The local directory of a model: itself, or a snapshot of a hub id ("org/name").

    Only a string of exactly one slash that does not look like a path is ever asked of the hub.

    Raises:
        ModelNotFoundError: no such directory, no such hub id, or no network.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.exists() or name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") != 1:
        raise ModelNotFoundError(
            f"model={name!r} is not a directory.",
            "Give a directory in Hugging Face format, or a hub id such as 'org/name'.",
        )
    return _download(name)


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS))
    # The hub's client lets errors of its HTTP library through, whose classes change with its
    # versions; each of them means the same here.
    except Exception as error:
        raise ModelNotFoundError(
            f"model={hub_id!r} is no local directory and could not be fetched from the hub: "
            f"{type(error).__name__}: {error}.",
            "Check the name, the network and the access token, or give a local directory.",
        ) from error


def _architecture(reader: ConfigReader) -> str:
    names = reader.raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"{reader.directory / 'config.json'} names the architectures {names!r}.",
        f"Implemented: {', '.join(ARCHITECTURES)}.",
    )


def _llama_fields(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Fields of the Llama lineage; defaults are those of each class in transformers."""
    qwen3 = architecture == "Qwen3ForCausalLM"
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        attention_bias = reader.flag("attention_bias", False)
    else:  # Mistral and Qwen2 fix their biases; the key would contradict them.
        _expect(reader, "attention_bias", architecture == "Qwen2ForCausalLM")
        attention_bias = False
    if architecture == "LlamaForCausalLM":
        mlp_bias = reader.flag("mlp_bias", False)
    else:
        _expect(reader, "mlp_bias", False)
        mlp_bias = False
    default_kv_heads = {"LlamaForCausalLM": num_heads, "MistralForCausalLM": 8}.get(
        architecture, 32
    )
    num_kv_heads = reader.optional_integer("num_key_value_heads", default_kv_heads) or num_heads
    head_dim = reader.integer("head_dim", 128 if qwen3 else hidden_size // num_heads)
    if head_dim % 2:
        raise reader.refusal("head_dim", head_dim, "Rotary embedding needs an even head_dim")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "hidden_act": reader.choice("hidden_act", "silu", ("silu", "relu")),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "qkv_bias": attention_bias or architecture == "Qwen2ForCausalLM",
        "output_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "qk_norm": qwen3,
        "rope": _rope(reader),
        "layer_windows": _layer_windows(reader, architecture),
        "dtype": _dtype(reader),
        "eos_token_ids": _eos_token_ids(reader),
    }


def _opt_fields(reader: ConfigReader) -> dict[str, Any]:
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_layers = reader.integer("num_hidden_layers")
    if hidden_size % num_heads:
        raise reader.refusal(
            "num_attention_heads", num_heads, f"It must divide hidden_size={hidden_size}"
        )
    projection = reader.integer("word_embed_proj_dim", hidden_size)
    if projection != hidden_size:
        raise reader.refusal(
            "word_embed_proj_dim", projection, f"Only hidden_size={hidden_size} is implemented"
        )
    bias = reader.flag("enable_bias", True)
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("ffn_dim"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "norm_eps": 1e-5,  # torch's default, which OPT never sets
        "hidden_act": reader.choice("activation_function", "relu", ("silu", "relu")),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "qk_norm": False,
        "rope": None,
        "layer_windows": (None,) * num_layers,
        "dtype": _dtype(reader),
        "eos_token_ids": _eos_token_ids(reader),
    }


def _expect(reader: ConfigReader, key: str, value: bool) -> None:
    """Refuse a key that contradicts what the architecture fixes."""
    if reader.raw.get(key) not in (None, value):
        raise reader.refusal(key, reader.raw[key], f"This architecture fixes it to {value}")


def _rope(reader: ConfigReader) -> RopeParameters:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    key = "rope_parameters" if reader.raw.get("rope_parameters") else "rope_scaling"
    raw = reader.raw.get(key) or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise reader.refusal(key, raw, "Only one set of parameters for all layers is implemented")
    if raw.get("partial_rotary_factor") not in (None, 1.0):
        raise reader.refusal(f"{key}.partial_rotary_factor", raw["partial_rotary_factor"], "Only 1")
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    theta = float(raw.get("rope_theta") or reader.number("rope_theta", 10000.0))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    if rope_type not in needed:
        raise reader.refusal(f"{key}.rope_type", rope_type, f"Implemented: {', '.join(needed)}")
    for name in needed[rope_type]:
        if not isinstance(raw.get(name), int | float):
            raise reader.refusal(f"{key}.{name}", raw.get(name), f"{rope_type!r} needs a number")
    name = "original_max_position_embeddings"  # beside the other parameters, or outside them
    original = reader.raw.get(name) or raw.get(name) or reader.integer("max_position_embeddings")
    return RopeParameters(
        theta=theta,
        rope_type=rope_type,
        original_max_position_embeddings=original,
        **{name: float(raw[name]) for name in needed[rope_type]},
    )


def _layer_windows(reader: ConfigReader, architecture: str) -> tuple[int | None, ...]:
    """How many positions each layer sees.

    Llama has no window, Mistral one for all layers, Qwen only with `use_sliding_window`, and
    then for the layers that `layer_types`, or else `max_window_layers`, names.
    """
    num_layers = reader.integer("num_hidden_layers")
    windows: tuple[int | None, ...]
    if architecture == "LlamaForCausalLM":
        windows = (None,) * num_layers
    elif architecture == "MistralForCausalLM":
        windows = (reader.optional_integer("sliding_window", 4096),) * num_layers
    else:
        used = reader.flag("use_sliding_window", False)
        window = reader.optional_integer("sliding_window", 4096) if used else None
        first = reader.raw.get("max_window_layers", 28)
        types = reader.raw.get("layer_types") or [
            "full_attention" if layer < first else "sliding_attention"
            for layer in range(num_layers)
        ]
        windows = tuple(window if name == "sliding_attention" else None for name in types)
    types = reader.raw.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    if types is not None and (len(types) != num_layers or not set(types) <= known):
        raise reader.refusal(
            "layer_types", types, f"It must name {num_layers} layers of {sorted(known)}"
        )
    if types is not None and architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        implied = {
            "full_attention" if window is None else "sliding_attention" for window in windows
        }
        if set(types) != implied:
            raise reader.refusal("layer_types", types, "This architecture treats all layers alike")
    return windows


def _dtype(reader: ConfigReader) -> str:
    key = "dtype" if "dtype" in reader.raw else "torch_dtype"
    return reader.choice(key, "float32", ("float32", "bfloat16", "float16"))


def _eos_token_ids(reader: ConfigReader) -> frozenset[int]:
    """From `generation_config.json` if it names any, else from `config.json`."""
    generation = read_json(reader.directory / "generation_config.json") or {}
    value = generation.get("eos_token_id")
    if value is None:
        value = reader.raw.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise reader.refusal("eos_token_id", value, "It must be an integer or a list of them")
    return frozenset(ids)
