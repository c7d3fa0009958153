"""The KV memory of one worker: how many blocks fit, the tensors, poisoning and block copies.

Knows blocks by id only; which sequence a block belongs to is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from preempt_engine.attention.protocol import LayerKVCache
from preempt_engine.config import (
    DEFAULT_CPU_KV_BYTES,
    DEFAULT_CPU_SWAP_SPACE_BYTES,
    DEFAULT_SWAP_SPACE_BYTES,
    EngineConfig,
)
from preempt_engine.errors import ConfigError
from preempt_engine.models.config import ModelConfig
from preempt_engine.worker.block_mover import index_tensor, select_block_mover

# What a freed block is filled with: far outside what a model computes, so that one stale read
# changes the logits at once, and finite in every dtype (float16 ends at 65504), so that a masked
# read stays harmless: 0 * 1e4 is 0, while 0 * inf would be NaN and accuse a correct engine.
POISON = 1e4


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in every layer."""
    elements_per_token = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    return elements_per_token * block_size * dtype.itemsize


def workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """What a step needs beside weights and KV cache: an estimate, on the high side.

    Counts the tensors that are alive at once in the widest layer, the float32 logits of every
    sequence twice (the sampler copies), and a fixed part for the libraries.
    """
    query_kv = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    per_token = 4 * model.hidden_size + max(2 * query_kv, 3 * model.intermediate_size)
    logits = 2 * config.max_num_seqs * model.vocab_size * torch.float32.itemsize
    return config.max_num_batched_tokens * per_token * dtype.itemsize + logits + 256 * 2**20


def choose_num_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks of the pool, at least 1. Call it when the weights are in place.

    Raises:
        ConfigError: the memory holds no block.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = bytes_per_block(model, config.block_size, dtype)
    argument = "kv_cache_memory_bytes"
    if config.kv_cache_memory_bytes is not None:
        available = config.kv_cache_memory_bytes
    elif device.type == "cpu":
        available = DEFAULT_CPU_KV_BYTES
    else:
        argument = "gpu_memory_utilization"
        free, total = torch.cuda.mem_get_info(device)
        reserved = int(total * (1 - config.gpu_memory_utilization))
        available = free - reserved - workspace_bytes(config, model, dtype)
    num_blocks = available // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{argument} leaves {max(available, 0)} bytes for the KV cache; one block of "
            f"block_size={config.block_size} takes {block_bytes} bytes.",
            f"Raise {argument} or lower block_size.",
        )
    return num_blocks


def choose_num_host_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks of the swap space."""
    on_cpu = device.type == "cpu"
    return config.num_host_blocks(
        bytes_per_block(model, config.block_size, dtype),
        default_bytes=DEFAULT_CPU_SWAP_SPACE_BYTES if on_cpu else DEFAULT_SWAP_SPACE_BYTES,
    )


class KVCache:
    """Keys and values of every layer in one allocation.

    Args:
        model: layers, heads and head width.
        num_blocks: size of the pool.
        block_size: tokens per block.
        dtype: of keys and values.
        device: where they live.

    Attributes:
        pool: the allocation, [layers, 2, num_blocks, block_size, H, D].
        layers: one `LayerKVCache` per layer, views of it.
        mover: moves whole blocks out of the pool and back.

    Raises:
        ConfigError: the device has not that much memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            model.num_hidden_layers,
            2,
            num_blocks,
            block_size,
            model.num_key_value_heads,
            model.head_dim,
        )
        try:
            self.pool = _zeros(shape, dtype, device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"The device {device} cannot hold {num_blocks} KV blocks of "
                f"{bytes_per_block(model, block_size, dtype)} bytes.",
                "Lower num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization.",
            ) from error
        self.layers = [LayerKVCache(layer[0], layer[1]) for layer in self.pool]
        self.mover = select_block_mover(device)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill whole blocks with a large finite value."""
        self.pool.index_fill_(2, index_tensor(block_ids, self.pool.device), POISON)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination); every source is read before any write."""
        sources = self.mover.gather(self.pool, [source for source, _ in pairs])
        self.mover.scatter(self.pool, [target for _, target in pairs], sources)

    def clear(self) -> None:
        """Zeros again, as in a new cache."""
        self.pool.zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: memory never written must still be finite, for masked reads (see `POISON`).

    On a CPU they come from numpy, whose zeroed pages the system provides when they are first
    touched; a large pool that stays mostly unused then costs nothing.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
