"""Which numbers of rows decode steps are captured for. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from preempt_engine.layers.row_plan import RowPlan

_SMALL = (1, 2, 4)
_STEP = 8


def graph_sizes(max_num_seqs: int, row_plan: RowPlan) -> tuple[int, ...]:
    """Rising sizes, the last of which holds `max_num_seqs`: no number of sequences is left out.

    1, 2, 4, then every multiple of 8, then the maximum itself; each padded by the row plan, so
    that a captured step has a number of rows that the plan allows.
    """
    sizes = {*_SMALL, *range(_STEP, max_num_seqs, _STEP)}
    wanted = {size for size in sizes if size < max_num_seqs} | {max_num_seqs}
    return tuple(sorted({row_plan.padded(size) for size in wanted}))


def size_for(num_rows: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds so many rows; there is one."""
    assert 0 < num_rows <= sizes[-1], (num_rows, sizes)
    return sizes[bisect_left(sizes, num_rows)]
