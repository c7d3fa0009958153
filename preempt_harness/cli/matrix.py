"""`preempt-harness matrix`: the cells of the ini file's matrix, for people and for CI."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from preempt_harness.marks import matrix_cells
from preempt_harness.matrix import Cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the ini file is, and the form of the answer."""
    parser.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="text: a line a cell; json: a list; github: a matrix for strategy.matrix, in one line",
    )
    parser.add_argument(
        "--rootdir",
        type=Path,
        default=Path(),
        help="folder whose pytest configuration has preempt_matrix; default: this one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the cells; 1 when there is none."""
    cells = read_cells(arguments.rootdir)
    print(_FORMATS[arguments.format](cells))
    return 0 if cells else 1


def read_cells(folder: Path) -> list[Cell]:
    """The cells of the pytest configuration that pytest finds for this folder.

    Raises:
        MatrixError: the table cannot be read.
    """
    config = pytest.Config.fromdictargs({}, ["-p", "preempt_harness", str(folder)])
    return matrix_cells(config)


def _text(cells: Sequence[Cell]) -> str:
    lines = [f"{cell.num_devices} device(s)  {cell.id}" for cell in cells]
    return "\n".join([*lines, f"{len(cells)} cells"])


def _json(cells: Sequence[Cell]) -> str:
    return json.dumps([_plain(cell) for cell in cells], indent=2)


def _github(cells: Sequence[Cell]) -> str:
    return json.dumps({"include": [_plain(cell) for cell in cells]}, separators=(",", ":"))


def _plain(cell: Cell) -> dict[str, Any]:
    return {"id": cell.id, "devices": cell.num_devices, **cell.values}


_FORMATS = {"text": _text, "json": _json, "github": _github}
