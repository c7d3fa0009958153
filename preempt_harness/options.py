"""What the user asks for on the command line, in the ini file and by markers, in one place.

Precedence: marker, then command line, then ini, then default. Values are plain and can be sent to
xdist workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class OptionSpec:
    """One option with its ini twin of the same name (dashes become underscores)."""

    name: str
    kind: type
    default: object
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


OPTIONS = (
    OptionSpec(
        "--preempt-engine", str, "", "NAME", "engine adapter; default: yours, else embedded"
    ),
    OptionSpec("--preempt-model", str, "", "NAME", "model name, path or hub id"),
    OptionSpec("--preempt-tp", int, 1, "N", "tensor parallel size"),
    OptionSpec("--preempt-seed", int, 0, "N", "seed of prompts, plans and engine"),
    OptionSpec("--preempt-replay", str, "", "STRING", "run this one trial in every preempt.run()"),
    OptionSpec("--preempt-examples", int, 0, "N", "trials of preempt.explore(); 0: the default"),
    OptionSpec(
        "--preempt-time-s",
        float,
        0.0,
        "SECONDS",
        "CPU limit of preempt.explore(); 0: none",
    ),
    OptionSpec("--preempt-cell", str, "", "ID", "run this one cell of the ini key preempt_matrix"),
    OptionSpec(
        "--preempt-devices",
        str,
        "",
        "auto|LIST",
        "GPUs to share out, one set for each process that runs tests, such as 0,1,2,3",
    ),
    OptionSpec("--preempt-report", str, "", "FILE", "write every trial's summary as JSON lines"),
    OptionSpec(
        "--preempt-isolation",
        str,
        "",
        "none|process",
        "run the engine in this process, or in a child that a watchdog can kill",
    ),
    OptionSpec(
        "--preempt-poll-timeout-s",
        float,
        60.0,
        "SECONDS",
        "longest silence of an engine in a child process before it counts as hung",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Register every option and its ini twin."""
    group = parser.getgroup("preempt_harness", "preemption of LLM inference engines")
    for spec in OPTIONS:
        group.addoption(
            spec.name,
            dest=spec.dest,
            type=spec.kind,
            default=None,
            metavar=spec.metavar,
            help=f"{spec.help} (ini: {spec.dest})",
        )
        parser.addini(spec.dest, help=spec.help, default=None)
    parser.addini(
        "preempt_matrix",
        type="linelist",
        help="run tests of the preempt fixture for all combinations; axis = value, value a line",
    )
    parser.addini(
        "preempt_matrix_exclude",
        type="linelist",
        help="cells to leave out; axis=value axis=value a line",
    )


@dataclass(frozen=True)
class Selection:
    """The options of a session, resolved."""

    engine: str
    model: str
    tp: int
    seed: int
    replay: str
    examples: int
    time_s: float
    cell: str
    devices: str
    report: str
    isolation: str
    poll_timeout_s: float

    @classmethod
    def from_config(cls, config: pytest.Config) -> Selection:
        """Read command line and ini.

        Raises:
            pytest.UsageError: a value cannot be converted or is out of range.
        """
        values = {spec.dest.removeprefix("preempt_"): _value(config, spec) for spec in OPTIONS}
        selection = cls(**values)  # type: ignore[arg-type]  # converted by `_value`
        if selection.tp < 1:
            raise pytest.UsageError(
                f"--preempt-tp={selection.tp}: tensor parallel size is 1 or more."
            )
        if selection.examples < 0 or selection.time_s < 0:
            raise pytest.UsageError("--preempt-examples and --preempt-time-s are 0 or more.")
        if selection.isolation not in ("", "none", "process"):
            raise pytest.UsageError(
                f"--preempt-isolation={selection.isolation}: choose none or process."
            )
        if selection.poll_timeout_s <= 0:
            raise pytest.UsageError(
                f"--preempt-poll-timeout-s={selection.poll_timeout_s}: give seconds above 0."
            )
        return selection

    @property
    def asked_for(self) -> bool:
        """True when any option differs from its default: the user means this plugin."""
        defaults = {spec.dest.removeprefix("preempt_"): spec.default for spec in OPTIONS}
        return any(getattr(self, name) != default for name, default in defaults.items())


def _value(config: pytest.Config, spec: OptionSpec) -> object:
    value = config.getoption(spec.dest)
    if value is not None:
        return value
    text = config.getini(spec.dest)
    if text is None or text == "":
        return spec.default
    try:
        return spec.kind(text)
    except ValueError:
        raise pytest.UsageError(
            f"ini key {spec.dest} = {text!r}: expected {spec.kind.__name__}."
        ) from None
