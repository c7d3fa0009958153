"""`preempt-harness adapters`: the engines that can be tested here, and what each can do."""

from __future__ import annotations

import argparse
import textwrap

from preempt_harness.adapters.protocol import CAPABILITIES
from preempt_harness.adapters.registry import AdapterRegistry
from preempt_harness.cli._engines import EngineUnusableError, usable_adapter

_WIDTH = 100
_INDENT = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 1 when a registered adapter cannot be loaded."""
    registry = AdapterRegistry()
    broken = [name for name in registry.names() if not _describe(registry, name)]
    print("An adapter that a conftest adds by the hook pytest_preempt_adapters is not listed here.")
    return 1 if broken else 0


def _describe(registry: AdapterRegistry, name: str) -> bool:
    """Print one adapter; False when it cannot be loaded."""
    foreign = " (registered by another package)" if name in registry.foreign_names() else ""
    print(f"{name}{foreign}")
    try:
        adapter = registry.get(name)
    except Exception as error:  # whatever a foreign package does when it is imported
        _print_field("broken", f"{type(error).__name__}: {error}")
        return False
    _print_field("status", _status(name))
    _print_field("models", ", ".join(adapter.models))
    _print_field("can", ", ".join(sorted(adapter.capabilities)))
    _print_field("cannot", ", ".join(sorted(CAPABILITIES - adapter.capabilities)) or "-")
    _print_field("isolation", adapter.isolation)
    for issue in adapter.known_issues:
        _print_field("known", f"{issue.code} in {issue.scenario} ({issue.versions}): {issue.link}")
    return True


def _status(name: str) -> str:
    try:
        usable_adapter(name)
    except EngineUnusableError as error:
        return f"missing: {error.advice}"
    return "installed"


def _print_field(name: str, value: str) -> None:
    lines = textwrap.wrap(
        f"{name:<10}{value}",
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT + " " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n".join(lines))
