"""How far float noise alone goes per model, dtype, device: from `preempt-harness calibrate`.

Owns the table that ships and the file format of a user's own. No figure is a guess: each names the
run it comes from.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from preempt_harness.checks.tokens import Tolerance
from preempt_harness.errors import HarnessError
from preempt_harness.record import Header


class ToleranceFileError(HarnessError, ValueError):
    """A tolerance file is not what `preempt-harness calibrate` writes."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One measured tolerance.

    Attributes:
        engine, model, dtype, device: what it holds for.
        gap: largest top-2 gap that float noise may close: `factor` times the quantile of noise,
            or the largest gap at which an A/A run flipped, if that is more.
        regret: likewise for the loss by a token.
        num_positions: positions compared.
        quantile: of the noise, as a share; 1 is the largest.
        factor: margin for batch mixes that the calibration did not meet.
        noise: quantile, as text -> noise there, in log probability.
        num_flips: positions at which the other run preferred another token.
        versions: of the libraries that computed it.
    """

    engine: str
    model: str
    dtype: str
    device: str
    gap: float
    regret: float
    num_positions: int
    quantile: float
    factor: float = 1.0
    noise: dict[str, float] = {}
    num_flips: int = 0
    versions: dict[str, str] = {}

    def tolerance(self) -> Tolerance:
        """In the form that the token check takes."""
        return Tolerance(
            gap=self.gap,
            regret=self.regret,
            origin=f"{self.engine}/{self.model} {self.dtype} on {self.device}: {self.factor:g} "
            f"times quantile {self.quantile:g} of {self.num_positions} A/A positions",
        )


class ToleranceTable(msgspec.Struct, frozen=True, kw_only=True):
    """Calibrations, of one file or of several."""

    calibrations: list[Calibration] = []

    def find(self, engine: str, model: str, dtype: str, device: str) -> Tolerance | None:
        """The tolerance for a configuration; None if nobody measured it."""
        for item in self.calibrations:
            if _key(item) == (engine, model, dtype, device):
                return item.tolerance()
        return None

    def of(self, header: Header) -> Tolerance | None:
        """The tolerance for what a record ran on, by "dtype" and "device" of its configuration.

        None if nobody measured it, or the adapter did not say what "auto" became.
        """
        dtype, device = (str(header.config.get(name, "")) for name in ("dtype", "device"))
        return self.find(header.engine, header.model, dtype, device)

    def updated(self, new: Calibration) -> ToleranceTable:
        """With a calibration in place of an older one for the same configuration."""
        rest = [item for item in self.calibrations if _key(item) != _key(new)]
        return ToleranceTable(calibrations=sorted([*rest, new], key=_key))


def _key(item: Calibration) -> tuple[str, str, str, str]:
    return item.engine, item.model, item.dtype, item.device


def shipped() -> ToleranceTable:
    """The table that ships with the harness."""
    return read(Path(__file__).with_name("tolerances.json"))


def read(path: Path) -> ToleranceTable:
    """Read a table.

    Raises:
        ToleranceFileError: the file does not exist or has another form.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ToleranceTable)
    except (OSError, msgspec.DecodeError) as error:
        raise ToleranceFileError(
            f"{path} is no tolerance table: {error}.",
            "Make one with: preempt-harness calibrate --output FILE.",
        ) from error


def write(table: ToleranceTable, path: Path) -> None:
    """Write a table, for `read`.

    Raises:
        ToleranceFileError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    except OSError as error:
        raise ToleranceFileError(
            f"{path} cannot be written: {error}.", "Choose another --output."
        ) from error
