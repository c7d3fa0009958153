"""Models for transformers' continuous batching, and the swap space that fits them."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def model_path(model: str) -> Path:
    """Directory of a checkpoint by the harness's name, a path or a hub id."""
    from preempt_harness.checkpoints import resolve_model_name

    path = Path(resolve_model_name(model))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


@lru_cache(maxsize=2)
def load_model(model: str, dtype: str, device: str) -> nn.Module:
    """The model in evaluation mode: on a CPU in float32 unless told otherwise.

    The engine collects garbage whenever a manager stops. What is imported and loaded here stays,
    and is taken out of what such a collection looks through, until another model is loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    gc.unfreeze()
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_path(model), dtype=dtype, attn_implementation="sdpa"
    )
    loaded = loaded.to(device).eval()
    gc.collect()
    gc.freeze()
    return loaded


@lru_cache(maxsize=2)
def load_tokenizer(model: str) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(model))


def swap_space_gib(model: nn.Module, block_size: int, num_blocks: int) -> float:
    """The engine's unit for so many blocks; half a block more, so that rounding loses none."""
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.utils import (
        find_head_dim,
        find_num_key_value_heads,
    )

    config: Any = model.config
    page = FullAttentionCacheAllocator.get_bytes_per_page(
        find_num_key_value_heads(config),
        find_head_dim(config),
        next(model.parameters()).dtype,
        block_size,
    )
    block = math.lcm(config.num_hidden_layers * page, 128)
    return (num_blocks + 0.5) * block / 2**30 if num_blocks else 0.0


@contextmanager
def unpinned_if_on_cpu(model: nn.Module) -> Iterator[None]:
    """Without an accelerator memory cannot be pinned, which only speeds copies up.

    transformers pins its swap space all the same, and fails; with this its swap runs on a CPU.
    """
    import torch
    from transformers.generation.continuous_batching import offloading_manager

    if next(model.parameters()).device.type != "cpu":
        yield
        return

    class Unpinned:
        """torch, whose `empty` pins nothing."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return torch.empty(*args, **kwargs)

    offloading_manager.torch = Unpinned()
    try:
        yield
    finally:
        offloading_manager.torch = torch
