"""Small random checkpoints, and a driver that plays the scheduler for one `ModelRunner`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from preempt_engine.config import EngineConfig
from preempt_engine.observer import EngineObserver
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey
from preempt_engine.worker.model_runner import ModelRunner

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 88,  # no multiple of 16, so that vector loops have a remainder
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def family_configs() -> dict[str, PretrainedConfig]:
    """One configuration per family and per switch that changes the mathematics."""
    return {
        "llama": LlamaConfig(**_SIZES, tie_word_embeddings=True),
        "llama-untied-biases": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
        "llama-head-dim": LlamaConfig(**_SIZES, head_dim=20),
        "llama-no-groups": LlamaConfig(**(_SIZES | {"num_key_value_heads": 4})),
        "llama-relu": LlamaConfig(**_SIZES, hidden_act="relu"),
        "llama-rope-llama3": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
        "llama-rope-linear": LlamaConfig(
            **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
        ),
        "mistral": MistralConfig(**_SIZES, head_dim=16, sliding_window=None),
        "mistral-window": MistralConfig(**_SIZES, sliding_window=10),
        "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen2-window": Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**_SIZES, head_dim=16),
        "qwen3-biases": Qwen3Config(**_SIZES, head_dim=32, attention_bias=True),
        "opt": OPTConfig(**_opt_sizes()),
        "opt-untied-no-bias": OPTConfig(
            **_opt_sizes(), tie_word_embeddings=False, enable_bias=False
        ),
    }


def _opt_sizes() -> dict[str, Any]:
    sizes = {k: v for k, v in _SIZES.items() if k not in ("intermediate_size",)}
    del sizes["num_key_value_heads"]
    return sizes | {"ffn_dim": 88, "word_embed_proj_dim": 48}


def save_checkpoint(
    config: PretrainedConfig, directory: Path, *, seed: int = 0, max_shard_size: str = "1GB"
) -> Any:
    """Save a random model of this configuration; returns the transformers model, in float32.

    Weights are larger than the usual initialisation: logits then differ clearly between tokens,
    and biases and norms take part.
    """
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.2 * noise)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def make_runner(directory: Path, **kwargs: Any) -> ModelRunner:
    """A runner on the CPU with a small pool."""
    settings: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "device": "cpu"}
    return ModelRunner(EngineConfig(model=str(directory), **(settings | kwargs)))


@dataclasses.dataclass
class _Driven:
    token_ids: list[int]
    block_table: list[int]
    num_computed: int = 0
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0
    known: bool = False


class Driver:
    """Plays the scheduler: every sequence is told how far to compute, logits come back.

    Args:
        runner: the worker.
        block_order: ids of free blocks in the order they are handed out; all by default.
    """

    def __init__(self, runner: ModelRunner, block_order: Sequence[int] | None = None) -> None:
        self.runner = runner
        self.block_size = runner.config.block_size
        self.free = list(range(runner.num_kv_blocks) if block_order is None else block_order)
        self.sequences: dict[SequenceKey, _Driven] = {}
        self.step_id = 0
        self.dropped: list[SequenceKey] = []
        self.poison: list[int] = []
        self.copies: list[tuple[int, int]] = []

    def add(self, name: str, token_ids: Sequence[int]) -> SequenceKey:
        key = SequenceKey(name)
        self.sequences[key] = _Driven(list(token_ids), [])
        return key

    def preempt(self, key: SequenceKey, *, poison: bool = False) -> None:
        """Take the sequence's blocks; it starts again from position 0."""
        sequence = self.sequences[key]
        self.dropped.append(key)
        self.free += sequence.block_table
        self.poison += sequence.block_table if poison else []
        self.sequences[key] = _Driven(sequence.token_ids, [])

    def run(self, ends: dict[SequenceKey, int], *, every: bool = True) -> list[NDArray[np.float32]]:
        """One step that computes each sequence up to `ends`; rows of all, or of last, positions."""
        scheduled = []
        for key, end in ends.items():
            sequence = self.sequences[key]
            while len(sequence.block_table) * self.block_size < end:
                sequence.block_table.append(self.free.pop(0))
            scheduled.append(
                ScheduledSequence(
                    key=key,
                    start=sequence.num_computed,
                    end=end,
                    logits_start=sequence.num_computed if every else end - 1,
                    reset=not sequence.known,
                    new_token_ids=sequence.token_ids[sequence.num_sent_tokens :],
                    new_block_ids=sequence.block_table[sequence.num_sent_blocks :],
                )
            )
            sequence.known = True
            sequence.num_computed = end
            sequence.num_sent_tokens = len(sequence.token_ids)
            sequence.num_sent_blocks = len(sequence.block_table)
        step = SchedulerOutput(
            step_id=self.step_id,
            dropped=self.dropped,
            poison_block_ids=self.poison,
            block_copies=self.copies,
            scheduled=scheduled,
        )
        self.dropped, self.poison, self.copies = [], [], []
        self.step_id += 1
        logits = self.runner.execute(step)
        assert logits.num_rows == step.num_logits
        return [logits.row(row) for row in range(logits.num_rows)]


def greedy(driver: Driver, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
    """Greedy continuation of all prompts together, one step per token."""
    keys = [driver.add(name, prompt) for name, prompt in prompts.items()]
    for _ in range(num_tokens):
        ends = {key: len(driver.sequences[key].token_ids) for key in keys}
        rows = driver.run(ends, every=False)
        for key, row in zip(keys, rows, strict=True):
            driver.sequences[key].token_ids.append(int(row.argmax()))
    return {key.request_id: driver.sequences[key].token_ids[-num_tokens:] for key in keys}


def random_tokens(length: int, seed: int, vocab_size: int = 160) -> list[int]:
    """Token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, length).tolist()
    return ids


class RecordingObserver(EngineObserver):
    """Keeps the worker's events as tuples."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def computed(self, *args: Any) -> None:
        self.events.append(("computed", *args))

    def blocks_poisoned(self, *args: Any) -> None:
        self.events.append(("blocks_poisoned", *args))

    def worker_copied(self, *args: Any) -> None:
        self.events.append(("worker_copied", *args))
