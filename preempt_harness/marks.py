"""The plugin's markers: what they may say, and how a test's markers are read."""

from __future__ import annotations

from typing import Any

import pytest

from preempt_harness.adapters.protocol import CAPABILITIES, EngineSettings
from preempt_harness.matrix import (
    AXES,
    AXIS_NAMES,
    Cell,
    MatrixError,
    cells,
    find_cell,
    read_exclusions,
    read_table,
)

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
    cell = matrix_cell(node)
    if cell is not None:
        options = {**values.get("options", {}), **cell.settings().get("options", {})}
        values.update(cell.settings())
        values.update({"options": options} if options else {})
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


def matrix_cells(config: pytest.Config) -> list[Cell]:
    """Cells of the ini key `preempt_matrix`, or the one that --preempt-cell names.

    Raises:
        MatrixError: the table, an exclusion or the id is wrong.
    """
    all_cells = cells(
        read_table(config.getini("preempt_matrix")),
        read_exclusions(config.getini("preempt_matrix_exclude")),
    )
    wanted = config.getoption("preempt_cell", None)
    return [find_cell(wanted, all_cells)] if wanted else all_cells


def parametrize_matrix(metafunc: pytest.Metafunc) -> None:
    """Turn `preempt_matrix` markers and the ini table into parameters with readable ids.

    A test's own markers, and then the command line, win over the table axis by axis.

    Raises:
        pytest.UsageError: a value is no list, a name is no axis, or the table is wrong.
    """
    node = metafunc.definition
    axes: dict[str, list[Any]] = {}
    for marker in node.iter_markers("preempt_matrix"):
        _check_names(marker, node, AXIS_NAMES)
        for name, values in marker.kwargs.items():
            if not isinstance(values, list | tuple) or not values:
                raise pytest.UsageError(
                    f"{node.nodeid}: preempt_matrix({name}={values!r}): give a list of values."
                )
            axes[name] = list(values)
    try:
        chosen = _combined(cells(axes), _cells_for(metafunc))
    except MatrixError as error:
        raise pytest.UsageError(str(error)) from error
    if not chosen:
        return
    metafunc.fixturenames.append("preempt_matrix_values")
    metafunc.parametrize("preempt_matrix_values", chosen, ids=[cell.id for cell in chosen])


def matrix_cell(node: pytest.Item) -> Cell | None:
    """The cell that this test is run for."""
    callspec = getattr(node, "callspec", None)
    cell: Cell | None = callspec and callspec.params.get("preempt_matrix_values")
    return cell


def _cells_for(metafunc: pytest.Metafunc) -> list[Cell]:
    """The ini table as far as it is open for this test."""
    config, node = metafunc.config, metafunc.definition
    if not {"preempt", "preempt_settings"} & set(metafunc.fixturenames):
        return []
    fixed = {name for marker in node.iter_markers("preempt") for name in marker.kwargs}
    fixed |= {axis for axis in ("model", "tp") if config.getoption(f"preempt_{axis}") is not None}
    open_cells: dict[str, Cell] = {}
    for cell in matrix_cells(config):
        left = Cell({a: v for a, v in cell.values.items() if not {a, AXES.get(a, a)} & fixed})
        open_cells[left.id] = left
    return [cell for cell in open_cells.values() if cell.values]


def _combined(own: list[Cell], table: list[Cell]) -> list[Cell]:
    """Every cell of a test's own with every one of the table's, whose values give way."""
    found: dict[str, Cell] = {}
    for mine in own or [Cell({})]:
        for theirs in table or [Cell({})]:
            values = {**theirs.values, **mine.values}
            for cell in cells({axis: [value] for axis, value in values.items()}):
                found[cell.id] = cell
    return list(found.values())


def _check_names(marker: pytest.Mark, node: pytest.Item, known: frozenset[str]) -> None:
    unknown = sorted(set(marker.kwargs) - known)
    if marker.args or unknown:
        raise pytest.UsageError(
            f"{node.nodeid}: {marker.name}({', '.join([*map(repr, marker.args), *unknown])}): "
            f"expected keyword arguments among {', '.join(sorted(known))}."
        )
