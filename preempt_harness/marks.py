"""The plugin's markers: what they may say, and how a test's markers are read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from preempt_harness.adapters.protocol import CAPABILITIES, EngineSettings

CALL_REPORT = pytest.StashKey[pytest.TestReport]()

_PREEMPT_NAMES = frozenset({"engine", *EngineSettings.__struct_fields__}) - {"num_blocks"}

_EXPLORE_NAMES = frozenset({"strategy", "examples", "time_s"})


def preempt_values(node: pytest.Item) -> dict[str, Any]:
    """Keyword arguments of the `preempt` markers, the closest first, and of the matrix.

    Raises:
        pytest.UsageError: a marker has a positional or an unknown argument.
    """
    values: dict[str, Any] = {}
    for marker in reversed(list(node.iter_markers("preempt"))):
        _check_names(marker, node, _PREEMPT_NAMES)
        values.update(marker.kwargs)
    callspec = getattr(node, "callspec", None)
    if callspec is not None:
        values.update(callspec.params.get("preempt_matrix_values", {}))
    return values


def explore_values(node: pytest.Item) -> dict[str, Any]:
    """Keyword arguments of the `preempt_explore` markers, the closest first.

    Raises:
        pytest.UsageError: a marker has a positional or an unknown argument.
    """
    values: dict[str, Any] = {}
    for marker in reversed(list(node.iter_markers("preempt_explore"))):
        _check_names(marker, node, _EXPLORE_NAMES)
        values.update(marker.kwargs)
    return values


def required_capabilities(node: pytest.Item) -> frozenset[str]:
    """What `preempt_requires` markers ask for.

    Raises:
        pytest.UsageError: a capability is unknown.
    """
    needed = {name for marker in node.iter_markers("preempt_requires") for name in marker.args}
    unknown = sorted(needed - CAPABILITIES)
    if unknown:
        raise pytest.UsageError(
            f"{node.nodeid}: preempt_requires({', '.join(unknown)}): no such capability. "
            f"Known: {', '.join(sorted(CAPABILITIES))}."
        )
    return frozenset(needed)


def parametrize_matrix(metafunc: pytest.Metafunc) -> None:
    """Turn `preempt_matrix` markers into parameters with readable ids.

    Raises:
        pytest.UsageError: a value is no list, or a name is no setting.
    """
    axes: dict[str, list[Any]] = {}
    for marker in metafunc.definition.iter_markers("preempt_matrix"):
        _check_names(marker, metafunc.definition, _PREEMPT_NAMES)
        for name, values in marker.kwargs.items():
            if not isinstance(values, list | tuple) or not values:
                raise pytest.UsageError(
                    f"{metafunc.definition.nodeid}: preempt_matrix({name}={values!r}): "
                    f"give a list of values."
                )
            axes[name] = list(values)
    if not axes:
        return
    combinations = [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    ]
    metafunc.fixturenames.append("preempt_matrix_values")
    metafunc.parametrize(
        "preempt_matrix_values",
        combinations,
        ids=["-".join(f"{key}={value}" for key, value in item.items()) for item in combinations],
    )


def _check_names(marker: pytest.Mark, node: pytest.Item, known: frozenset[str]) -> None:
    unknown = sorted(set(marker.kwargs) - known)
    if marker.args or unknown:
        raise pytest.UsageError(
            f"{node.nodeid}: {marker.name}({', '.join([*map(repr, marker.args), *unknown])}): "
            f"expected keyword arguments among {', '.join(sorted(known))}."
        )
