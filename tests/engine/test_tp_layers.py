"""Divided models: what each rank holds and reads, and that together they are the whole model.

Ranks are threads here that add up as the real ones do; processes are in `test_tp_models`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import family_configs, random_tokens, save_checkpoint
from torch import Tensor
from transformers import LlamaConfig

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.layers.destination import TensorPart
from preempt_engine.layers.parallel import SingleRank
from preempt_engine.layers.shard import Shard
from preempt_engine.models.config import ModelConfig
from preempt_engine.models.loader import load_weights
from preempt_engine.models.registry import load_model
from preempt_engine.models.sharding import ModelShard
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey
from preempt_engine.worker.model_runner import ModelRunner


class ThreadRank:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._barrier = barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        return sum(parts[1:], start=parts[0])

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self._exchange(x)
        return parts if self.rank == 0 else []

    def minimum(self, value: int) -> int:
        return min(self._exchange(value))

    def close(self) -> None:
        return None


def on_all_ranks(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Results of the work on each rank. A rank that fails breaks the barrier for the others."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    with ThreadPoolExecutor(size) as pool:
        ranks = [ThreadRank(rank, size, board, barrier) for rank in range(size)]
        return list(pool.map(work, ranks))


def logits_of(runner: ModelRunner, token_ids: list[int]) -> np.ndarray[Any, Any]:
    """All rows of a prompt, computed in two steps; none on ranks other than 0."""
    middle = len(token_ids) // 2
    rows = []
    for step_id, (start, end) in enumerate([(0, middle), (middle, len(token_ids))]):
        blocks = list(range(-(-len(token_ids) // 4)))
        item = ScheduledSequence(
            key=SequenceKey("a"),
            start=start,
            end=end,
            logits_start=start,
            reset=step_id == 0,
            new_token_ids=token_ids if step_id == 0 else [],
            new_block_ids=blocks if step_id == 0 else [],
        )
        logits = runner.execute(SchedulerOutput(step_id, scheduled=[item]))
        rows += [logits.row(row) for row in range(logits.num_rows)]
    return np.array(rows)


def run_divided(directory: Path, size: int) -> list[np.ndarray[Any, Any]]:
    config = EngineConfig(model=str(directory), num_kv_blocks=16, block_size=4, device="cpu")
    token_ids = random_tokens(21, seed=1)

    def work(rank: ThreadRank) -> np.ndarray[Any, Any]:
        return logits_of(ModelRunner(config, parallel=rank), token_ids)

    return on_all_ranks(size, work)


# Four query heads and two key-value heads: 4 ranks hold each key-value head twice.
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama-untied-biases", "qwen3-biases", "opt"])
def test_a_divided_model_is_the_whole_model(tmp_path: Path, name: str, size: int) -> None:
    save_checkpoint(family_configs()[name], tmp_path)
    (whole,) = run_divided(tmp_path, 1)
    divided, *others = run_divided(tmp_path, size)
    assert all(rows.size == 0 for rows in others)
    # Sums of at most 88 products are added in another order: each rounds by at most 2**-24 of a
    # partial sum, and logits of a dozen such layers stay within a few thousand roundings.
    np.testing.assert_allclose(divided, whole, rtol=1e-4, atol=1e-4)


def test_an_uneven_vocabulary_is_divided_too(tmp_path: Path) -> None:
    config = family_configs()["llama"]
    config.vocab_size = 161
    save_checkpoint(config, tmp_path)
    (whole,) = run_divided(tmp_path, 1)
    divided = run_divided(tmp_path, 2)[0]
    assert divided.shape == whole.shape == (21, 161)
    np.testing.assert_allclose(divided, whole, rtol=1e-4, atol=1e-4)  # as above


def tensors_of(directory: Path, rank: int, size: int) -> dict[str, Any]:
    config = ModelConfig.from_directory(directory)
    parallel = SingleRank()
    parallel.rank, parallel.size = rank, size
    model = load_model(
        directory,
        config,
        parallel=parallel,
        max_model_len=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        deterministic=False,
    )
    return model.checkpoint_tensors()


@pytest.mark.parametrize("name", ["llama-untied-biases", "qwen3", "opt-untied-no-bias"])
def test_ranks_together_hold_every_weight_once(tmp_path: Path, name: str) -> None:
    """Nothing is missing and nothing is doubled, but norms and what has a single owner's shape."""
    reference = save_checkpoint(family_configs()[name], tmp_path).state_dict()
    ranks = [tensors_of(tmp_path, rank, 2) for rank in range(2)]
    assert set(ranks[0]) == set(ranks[1])
    for tensor_name in ranks[0]:
        whole = torch.full_like(reference[tensor_name], torch.nan)
        covered = torch.zeros_like(whole)
        for tensors in ranks:
            part = tensors[tensor_name]
            if isinstance(part, TensorPart):
                assert part.shape == tuple(whole.shape)
                whole[part.index] = part.tensor
                covered[part.index] += 1
            else:
                whole.copy_(part)
                covered += 0.5
        assert torch.equal(whole, reference[tensor_name]), tensor_name
        assert torch.equal(covered, torch.ones_like(covered)), tensor_name


def test_loading_reads_only_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken from the file is as large as what the rank holds, tensor by tensor."""
    save_checkpoint(family_configs()["llama-untied-biases"], tmp_path)
    taken: dict[str, int] = {}

    class Recording:
        def __init__(self, name: str, tensor_slice: Any) -> None:
            self.name = name
            self.tensor_slice = tensor_slice

        def get_shape(self) -> list[int]:
            shape: list[int] = self.tensor_slice.get_shape()
            return shape

        def __getitem__(self, index: Any) -> Tensor:
            tensor: Tensor = self.tensor_slice[index]
            taken[self.name] = tensor.numel()
            return tensor

    from preempt_engine.models import loader

    read = loader._tensors
    monkeypatch.setattr(
        loader,
        "_tensors",
        lambda directory: ((name, Recording(name, part)) for name, part in read(directory)),
    )
    tensors = tensors_of(tmp_path, 1, 2)
    held = {
        name: (part.tensor if isinstance(part, TensorPart) else part).numel()
        for name, part in tensors.items()
    }
    assert taken == held
    assert held["model.layers.0.mlp.down_proj.weight"] == 48 * 88 // 2


def test_a_tensor_of_another_shape_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    save_checkpoint(family_configs()["llama"], tmp_path)
    part = TensorPart(torch.empty(10, 48), (161, 48), (slice(0, 10), slice(0, 48)))
    with pytest.raises(Exception, match=r"has shape \[160, 48\], expected \[161, 48\]"):
        load_weights(tmp_path, {"model.embed_tokens.weight": part})


def model_config(tmp_path: Path, **sizes: int) -> ModelConfig:
    settings = {
        "vocab_size": 96,
        "hidden_size": 36,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**(settings | sizes))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    return ModelConfig.from_directory(tmp_path)


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    """The heads are SmolLM2's: 9 and 3."""
    model = model_config(tmp_path)
    assert ModelShard.of(model, 2, 3).local.num_attention_heads == 3
    with pytest.raises(ConfigError, match="num_attention_heads=9 is no multiple of 2") as caught:
        ModelShard.of(model, 0, 2)
    assert "Use one of: 1, 3." in caught.value.advice
    with pytest.raises(ConfigError, match="intermediate_size=48 is no multiple of 9"):
        ModelShard.of(model, 0, 9)
    model = model_config(tmp_path, num_attention_heads=12, num_key_value_heads=6, head_dim=4)
    with pytest.raises(ConfigError, match="num_key_value_heads=6 is neither a multiple nor a div"):
        ModelShard.of(model, 0, 4)


def test_every_rank_holds_the_key_value_heads_its_query_heads_read(tmp_path: Path) -> None:
    model = model_config(tmp_path, hidden_size=32, num_attention_heads=8, num_key_value_heads=2)
    shards = [ModelShard.of(model, rank, 4) for rank in range(4)]
    assert [shard.query for shard in shards] == [Shard(i, i + 8, 32) for i in (0, 8, 16, 24)]
    assert [shard.key_value.start for shard in shards] == [0, 0, 4, 4]
    assert {shard.local.num_key_value_heads for shard in shards} == {1}
