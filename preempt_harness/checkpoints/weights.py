"""The configuration and tensors of a tiny checkpoint, from its recipe.

Owns the rule that gives each kind of parameter its scale. The network is random, but scaled so
that attention and MLP outweigh the embedding in the residual stream: the next token is then a
hash-like function of everything attended. Knows nothing of files.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from preempt_harness.checkpoints.recipes import (
    BOS_ID,
    EOS_ID,
    MAX_POSITIONS,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    TinyRecipe,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_FINAL_NORMS = ("model.norm.", "model.decoder.final_layer_norm.")
# Norms and biases stray from 1 and 0 so that an engine that drops one is caught.
_SMALL = 0.1


def model_config(recipe: TinyRecipe) -> Any:
    """The transformers configuration (`PretrainedConfig`) of the checkpoint."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.for_model(
        recipe.family,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
        **recipe.config,
    )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config


def model_weights(recipe: TinyRecipe) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, float32; tied tensors once.

    Values are representable in bfloat16, so a float32 and a bfloat16 engine hold the same weights
    and differ by their arithmetic alone. They come from numpy's legacy generator, whose stream is
    frozen (NEP 19), so a recipe means the same weights with every version.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = model_config(recipe)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    return {
        name: torch.from_numpy(_values(recipe, name, tuple(parameter.shape)))
        .to(torch.bfloat16)
        .to(torch.float32)
        for name, parameter in skeleton.named_parameters()
    }


def _values(recipe: TinyRecipe, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    import numpy as np

    seed = hashlib.sha256(f"{recipe.seed}:{name}".encode()).digest()[:4]
    normal = np.random.RandomState(int.from_bytes(seed, "little")).standard_normal(shape)
    if "norm" in name:
        values = _norm(recipe, name, normal)
    elif name.endswith(".bias"):
        values = _bias(recipe, name, normal)
    else:
        values = _matrix(recipe, name, normal)
    return values.astype(np.float32)


def _norm(recipe: TinyRecipe, name: str, normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale and shift of RMSNorm, LayerNorm and of the norms of queries and keys."""
    gain = 1.0
    if "q_norm" in name or "k_norm" in name:
        gain = recipe.query_key_gain
    elif name.startswith(_FINAL_NORMS) and recipe.config["tie_word_embeddings"]:
        # The embedding, of unit variance, is the head: the scale of the logits is set here.
        gain = recipe.logit_std / math.sqrt(normal.shape[0])
    mean = 1.0 if name.endswith(".weight") else 0.0
    return gain * (mean + _SMALL * normal)


def _bias(recipe: TinyRecipe, name: str, normal: NDArray[np.float64]) -> NDArray[np.float64]:
    if "q_proj" in name or "k_proj" in name:
        return _SMALL * recipe.query_key_gain * normal
    if "fc1" in name:
        return recipe.mlp_inner_gain * (_SMALL * normal - recipe.mlp_threshold)
    return _SMALL * normal


def _matrix(recipe: TinyRecipe, name: str, normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Embeddings [rows, hidden] and projections [out, in]."""
    kind = name.split(".")[-2]
    if kind == "embed_positions":
        return normal
    if kind == "embed_tokens":
        return _without_special(normal) if recipe.config["tie_word_embeddings"] else normal
    if kind == "lm_head":
        normal = _without_special(normal)
    if kind == "fc2":
        # ReLU units have a positive mean. Rows that sum to zero keep it from adding the same
        # vector at every position, which would favour the same tokens for ever.
        normal = normal - normal.mean(axis=1, keepdims=True)
    fan_in: int = normal.shape[1]
    return normal * (_gain(recipe, kind) / math.sqrt(fan_in))


def _gain(recipe: TinyRecipe, kind: str) -> float:
    return {
        "q_proj": recipe.query_key_gain,
        "k_proj": recipe.query_key_gain,
        "v_proj": 1.0,
        "o_proj": recipe.attention_gain,
        "out_proj": recipe.attention_gain,
        "gate_proj": recipe.mlp_inner_gain,
        "up_proj": recipe.mlp_inner_gain,
        "fc1": recipe.mlp_inner_gain,
        "down_proj": recipe.mlp_output_gain,
        "fc2": recipe.mlp_output_gain,
        "lm_head": recipe.logit_std,
    }[kind]


def _without_special(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows [vocab, hidden] with those of the special tokens zeroed.

    Their logits are then 0, while the largest of some 500 others is about three standard
    deviations: generation does not end early, and special tokens do not appear in text.
    """
    rows = rows.copy()
    rows[: len(SPECIAL_TOKENS)] = 0.0
    return rows
