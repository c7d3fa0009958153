"""preempt_harness: a pytest plugin that finds the bugs LLM inference engines have under preemption.

The package is the plugin (`-p preempt_harness`, and the installed entry point of the same name).
Hooks live in `plugin` and fixtures in `fixtures`; they are loaded when pytest asks for options, so
that workers and command lines that import a submodule do not load pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Bring in the real plugin."""
    from preempt_harness import fixtures, plugin

    pluginmanager.register(plugin, "preempt_harness.plugin")
    pluginmanager.register(fixtures, "preempt_harness.fixtures")
