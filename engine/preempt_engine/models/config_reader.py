"""Reading a Hugging Face `config.json`: typed access to its keys, refusal of what is unknown.

Owns the rule that a key which changes the mathematics is honoured or refused by name. Knows no
architecture; `config.py` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from preempt_engine.errors import ModelNotFoundError, UnsupportedModelError

# Keys that change the mathematics and are not implemented, with the values that leave it alone.
# They come from models of the Llama lineage (Gemma, Granite, Cohere, Qwen2-VL, StableLM, Llama 4,
# OPT-350m, ...): a checkpoint may carry one whatever architecture it names.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "rope_local_base_freq": (None,),
    "pretraining_tp": (None, 1),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "clip_qkv": (None,),
    "qkv_clip": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "alibi": (None, False),
    "do_layer_norm_before": (None, True),
    "_remove_final_layer_norm": (None, False),
    "layer_norm_elementwise_affine": (None, True),
}


class ConfigReader:
    """The keys of one `config.json`.

    Args:
        directory: the checkpoint.

    Raises:
        ModelNotFoundError: the directory or its `config.json` is absent or unreadable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise ModelNotFoundError(
                f"model={str(directory)!r} is not a directory.",
                "Give a directory in Hugging Face format, or a hub id such as 'org/name'.",
            )
        raw = read_json(directory / "config.json")
        if raw is None:
            raise ModelNotFoundError(
                f"{directory} holds no config.json.",
                "Give the folder that holds config.json beside the *.safetensors files.",
            )
        self.raw = raw

    def refuse_unknown_mathematics(self) -> None:
        """Raise if a key asks for mathematics that no model of this engine implements.

        Raises:
            UnsupportedModelError: the key, its value and the values that are accepted.
        """
        for key, neutral in _NEUTRAL_VALUES.items():
            value = self.raw.get(key)
            if value not in neutral:
                accepted = ", ".join(repr(item) for item in neutral)
                raise self.refusal(key, value, f"Only {accepted} is implemented")

    def refusal(self, key: str, value: object, expected: str) -> UnsupportedModelError:
        """The error for a key whose value this engine does not implement."""
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        return UnsupportedModelError(
            f"{self.directory / 'config.json'} sets {key}={shown}, which is not implemented.",
            f"{expected}; use another checkpoint.",
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            UnsupportedModelError: the key is absent without a default, or not a positive integer.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, value, "It must be a positive integer")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A positive integer; an explicit null means None, an absent key the default."""
        if key not in self.raw:
            return default
        return None if self.raw[key] is None else self.integer(key)

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(key, value, "It must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "It must be true or false")
        return value

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """One of `choices`."""
        value = self._value(key, default)
        if value not in choices:
            raise self.refusal(key, value, f"Implemented: {', '.join(choices)}")
        return str(value)

    def _value(self, key: str, default: object) -> object:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModelError(
                f"{self.directory / 'config.json'} has no key {key!r}.",
                "It is required; take config.json from the checkpoint's source again.",
            )
        return value


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when the file does not exist.

    Raises:
        ModelNotFoundError: the file is not a JSON object.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFoundError(
            f"{path} is not valid JSON: {error}.", "Download the file again."
        ) from error
    if not isinstance(value, dict):
        raise ModelNotFoundError(f"{path} is not a JSON object.", "Download the file again.")
    return value
