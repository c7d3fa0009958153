"""What the tiny checkpoints are made of: sizes, seed and gains per family, as plain data.

The gains were found by random search against the three properties that `quality` measures. Knows
neither torch nor transformers; `weights` turns a recipe into tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

# Raise it when the files made from an unchanged recipe change.
FORMAT_VERSION = 2

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<unk>")
BOS_ID, EOS_ID, PAD_ID, UNK_ID = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 512
MAX_POSITIONS = 2048


@dataclass(frozen=True, kw_only=True)
class TinyRecipe:
    """How one tiny checkpoint is made.

    A gain g means: elements are normal with standard deviation g / sqrt(fan_in), so an input of
    unit variance leaves with standard deviation g.

    Attributes:
        family: transformers' `model_type`.
        seed: of every tensor, together with the tensor's name.
        config: arguments of the family's configuration class beyond those all families share.
        query_key_gain: of the query and key projections (of the query and key norms where the
            family has them); its square is the standard deviation of the attention scores.
        attention_gain: of the attention's output projection.
        mlp_inner_gain: of the projections into the MLP; above 1 a gated MLP is closer to a product
            of two linear maps, which mixes its inputs more.
        mlp_threshold: subtracted in every MLP unit, in standard deviations of its input; a ReLU
            that is seldom active depends more sharply on its input.
        mlp_output_gain: of the projection out of the MLP.
        logit_std: standard deviation of the logits.
    """

    family: str
    seed: int
    config: Mapping[str, int | bool | None]
    query_key_gain: float
    attention_gain: float
    mlp_inner_gain: float
    mlp_threshold: float = 0.0
    mlp_output_gain: float
    logit_std: float = 3.0

    def digest(self) -> str:
        """16 hexadecimal digits that change with any field and with `FORMAT_VERSION`."""
        text = json.dumps([FORMAT_VERSION, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_GATED = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}

RECIPES: Mapping[str, TinyRecipe] = {
    recipe.family: recipe
    for recipe in (
        TinyRecipe(
            family="llama",
            seed=9,
            config=_GATED,
            query_key_gain=1.15,
            attention_gain=64.0,
            mlp_inner_gain=8.0,
            mlp_output_gain=40.0,
        ),
        TinyRecipe(
            family="qwen2",
            seed=0,
            config=_GATED,
            query_key_gain=1.15,
            attention_gain=64.0,
            mlp_inner_gain=8.0,
            mlp_output_gain=40.0,
        ),
        TinyRecipe(
            family="qwen3",
            seed=1,
            config={
                **_GATED,
                "hidden_size": 96,
                "num_attention_heads": 4,
                "head_dim": 32,
                "tie_word_embeddings": True,
            },
            query_key_gain=1.15,
            attention_gain=16.0,
            mlp_inner_gain=8.0,
            mlp_output_gain=16.0,
        ),
        TinyRecipe(
            family="mistral",
            seed=0,
            config={**_GATED, "num_attention_heads": 4, "sliding_window": None},
            query_key_gain=1.0,
            attention_gain=16.0,
            mlp_inner_gain=8.0,
            mlp_output_gain=40.0,
        ),
        TinyRecipe(
            family="opt",
            seed=61,
            config={
                "hidden_size": 128,
                "word_embed_proj_dim": 128,
                "ffn_dim": 512,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "tie_word_embeddings": True,
            },
            query_key_gain=1.45,
            attention_gain=8.0,
            mlp_inner_gain=1.0,
            mlp_threshold=1.0,
            mlp_output_gain=200.0,
        ),
    )
}
