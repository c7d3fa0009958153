"""What of an engine's configuration `LLM.reset` can change: what no worker has ever heard of."""

from __future__ import annotations

import dataclasses
from typing import Any

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError

RESETTABLE_FIELDS = frozenset(
    {
        "num_kv_blocks",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_waiting_requests",
        "scheduling_policy",
        "preemption_mode",
        "swap_space_blocks",
        "watermark",
        "enable_prefix_caching",
        "speculative_config",
        "async_scheduling",
        "block_reuse_order",
        "seed",
        "poison",
        "debug_worker_state",
    }
)


def changed_config(
    config: EngineConfig,
    changes: dict[str, Any],
    built: EngineConfig,
    *,
    num_built_blocks: int,
    num_built_host_blocks: int,
) -> EngineConfig:
    """The configuration of the next trial.

    Args:
        config: of the trial before.
        changes: fields to change.
        built: what the engine was built with.
        num_built_blocks: size of the pool that it was built with.
        num_built_host_blocks: likewise of the swap space.

    Raises:
        ConfigError: a change is wrong, or needs a new engine.
    """
    fixed = sorted(changes.keys() - RESETTABLE_FIELDS)
    if fixed:
        raise ConfigError(
            f"reset() cannot change {', '.join(fixed)}.",
            f"Build a new LLM for that; reset() changes {', '.join(sorted(RESETTABLE_FIELDS))}.",
        )
    config = dataclasses.replace(config, **changes)
    limits = {
        "num_kv_blocks": num_built_blocks,
        "swap_space_blocks": num_built_host_blocks,
        "max_num_batched_tokens": built.max_num_batched_tokens,
    }
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and value > limit:
            raise ConfigError(
                f"reset({name}={value}): the engine was built for {limit}.",
                "Build it for the most that any trial needs.",
            )
    return config
