"""Tolerance tables: what ships, how they are found, written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from preempt_harness import tolerances
from preempt_harness.checkpoints.recipes import RECIPES
from preempt_harness.record import Header
from preempt_harness.tolerances import Calibration, ToleranceFileError, ToleranceTable


def calibration(**changes: object) -> Calibration:
    given = {
        "engine": "embedded",
        "model": "tiny-llama",
        "dtype": "float32",
        "device": "cpu",
        "gap": 0.25,
        "regret": 0.5,
        "num_positions": 100,
        "quantile": 0.999,
        "factor": 2.0,
    }
    return Calibration(**{**given, **changes})  # type: ignore[arg-type]  # names are checked there


def header(**config: str) -> Header:
    return Header(
        workload={},
        engine="embedded",
        model="tiny-llama",
        block_size=16,
        num_blocks=8,
        config=config,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(RECIPES))
def test_every_tiny_model_ships_with_a_tolerance_and_its_origin(family: str, dtype: str) -> None:
    tolerance = tolerances.shipped().find("embedded", f"tiny-{family}", dtype, "cpu")
    assert tolerance is not None
    assert 0 < tolerance.gap < 1
    assert 0 < tolerance.regret < 1
    assert f"tiny-{family} {dtype} on cpu: 2 times quantile 1 of " in tolerance.origin


def test_shipped_figures_are_what_their_noise_leads_to() -> None:
    """Noise is stored with four digits, hence the relative tolerance of half a unit of the last."""
    for item in tolerances.shipped().calibrations:
        assert item.num_positions >= 1000, item
        assert item.gap >= item.factor * item.noise["1"] * (1 - 5e-4), item
        assert item.regret >= item.factor * item.noise["1"] * (1 - 5e-4), item
        library = "xllamacpp" if item.engine == "openai-http" else "torch"
        assert item.versions[library], item


def test_a_record_finds_its_tolerance_by_dtype_and_device() -> None:
    table = ToleranceTable(
        calibrations=[calibration(), calibration(dtype="bfloat16", gap=0.5)],
    )
    found = table.of(header(dtype="bfloat16", device="cpu"))
    assert found is not None
    assert found.gap == 0.5


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "float32", "device": "cuda"},
        {"dtype": "float16", "device": "cpu"},
        {"dtype": "auto", "device": "cpu"},
        {},
    ],
)
def test_what_nobody_measured_has_no_tolerance(config: dict[str, str]) -> None:
    assert ToleranceTable(calibrations=[calibration()]).of(header(**config)) is None


def test_a_new_calibration_replaces_the_one_of_its_configuration_only() -> None:
    other = calibration(model="tiny-opt")
    table = ToleranceTable(calibrations=[calibration(), other])
    updated = table.updated(calibration(gap=0.125))
    assert updated.calibrations == [calibration(gap=0.125), other]
    assert table.calibrations[0].gap == 0.25


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = ToleranceTable(calibrations=[calibration(noise={"0.5": 0.1}, versions={"torch": "2"})])
    tolerances.write(table, tmp_path / "tolerances.json")
    assert tolerances.read(tmp_path / "tolerances.json") == table


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"calibrations":[{"engine":1}]}'])
def test_a_file_that_is_no_table_says_how_to_make_one(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "tolerances.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ToleranceFileError, match="preempt-harness calibrate --output FILE"):
        tolerances.read(path)


def test_a_table_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ToleranceFileError, match="Choose another --output"):
        tolerances.write(ToleranceTable(), tmp_path / "no-such-folder" / "tolerances.json")
