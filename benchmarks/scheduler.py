"""What a scheduler costs per scheduled sequence, beside nano-vllm's and vLLM's in the same run.

    python -m benchmarks.scheduler [--nano-python PYTHON] [--vllm-python PYTHON]
        [--repeats N] [--only decode running ...] [--plot FILE]

Every engine runs in a process of its own, with the Python that has it; one that is not there is
named and left out. PREEMPT_NANO_VLLM_PATH may name a checkout of nano-vllm. All are set up with the
same requests, then measured in turn, in alternating order; figures are medians of CPU time. See
`scheduler_engines` for what is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.line_plot import Panel, plot
from benchmarks.measure import machine, median_ratio, paired, print_table
from benchmarks.scheduler_engines import BLOCK_SIZE, Case

OWN, OBSERVED, NANO, VLLM = "embedded", "embedded, observed", "nano-vllm", "vLLM"
Figures = Mapping[str, Sequence[float]]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that differ in one thing.

    Attributes:
        title: what they have in common.
        axis: what differs.
        cases: value of it -> case.
    """

    title: str
    axis: str
    cases: dict[int, Case]


class EngineProcess:
    """A process that measures one engine.

    Args:
        name: of the engine.
        python: interpreter that has it.

    Raises:
        EngineMissingError: it does not answer.
    """

    def __init__(self, name: str, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.scheduler_engines", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._name = name

    def begin(self, case: Case) -> str:
        """Set a case up; returns the engine's version."""
        return str(self._ask(msgspec.json.encode(case).decode()))

    def microseconds(self) -> float:
        """CPU time per scheduled sequence."""
        answer = self._ask("")
        assert isinstance(answer, float)
        return answer

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, line: str) -> object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise EngineMissingError(f"{self._name}: {self._last_words()}")
        return json.loads(answer)

    def _last_words(self) -> str:
        _, errors = self._process.communicate()
        return errors.strip().rpartition("\n")[2] or f"exit status {self._process.returncode}"


class EngineMissingError(Exception):
    """An engine cannot be measured here."""


def case_of(
    running: int, context: int, num_blocks: int = 0, *, turnover: bool = False, repeats: int
) -> Case:
    """A case whose pool holds all that its steps need, or more.

    Steps are a multiple of the block size, so that every sequence takes equally many blocks.
    """
    steps = BLOCK_SIZE * min(16, max(2, 256 // running))
    max_steps = steps * (repeats + 1)
    most_tokens = context + BLOCK_SIZE + max_steps + 2 + (running if turnover else 0)
    return Case(
        running=running,
        context=context,
        num_blocks=max(num_blocks, running * -(-most_tokens // BLOCK_SIZE)),
        turnover=turnover,
        steps=steps,
        max_steps=max_steps,
    )


def tables(repeats: int) -> dict[str, Table]:
    """Everything that is measured."""
    case = partial(case_of, repeats=repeats)
    turnover = partial(case, context=1000, turnover=True)
    return {
        "running": Table(
            title="decode, 1,000 tokens each",
            axis="running",
            cases={running: case(running, 1000) for running in (1, 16, 64, 256, 1024, 4096)},
        ),
        "context": Table(
            title="decode, 256 running",
            axis="context",
            cases={context: case(256, context) for context in (100, 1000, 4000, 16000)},
        ),
        "pool": Table(
            title="decode, 256 running, 1,000 tokens each",
            axis="blocks",
            cases={
                blocks: case(256, 1000, blocks) for blocks in (30_000, 100_000, 300_000, 1_000_000)
            },
        ),
        "mixed": Table(
            title="decode, one of 1,000 tokens admitted a step",
            axis="running",
            cases={running: turnover(running) for running in (16, 64, 256, 1024)},
        ),
    }


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nano-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=tables(1), help="some of the tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG")
    given = parser.parse_args()
    print(machine())
    engines, versions = open_engines(
        {
            OWN: sys.executable,
            OBSERVED: sys.executable,
            NANO: given.nano_python,
            VLLM: given.vllm_python,
        }
    )
    for name, version in versions.items():
        print(f"{name} {version}".strip())
    panels = []
    for name, table in tables(given.repeats).items():
        if given.only and name not in given.only:
            continue
        figures = {
            value: measured(engines, case, given.repeats) for value, case in table.cases.items()
        }
        print(f"\n{table.title}; us of CPU time per scheduled sequence")
        report(table, figures)
        panels.append(panel_of(table, figures))
    for engine in engines.values():
        engine.close()
    if given.plot:
        given.plot.write_text(plot(panels, "us"))


def open_engines(pythons: Mapping[str, str]) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """The engines that there are, and their versions; the others are named."""
    engines, versions = {}, {}
    for name, python in pythons.items():
        try:
            engine = EngineProcess(name, python)
            versions[name] = engine.begin(case_of(1, 100, repeats=1))
            engines[name] = engine
        except (EngineMissingError, OSError) as error:
            print(f"left out: {error}")
    return engines, versions


def measured(engines: Mapping[str, EngineProcess], case: Case, repeats: int) -> Figures:
    """Engine -> microseconds per scheduled sequence, one per repeat."""
    for engine in engines.values():
        engine.begin(case)
    return paired({name: engine.microseconds for name, engine in engines.items()}, repeats)


def report(table: Table, figures: Mapping[int, Figures]) -> None:
    """A row for each case, with the ratios to the peers."""
    names = list(next(iter(figures.values())))
    peers = [name for name in names if name not in (OWN, OBSERVED)]
    rows = [
        [
            f"{value}",
            *(f"{median(of_case[name]):.2f}" for name in names),
            *(f"{median_ratio(of_case[OWN], of_case[peer]):.2f}" for peer in peers),
        ]
        for value, of_case in figures.items()
    ]
    print_table([table.axis, *names, *(f"to {peer}" for peer in peers)], rows)


def panel_of(table: Table, figures: Mapping[int, Figures]) -> Panel:
    """The table as lines."""
    names = [name for name in next(iter(figures.values())) if name != OBSERVED]
    return Panel(
        table.title,
        table.axis,
        {
            name: [(value, median(of_case[name])) for value, of_case in figures.items()]
            for name in names
        },
    )


if __name__ == "__main__":
    main()
