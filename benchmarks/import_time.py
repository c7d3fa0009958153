"""Milliseconds that the plugin adds to `pytest --version` and `pytest --help`.

    python -m benchmarks.import_time [--repeats N]

Each figure is a process of its own, with plugin autoload off in all of them; CPU time of the child
and wall time, medians over paired repeats.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.measure import machine, paired, print_table

_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # no conftest and no ini file of this repository
        for option in ("--version", "--help"):
            for clock, seconds in (("CPU", cpu_seconds), ("wall", wall_seconds)):
                plain = partial(seconds, [option], folder)
                with_plugin = partial(seconds, ["-p", "preempt_harness", option], folder)
                plain(), with_plugin()  # byte code is compiled, files are in the page cache
                figures = paired({"plain": plain, "plugin": with_plugin}, repeats)
                added = [
                    one - other
                    for one, other in zip(figures["plugin"], figures["plain"], strict=True)
                ]
                rows.append(
                    [
                        f"pytest {option}, {clock}",
                        *(f"{1e3 * median(values):.0f}" for values in figures.values()),
                        f"{1e3 * median(added):.0f}",
                    ]
                )
    print_table(["ms", "plain", "with plugin", "added"], rows)


def cpu_seconds(arguments: list[str], folder: str) -> float:
    """User and system time of one pytest process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _pytest(arguments, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def wall_seconds(arguments: list[str], folder: str) -> float:
    """From start to end of one pytest process."""
    started = time.perf_counter()
    _pytest(arguments, folder)
    return time.perf_counter() - started


def _pytest(arguments: list[str], folder: str) -> None:
    search_path = os.pathsep.join(
        [str(_ROOT), str(_ROOT / "engine"), os.environ.get("PYTHONPATH", "")]
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": search_path},
    )


if __name__ == "__main__":
    main()
