"""Builds the parts of an engine from its configuration. Nothing is kept here."""

from __future__ import annotations

import dataclasses
import importlib.util

from preempt_engine.async_scheduler import AsyncScheduler
from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.executor.protocol import Executor
from preempt_engine.executor.uniproc import UniprocExecutor
from preempt_engine.scheduler import Scheduler
from preempt_engine.tokenizer import ExactTokenizer, HFTokenizer, Tokenizer
from preempt_engine.victims import PreemptionController
from preempt_engine.worker.build import build_runner
from preempt_engine.worker.hooks import run_worker_hooks


def build_executor(config: EngineConfig) -> tuple[Executor, EngineConfig, Tokenizer | None]:
    """The executor and the tokenizer of a configuration, and it with paths resolved.

    Raises:
        ConfigError: a needed package is not installed.
        ModelNotFoundError: the model leads to no checkpoint.
        UnsupportedModelError: the checkpoint needs something this engine lacks.
        DeterminismError: `deterministic=True` cannot be honoured here.
    """
    if config.is_exact:
        return _executor(config), config, _exact_tokenizer(config)
    if importlib.util.find_spec("torch") is None:  # not imported here: workers may be who needs it
        raise ConfigError(
            f"model={config.model!r} needs torch, which is not installed.",
            'Install it with: pip install "preempt-harness[engine]".',
        )
    from preempt_engine.models.config import ModelConfig, resolve_model
    from preempt_engine.models.sharding import ModelShard

    config = dataclasses.replace(config, model=str(resolve_model(config.model)))
    # Refuse what cannot be divided before any worker starts.
    ModelShard.of(ModelConfig.from_directory(config.model), 0, config.tensor_parallel_size)
    tokenizer = None if config.skip_tokenizer_init else HFTokenizer(_tokenizer_path(config))
    return _executor(config), config, tokenizer


def build_scheduler(
    config: EngineConfig, executor: Executor, controller: PreemptionController | None
) -> Scheduler:
    """A scheduler for what the executor has; one that decides ahead if the configuration says so.

    Args:
        config: of the engine; the sizes that it leaves open are the executor's.
        executor: has the blocks.
        controller: forces preemptions, if given.
    """
    num_host_blocks = config.swap_space_blocks
    if num_host_blocks is None:
        num_host_blocks = executor.num_host_blocks
    return (AsyncScheduler if config.async_scheduling else Scheduler)(
        config,
        config.num_kv_blocks or executor.num_kv_blocks,
        num_host_blocks=num_host_blocks,
        controller=controller,
    )


def _executor(config: EngineConfig) -> Executor:
    if config.tensor_parallel_size > 1:
        from preempt_engine.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config)
    runner = build_runner(config)
    run_worker_hooks(config.worker_hooks, runner)
    return UniprocExecutor(runner)


def _exact_tokenizer(config: EngineConfig) -> Tokenizer | None:
    return None if config.skip_tokenizer_init else ExactTokenizer(config.exact_vocab_size)


def _tokenizer_path(config: EngineConfig) -> str:
    if config.tokenizer is None:
        return config.model
    from preempt_engine.models.config import resolve_model

    return str(resolve_model(config.tokenizer))
