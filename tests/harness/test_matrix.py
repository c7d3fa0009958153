"""The table of a matrix, its cells and their ids."""

from __future__ import annotations

import pytest

from preempt_harness.matrix import (
    Cell,
    MatrixError,
    cells,
    find_cell,
    read_exclusions,
    read_table,
)

_LINES = ["block_size = 16, 256", "model = tiny-llama, smollm2", "backend = torch, flash-attn"]


def test_every_combination_is_a_cell() -> None:
    found = cells(read_table(_LINES))
    assert len(found) == len({cell.id for cell in found}) == 8
    assert found[0].id == "model=tiny-llama-backend=torch-block_size=16"


def test_ids_do_not_depend_on_the_order_of_the_lines() -> None:
    ids = [{cell.id for cell in cells(read_table(lines))} for lines in (_LINES, _LINES[::-1])]
    assert ids[0] == ids[1]


def test_excluded_combinations_are_left_out_and_others_stay() -> None:
    exclusions = read_exclusions(["backend=flash-attn block_size=16"])
    found = cells(read_table(_LINES), exclusions)
    assert len(found) == 6
    pairs = {(cell.values["backend"], cell.values["block_size"]) for cell in found}
    assert pairs == {("torch", 16), ("torch", 256), ("flash-attn", 256)}


def test_a_cell_knows_the_engine_settings_and_its_devices() -> None:
    (cell,) = cells(
        read_table(
            [
                "tp = 2",
                "dtype = bfloat16",
                "backend = triton",
                "mode = swap",
                "deterministic = False",
            ]
        )
    )
    assert cell.num_devices == 2
    assert cell.settings() == {
        "tensor_parallel_size": 2,
        "dtype": "bfloat16",
        "options": {"attention_backend": "triton", "preemption_mode": "swap"},
        "deterministic": False,
    }
    assert Cell({"model": "exact"}).num_devices == 1


def test_no_table_has_no_cells() -> None:
    assert cells({}) == []


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["block_size"], "no line of the table"),
        (["block_size = ,"], "no line of the table"),
        (["blocks = 4"], "blocks is no axis"),
        (["num_blocks = 4"], "num_blocks is no axis"),
        (["tp = 1", "tp = 2"], "twice"),
    ],
)
def test_a_wrong_table_is_refused(lines: list[str], text: str) -> None:
    with pytest.raises(MatrixError, match=text):
        read_table(lines)


@pytest.mark.parametrize("line", ["backend", "backend=", "backend=torch nonsense"])
def test_a_wrong_exclusion_is_refused(line: str) -> None:
    with pytest.raises(MatrixError, match="names no cells"):
        read_exclusions([line])


def test_a_cell_is_found_by_its_id_only() -> None:
    found = cells(read_table(_LINES))
    assert find_cell(found[3].id, found) is found[3]
    with pytest.raises(MatrixError, match=r"'model=gpt' is no cell.*model=tiny-llama"):
        find_cell("model=gpt", found)
    with pytest.raises(MatrixError, match="is empty"):
        find_cell("model=gpt", [])
