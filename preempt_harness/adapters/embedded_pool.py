"""Engines that wait between trials for the next one that fits them.

Loading weights, probing for determinism and starting worker processes take seconds; `LLM.reset`
takes none, and an engine that was reset is as good as new. Engines with `worker_hooks` are never
kept: what a hook has changed in a rank stays changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preempt_engine import LLM, EngineConfig

# What an engine is built for, unless the trial asks for more: then most later trials fit it.
_NUM_BLOCKS = 1024
_NUM_BATCHED_TOKENS = 2048
# A suite mixes that many block sizes; each takes workers of its own.
_MAX_KEPT = 4


class EnginePool:
    """Idle engines, the last one used at the end."""

    def __init__(self) -> None:
        self._kept: list[LLM] = []

    def take(self, arguments: dict[str, Any]) -> LLM:
        """An engine for these arguments of `LLM`: a kept one that fits, else a new one.

        Raises:
            preempt_engine.errors.EngineError: the arguments cannot be honoured.
        """
        from preempt_engine import LLM, EngineConfig

        rest = {name: value for name, value in arguments.items() if name != "model"}
        config = EngineConfig.from_kwargs(arguments["model"], rest)
        if not _can_be_kept(config) or config.num_kv_blocks is None:
            return LLM(**arguments)
        for llm in reversed(self._kept):
            if _fit(llm, config):
                self._kept.remove(llm)
                return llm
        room = {
            "num_kv_blocks": max(_NUM_BLOCKS, config.num_kv_blocks),
            "swap_space_blocks": max(_NUM_BLOCKS, config.swap_space_blocks or 0),
            "max_num_batched_tokens": max(_NUM_BATCHED_TOKENS, config.max_num_batched_tokens),
        }
        llm = LLM(**(arguments | room))
        llm.reset(**{name: getattr(config, name) for name in room})
        return llm

    def give_back(self, llm: LLM) -> Exception | None:
        """Keep the engine if it can serve another trial, else close it.

        Returns:
            Why it cannot be reset, since something is left of the trial; None where nothing is.
        """
        try:
            llm.reset()
        except Exception as error:  # no other trial must see it
            llm.close()
            return error
        if not _can_be_kept(llm.config):
            llm.close()
            return None
        self._kept.append(llm)
        while len(self._kept) > _MAX_KEPT:
            self._kept.pop(0).close()
        return None

    def process_ids(self) -> frozenset[int]:
        """Of the workers of kept engines."""
        return frozenset(pid for llm in self._kept for pid in llm.worker_process_ids)

    def close(self) -> None:
        """Close all kept engines."""
        while self._kept:
            self._kept.pop().close()


def _can_be_kept(config: EngineConfig) -> bool:
    """The exact model in this process is built in no time; memory sizes cannot be changed."""
    slow_to_build = config.tensor_parallel_size > 1 or not config.is_exact
    return slow_to_build and not config.worker_hooks and config.swap_space_bytes is None


def _fit(llm: LLM, config: EngineConfig) -> bool:
    """Make a kept engine one of this configuration, if only its scheduler must change for it."""
    from preempt_engine.errors import ConfigError
    from preempt_engine.reset import RESETTABLE_FIELDS

    changes = {name: getattr(config, name) for name in RESETTABLE_FIELDS}
    if dataclasses.replace(llm.config, **changes) != config:
        return False
    try:
        llm.reset(**changes)
    except ConfigError:  # it was built for less
        return False
    return True
