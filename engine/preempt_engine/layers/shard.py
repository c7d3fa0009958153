"""Which part of a dimension belongs to a rank. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements [start, stop) of a dimension of `total` elements."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def index(self) -> slice:
        """To cut it from the whole dimension."""
        return slice(self.start, self.stop)

    def times(self, width: int) -> Shard:
        """The same part of a dimension where each element has become `width` elements."""
        return Shard(self.start * width, self.stop * width, self.total * width)

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Shard:
        """The part of one of `size` ranks; parts differ by one element at most."""
        return cls(total * rank // size, total * (rank + 1) // size, total)
