"""Shadow memory of one rank: what every KV slot holds, as a chain value, and who put it there.

Owns contents only: no block tables, no judgement. Host blocks (the other side of a swap) are kept
beside the device's.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from preempt_harness.checks.chain import POISONED, UNWRITTEN


class Write(msgspec.Struct, eq=False, gc=False):
    """Who filled a slot.

    Attributes:
        seq: the sequence, "" for the poison pattern.
        step: when.
        tick: serial number of the event; copies count as written when they were copied.
        tainted: the writer had wrong contents itself, which a listed finding explains.
    """

    seq: str
    step: int
    tick: int
    tainted: bool = False


class Slots:
    """The slots of one block: `values` and `writes`, [block_size] each."""

    __slots__ = ("values", "writes")

    def __init__(self, values: list[int], writes: list[Write | None]) -> None:
        self.values = values
        self.writes = writes


def slots_of(blocks: Iterable[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions [start, end), the first of which lies in the first of the blocks.

    Fewer than end - start where the blocks do not reach so far.
    """
    slots: list[int] = []
    for block in blocks:
        offset = start % block_size
        stop = min(end, start - offset + block_size)
        first = block * block_size + offset
        slots += range(first, first + stop - start)
        start = stop
    return slots


class Shadow:
    """All blocks of one rank, on the device and on the host."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, Slots] = {}
        self.host: dict[int, Slots] = {}

    def slots(self, block: int) -> Slots:
        """The device block's slots; unwritten when nobody touched it yet."""
        slots = self.device.get(block)
        if slots is None:
            slots = self.device[block] = self._unwritten()
        return slots

    def values(self, block: int) -> list[int]:
        """Values of a device block's slots, to be read only."""
        slots = self.device.get(block)
        return [UNWRITTEN] * self.block_size if slots is None else slots.values

    def read(self, slot: int) -> int:
        """Value of a slot."""
        block, offset = divmod(slot, self.block_size)
        slots = self.device.get(block)
        return UNWRITTEN if slots is None else slots.values[offset]

    def poison(self, blocks: Iterable[int], write: Write) -> None:
        """Overwrite whole blocks with the poison pattern."""
        for block in blocks:
            self.device[block] = Slots([POISONED] * self.block_size, [write] * self.block_size)

    def copy(self, pairs: Iterable[tuple[int, int]], tick: int) -> None:
        """Copy device blocks, all sources read before any destination is written."""
        self._move(self.device, self.device, pairs, tick)

    def swap_out(self, pairs: Iterable[tuple[int, int]], tick: int) -> None:
        """Copy device blocks to host blocks."""
        self._move(self.device, self.host, pairs, tick)

    def swap_in(self, pairs: Iterable[tuple[int, int]], tick: int) -> None:
        """Copy host blocks to device blocks."""
        self._move(self.host, self.device, pairs, tick)

    def _move(
        self,
        source: dict[int, Slots],
        destination: dict[int, Slots],
        pairs: Iterable[tuple[int, int]],
        tick: int,
    ) -> None:
        moved = [(target, source.get(block) or self._unwritten()) for block, target in pairs]
        for target, slots in moved:
            destination[target] = Slots(
                list(slots.values),
                [write and msgspec.structs.replace(write, tick=tick) for write in slots.writes],
            )

    def _unwritten(self) -> Slots:
        return Slots([UNWRITTEN] * self.block_size, [None] * self.block_size)
