"""A plot of lines over a logarithmic axis, as SVG text. Knows nothing of what it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

_COLOURS = ("#0b6e99", "#c1440e", "#5b8c2a", "#7a4988")
_WIDTH, _HEIGHT = 330, 250  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 30, 42  # margins of a panel
_LEGEND = 26


class Panel(NamedTuple):
    """One of the plots that stand beside each other.

    Attributes:
        title: above it.
        axis: what the horizontal axis counts.
        lines: name -> points (x, y); both above 0.
    """

    title: str
    axis: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def plot(panels: Sequence[Panel], unit: str) -> str:
    """Panels, two in a row, with one logarithmic vertical axis for all.

    Args:
        panels: what to show; lines of the same name have the same colour.
        unit: of the vertical axis.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    heights = [y for panel in panels for line in panel.lines.values() for _, y in line]
    low, high = (
        10 ** math.floor(math.log10(min(heights))),
        10 ** math.ceil(math.log10(max(heights))),
    )
    across, down = min(2, len(panels)), -(-len(panels) // 2)
    width, height = _WIDTH * across, _HEIGHT * down + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, 2)
        parts.append(f'<g transform="translate({column * _WIDTH} {row * _HEIGHT})">')
        parts += _panel(panel, colours, low, high, unit)
        parts.append("</g>")
    for index, (name, colour) in enumerate(colours.items()):
        x, y = _LEFT + 120 * index, height - 10
        parts.append(_line((x, y), (x + 20, y), colour, 2))
        parts.append(_text(x + 26, y + 4, name))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    panel: Panel, colours: Mapping[str, str], low: float, high: float, unit: str
) -> list[str]:
    xs = sorted({x for line in panel.lines.values() for x, _ in line})
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + (right - _LEFT) * _share(x, xs[0], xs[-1])

    def down(y: float) -> float:
        return bottom - (bottom - _TOP) * _share(y, low, high)

    parts = [
        _text(_LEFT, 18, panel.title),
        _text((_LEFT + right) / 2, bottom + 32, panel.axis, "middle"),
        _text(_LEFT - 5, _TOP - 14, unit, "end"),
    ]
    for y in _ticks(low, high):
        parts.append(_line((_LEFT, down(y)), (right, down(y)), "#ddd", 1))
        parts.append(_text(_LEFT - 5, down(y) + 4, f"{y:g}", "end"))
    parts += [_text(across(x), bottom + 16, _short(x), "middle") for x in xs]
    for name, line in panel.lines.items():
        points = [(across(x), down(y)) for x, y in line]
        for start, end in pairwise(points):
            parts.append(_line(start, end, colours[name], 2))
        for x, y in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten between two of them."""
    exponents = range(round(math.log10(low)), round(math.log10(high)))
    return [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)] + [high]


def _line(start: tuple[float, float], end: tuple[float, float], colour: str, width: int) -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{colour}" stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, by its logarithm."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _short(number: float) -> str:
    if number >= 1_000_000:
        return f"{number / 1_000_000:g}M"
    return f"{number / 1000:.0f}k" if number >= 10_000 else f"{number:g}"
