"""The matrix that a suite is run over: a table of axes, its cells, and their ids.

Plain data in, plain data out; knows neither pytest nor an engine. An axis is one of `AXES`, in
the words of a CI matrix, or any engine setting by its own name.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.errors import HarnessError

# Axis -> setting; those with a dot are options of the engine. In the order in which ids name them.
AXES: Mapping[str, str] = {
    "model": "model",
    "tp": "tensor_parallel_size",
    "dtype": "dtype",
    "backend": "options.attention_backend",
    "mode": "options.preemption_mode",
    "block_size": "block_size",
}
AXIS_NAMES = frozenset(AXES) | (frozenset(EngineSettings.__struct_fields__) - {"num_blocks"})


class MatrixError(HarnessError, ValueError):
    """A table, an exclusion or a cell's id cannot be read."""


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        values: axis -> value, in the order of the id.
    """

    values: Mapping[str, Any]

    @property
    def id(self) -> str:
        """`model=smollm2-tp=2-dtype=bfloat16`; depends on no order in which axes were written."""
        return "-".join(f"{axis}={value}" for axis, value in self.values.items())

    @property
    def num_devices(self) -> int:
        """Devices that the cell's engine takes: one for each rank."""
        ranks: int = self.values.get("tp", self.values.get("tensor_parallel_size", 1))
        return ranks

    def settings(self) -> dict[str, Any]:
        """The cell as fields of `EngineSettings`."""
        settings: dict[str, Any] = {}
        for axis, value in self.values.items():
            name = AXES.get(axis, axis)
            if name.startswith("options."):
                settings.setdefault("options", {})[name.removeprefix("options.")] = value
            else:
                settings[name] = value
        return settings


Table = Mapping[str, Sequence[Any]]


def read_table(lines: Iterable[str]) -> dict[str, list[Any]]:
    """The table of an ini file, `axis = value, value` a line.

    Values are numbers, True, False, None, or else words.

    Raises:
        MatrixError: a line has another form, an axis is unknown, or stands there twice.
    """
    table: dict[str, list[Any]] = {}
    for line in lines:
        axis, equals, text = (part.strip() for part in line.partition("="))
        values = [_value(word.strip()) for word in text.split(",") if word.strip()]
        if not equals or not values:
            raise MatrixError(
                f"preempt_matrix: {line!r} is no line of the table.",
                "Write axis = value, value, for instance: block_size = 16, 64.",
            )
        if axis in table:
            raise MatrixError(
                f"preempt_matrix: the axis {axis} stands there twice.", "Write it once."
            )
        table[axis] = values
    check_axes(table)
    return table


def check_axes(axes: Iterable[str]) -> None:
    """Refuse names that are no axes.

    Raises:
        MatrixError: there is one.
    """
    unknown = sorted(set(axes) - AXIS_NAMES)
    if unknown:
        raise MatrixError(
            f"preempt_matrix: {', '.join(unknown)} is no axis.",
            f"Axes are {', '.join([*AXES, *sorted(AXIS_NAMES - AXES.keys())])}.",
        )


def read_exclusions(lines: Iterable[str]) -> list[dict[str, Any]]:
    """What an ini file leaves out, `axis=value axis=value` a line: cells that have all of these.

    Raises:
        MatrixError: a line has another form, or an axis is unknown.
    """
    exclusions = []
    for line in lines:
        words = [word.partition("=") for word in line.split()]
        if not words or any(not equals or not value for _, equals, value in words):
            raise MatrixError(
                f"preempt_matrix_exclude: {line!r} names no cells.",
                "Write axis=value axis=value, for instance: backend=flash-attn block_size=16.",
            )
        exclusions.append({axis: _value(value) for axis, _, value in words})
        check_axes(exclusions[-1])
    return exclusions


def cells(table: Table, exclusions: Sequence[Mapping[str, Any]] = ()) -> list[Cell]:
    """All combinations of a table's values less those left out; none of an empty table."""
    if not table:
        return []
    axes = [axis for axis in AXES if axis in table] + [axis for axis in table if axis not in AXES]
    combinations = (
        Cell(dict(zip(axes, values, strict=True)))
        for values in itertools.product(*(table[axis] for axis in axes))
    )
    return [cell for cell in combinations if not any(_has(cell, item) for item in exclusions)]


def find_cell(wanted: str, among: Sequence[Cell]) -> Cell:
    """The cell of that id.

    Raises:
        MatrixError: there is none.
    """
    for cell in among:
        if cell.id == wanted:
            return cell
    known = ", ".join(cell.id for cell in among[:3]) + (", ..." if len(among) > 3 else "")
    raise MatrixError(
        f"{wanted!r} is no cell of the matrix.",
        f"Its cells are {known}." if among else "The ini key preempt_matrix is empty.",
    )


def _has(cell: Cell, values: Mapping[str, Any]) -> bool:
    return all(axis in cell.values and cell.values[axis] == v for axis, v in values.items())


def _value(word: str) -> Any:
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
    return value if isinstance(value, int | float | bool | None) else word
