"""Finds adapters by name: those that ship, those of entry points, those a conftest adds by hook.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points

from preempt_harness.adapters.protocol import CAPABILITIES, EngineAdapter
from preempt_harness.errors import HarnessError

ENTRY_POINT_GROUP = "preempt_harness.adapters"
DEFAULT_ADAPTER = "embedded"

_SHIPPED = {
    "embedded": "preempt_harness.adapters.embedded:EmbeddedAdapter",
    "nano-vllm": "preempt_harness.adapters.nano_vllm:NanoVllmAdapter",
    "nano-vllm-scheduler": "preempt_harness.adapters.nano_vllm_scheduler:NanoVllmSchedulerAdapter",
    "openai-http": "preempt_harness.adapters.openai_http:OpenAIHttpAdapter",
    "sglang": "preempt_harness.adapters.sglang:SglangAdapter",
    "transformers-cb": "preempt_harness.adapters.transformers_cb:TransformersAdapter",
    "transformers-cb-threaded": (
        "preempt_harness.adapters.transformers_cb_threaded:ThreadedTransformersAdapter"
    ),
    "vllm": "preempt_harness.adapters.vllm:VllmAdapter",
    "vllm-scheduler": "preempt_harness.adapters.vllm_scheduler:VllmSchedulerAdapter",
    "vllm-scheduler-async": "preempt_harness.adapters.vllm_scheduler:AsyncVllmSchedulerAdapter",
}


class AdapterError(HarnessError, ValueError):
    """An adapter is unknown, ambiguous, or not what the protocol asks for."""


class AdapterRegistry:
    """The adapters of one test session.

    Args:
        added: adapters that hooks gave, beside those that ship and those of entry points.
    """

    def __init__(self, added: Iterable[EngineAdapter] = ()) -> None:
        self._added: dict[str, EngineAdapter] = {}
        for adapter in added:
            _check(adapter)
            if adapter.name in self._added or adapter.name in _SHIPPED:
                raise AdapterError(
                    f"Two adapters are named {adapter.name!r}.", "Give one of them another name."
                )
            self._added[adapter.name] = adapter
        self._entry_points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}

    def names(self) -> list[str]:
        """Every adapter that can be asked for."""
        return sorted({*_SHIPPED, *self._added, *self._entry_points})

    def foreign_names(self) -> list[str]:
        """Adapters that a user registered."""
        return sorted({*self._added, *self._entry_points})

    def default_name(self) -> str:
        """The adapter to use when none is named.

        Raises:
            AdapterError: the user registered several.
        """
        foreign = self.foreign_names()
        if len(foreign) > 1:
            raise AdapterError(
                f"Several engines are registered: {', '.join(foreign)}.",
                "Choose one with --preempt-engine NAME or the ini key preempt_engine.",
            )
        return foreign[0] if foreign else DEFAULT_ADAPTER

    def get(self, name: str) -> EngineAdapter:
        """The adapter of that name.

        Raises:
            AdapterError: there is none, or its entry point cannot be used.
        """
        if name in self._added:
            return self._added[name]
        if name in self._entry_points:
            return _from_entry_point(name, self._entry_points[name].load())
        if name in _SHIPPED:
            module_name, _, class_name = _SHIPPED[name].partition(":")
            adapter: EngineAdapter = getattr(importlib.import_module(module_name), class_name)()
            return adapter
        raise AdapterError(
            f"There is no engine {name!r}.",
            f"Known: {', '.join(self.names())}. An adapter of your own is registered by the hook "
            f"pytest_preempt_adapters or the entry point group {ENTRY_POINT_GROUP}.",
        )


def _from_entry_point(name: str, loaded: object) -> EngineAdapter:
    adapter = loaded() if isinstance(loaded, type) else loaded
    _check(adapter)
    if getattr(adapter, "name", None) != name:
        raise AdapterError(
            f"The entry point {name!r} gives an adapter named {getattr(adapter, 'name', None)!r}.",
            "Make both names the same.",
        )
    return adapter  # type: ignore[return-value]  # checked member by member above


_MEMBERS = (
    "name",
    "capabilities",
    "models",
    "block_sizes",
    "isolation",
    "known_issues",
    "admission_model",
    "vocab_size",
    "encode",
    "missing",
    "open",
)


def _check(adapter: object) -> None:
    lacking = [member for member in _MEMBERS if not hasattr(adapter, member)]
    if lacking:
        raise AdapterError(
            f"{adapter!r} is no engine adapter: it lacks {', '.join(lacking)}.",
            "See preempt_harness.adapters.protocol.EngineAdapter.",
        )
    unknown = set(getattr(adapter, "capabilities", ())) - CAPABILITIES
    if unknown:
        raise AdapterError(
            f"{getattr(adapter, 'name', adapter)!r} has unknown capabilities: "
            f"{', '.join(sorted(unknown))}.",
            f"Known: {', '.join(sorted(CAPABILITIES))}.",
        )
