"""How far float noise alone goes per model, dtype, device: from `preempt-harness calibrate`.

Owns the table that ships and the file format of a user's own. No figure is a guess: each names the
run it comes from.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from preempt_harness.checks.tokens import Tolerance
from preempt_harness.errors import HarnessError


class ToleranceFileError(HarnessError, ValueError):
    """A tolerance file is not what `preempt-harness calibrate` writes."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One measured tolerance.

    Attributes:
        engine, model, dtype, device: what it holds for.
        gap: largest top-2 gap at which an A/A run flipped, or at the stated quantile of noise.
        regret: likewise for the loss by a token.
        num_positions: positions compared.
        quantile: of the noise, as a share.
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
    versions: dict[str, str] = {}

    def tolerance(self) -> Tolerance:
        """In the form that the token check takes."""
        return Tolerance(
            gap=self.gap,
            regret=self.regret,
            origin=f"{self.engine}/{self.model} {self.dtype} on {self.device}: quantile "
            f"{self.quantile:g} of {self.num_positions} A/A positions",
        )


class ToleranceTable(msgspec.Struct, frozen=True, kw_only=True):
    """Calibrations, of one file or of several."""

    calibrations: list[Calibration] = []

    def find(self, engine: str, model: str, dtype: str, device: str) -> Tolerance | None:
        """The tolerance for a configuration; None if nobody measured it."""
        for item in self.calibrations:
            if (item.engine, item.model, item.dtype, item.device) == (engine, model, dtype, device):
                return item.tolerance()
        return None


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
