"""How many rows a matrix product takes when its rows must not depend on their neighbours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows are padded to a multiple, or computed in pieces of exactly that many.

    Matrix product libraries pick a kernel by the shape, and kernels add in different orders.
    Many give a row the same bits for every number of rows that is a multiple of their register
    tile; the others do so at least for one fixed number.

    Attributes:
        multiple: the number of rows is a multiple of it.
        fixed: each product takes exactly `multiple` rows.
    """

    multiple: int
    fixed: bool = False

    def padded(self, num_rows: int) -> int:
        """The smallest allowed number of rows that holds `num_rows`."""
        return -(-num_rows // self.multiple) * self.multiple

    def __str__(self) -> str:
        return f"{'exactly' if self.fixed else 'multiples of'} {self.multiple} rows"
