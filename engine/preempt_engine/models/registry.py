"""From a model's configuration to a loaded model."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from preempt_engine.layers.linear import Linear
from preempt_engine.layers.parallel import TensorParallel
from preempt_engine.models.config import OPT_ARCHITECTURES, ModelConfig
from preempt_engine.models.llama import LlamaForCausalLM
from preempt_engine.models.loader import load_weights
from preempt_engine.models.opt import OPTForCausalLM
from preempt_engine.models.protocol import CausalLM
from preempt_engine.models.sharding import ModelShard

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def load_model(
    directory: Path,
    config: ModelConfig,
    *,
    parallel: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    truncated: bool = False,
) -> CausalLM:
    """Build the model that `config` describes and fill it from the checkpoint.

    Args:
        directory: the checkpoint.
        config: of that checkpoint.
        truncated: the checkpoint has more layers than `config`.
        parallel: the ranks; this one's part is loaded.
        max_model_len: positions [0, max_model_len) will be used.
        dtype: of the weights.
        device: of the weights.
        deterministic: build layers whose rows do not depend on their neighbours.

    Raises:
        ModelNotFoundError, UnsupportedModelError: see `load_weights`.
        ConfigError: see `ModelShard.of`.
    """
    model_class = OPTForCausalLM if config.architecture in OPT_ARCHITECTURES else LlamaForCausalLM
    model = model_class(
        ModelShard.of(config, parallel.rank, parallel.size),
        parallel,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        deterministic=deterministic,
    )

    def is_ignored(name: str) -> bool:
        if name == "lm_head.weight":
            return config.tie_word_embeddings
        layer = _LAYER.search(name)
        return truncated and layer is not None and int(layer[1]) >= config.num_hidden_layers

    load_weights(directory, model.checkpoint_tensors(), is_ignored)
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
    return model
