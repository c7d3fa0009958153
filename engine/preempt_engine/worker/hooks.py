"""`worker_hooks`: functions that a test or a harness has run in every rank, before any step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from preempt_engine.errors import ConfigError

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Runner


def run_worker_hooks(hooks: Sequence[str], runner: Runner) -> None:
    """Call each hook with this rank's runner, in order.

    Args:
        hooks: "module:function", called as `function(runner)`, or "module:function:argument",
            called as `function(runner, "argument")`.
        runner: just built; the hook may change it.

    Raises:
        ConfigError: a hook names nothing that can be called.
    """
    for hook in hooks:
        module, name, *argument = hook.split(":", 2)
        _resolve(hook, module, name)(runner, *argument)


def _resolve(hook: str, module: str, name: str) -> Callable[..., Any]:
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"worker_hooks: {hook!r} cannot be imported: {error}.",
            "Give 'package.module:function' of something the workers can import.",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"worker_hooks: {hook!r} is no function.", "Give 'package.module:function'."
        )
    resolved: Callable[..., Any] = function
    return resolved
