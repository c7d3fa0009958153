"""`preempt-harness calibrate`: measures float noise, and writes it as a tolerance for near ties."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from preempt_harness import tolerances
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.cli._calibration import (
    CalibrationError,
    calibration_of,
    measure,
)
from preempt_harness.cli._engines import ISOLATIONS, session_opener, usable_adapter
from preempt_harness.tolerances import Calibration, ToleranceTable

_DTYPES = ("float32", "bfloat16", "float16", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--engine", default="embedded", help="adapter, see `adapters`")
    parser.add_argument("--model", default="tiny-llama", help="model name, path or hub id")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of weights and cache")
    parser.add_argument(
        "--device", default="cpu", help="handed to the engine as its option `device`"
    )
    parser.add_argument("--positions", type=int, default=4608, help="compare at least so many")
    parser.add_argument(
        "--quantile", type=float, default=1.0, help="of the noise, in (0, 1]; 1 is the largest"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and engine")
    parser.add_argument(
        "--isolation", choices=ISOLATIONS, help="run in a child process or not; default: adapter's"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="tolerance table to write to; its other entries stay",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the figures, and write them if asked to."""
    _check(arguments)
    table = _table(arguments.output)
    adapter = usable_adapter(arguments.engine)
    settings = EngineSettings(
        model=arguments.model,
        num_blocks=1,
        seed=arguments.seed,
        dtype=arguments.dtype,
        deterministic=False,
        options={"device": arguments.device},
    )
    with session_opener(adapter, arguments.isolation) as open_session:
        measurement = measure(adapter, settings, arguments.positions, open_session)
    became = {"dtype": arguments.dtype, "device": arguments.device, **measurement.placement}
    calibration = calibration_of(
        measurement,
        arguments.quantile,
        msgspec.structs.replace(settings, dtype=became["dtype"]),
        adapter.name,
        became["device"],
    )
    _print(calibration)
    if arguments.output is not None:
        tolerances.write(table.updated(calibration), arguments.output)
        print(f"written to {arguments.output}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.positions < 1:
        raise CalibrationError(f"--positions {arguments.positions} is none.", "Give 1 or more.")
    if not 0 < arguments.quantile <= 1:
        raise CalibrationError(
            f"--quantile {arguments.quantile} is not in (0, 1].", "Give a share, such as 0.999."
        )


def _table(path: Path | None) -> ToleranceTable:
    """What the output file holds already, read before minutes of measuring."""
    return tolerances.read(path) if path is not None and path.exists() else ToleranceTable()


def _print(calibration: Calibration) -> None:
    noise = ", ".join(f"{share}: {value:.3g}" for share, value in calibration.noise.items())
    print(
        f"{calibration.engine}/{calibration.model} {calibration.dtype} on {calibration.device}: "
        f"{calibration.num_positions} positions in two clean runs each"
    )
    print(f"noise of the margin by quantile: {noise}")
    print(f"flips: {calibration.num_flips}")
    print(
        f"tolerance: gap {calibration.gap:.3g}, regret {calibration.regret:.3g} "
        f"({calibration.factor:g} times quantile {calibration.quantile:g})"
    )
