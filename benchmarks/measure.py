"""What the benchmarks share: paired repeats, medians and tables. Knows no engine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from statistics import median


def paired(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure every variant once per repeat, in alternating order, so that drift hits all alike.

    Args:
        variants: name -> a function that runs once and returns what it measured.
        repeats: how often.

    Returns:
        Name -> one figure per repeat; figures of the same index belong together.
    """
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        order = list(variants) if repeat % 2 == 0 else list(variants)[::-1]
        for name in order:
            figures[name].append(variants[name]())
    return figures


def median_ratio(figures: Sequence[float], reference: Sequence[float]) -> float:
    """Median of the ratios within each repeat."""
    return median(one / other for one, other in zip(figures, reference, strict=True))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest entry, the first one left, the others right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def machine() -> str:
    """Cores, load and versions, for the head of a report."""
    load = os.getloadavg()[0]
    return (
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load average {load:.1f} at the start"
    )
