"""Builds the runner of one rank, whatever the model; torch is imported only if it needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preempt_engine.config import EngineConfig

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Runner


def build_runner(
    config: EngineConfig,
    rank: int = 0,
    store_fd: int = -1,
    *,
    num_hidden_layers: int | None = None,
) -> Runner:
    """This rank's runner.

    Args:
        config: of the engine.
        rank: tensor parallel rank.
        store_fd: file descriptor of the store where the ranks of a real model find each other.
        num_hidden_layers: a real model's first so many layers only; None takes all.
    """
    if config.is_exact:
        from preempt_engine.worker.exact_runner import ExactRunner

        return ExactRunner(config, rank)
    from preempt_engine.worker.model_runner import ModelRunner, choose_device

    size = config.tensor_parallel_size
    if size == 1:
        return ModelRunner(config, num_hidden_layers=num_hidden_layers)
    from preempt_engine.worker.communicator import ProcessGroup

    device = choose_device(config.device, rank, size)
    return ModelRunner(config, parallel=ProcessGroup(rank, size, store_fd, device))
