"""How much a swap copies, against the least that would do.

    python -m benchmarks.swap_bytes [--trials 2000] [--seed 0]

Drawn trials of swap, several outputs and beams on the exact model. The least is taken from what the
workers were handed, not from the swapper: the blocks that hold computed tokens of the request, each
once however many of its branches read it. In tokens the least is smaller still, as the last block
of a branch is seldom full, and a block is what both pools are made of. On the way back nothing may
be copied that had not gone out.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.measure import machine, print_table
from preempt_engine import LLM
from preempt_engine.observer import PoolView
from preempt_engine.step import SequenceKey
from tests.engine.preemption_trials import CountingObserver, draw_trial, run_trial


class CopyObserver(CountingObserver):
    """Counts the blocks copied by every swap, and the least that had to be."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._size = llm.config.block_size
        self._tables: dict[SequenceKey, list[int]] = {}
        self._written: Counter[int] = Counter()  # block -> slots that hold something
        self._host: dict[int, int] = {}
        self._out: dict[str, int] = {}

    def blocks_allocated(
        self, step_id: int, key: SequenceKey, block_ids: Sequence[int], num_cached: int
    ) -> None:
        for block in block_ids[num_cached:]:
            self._written[block] = 0

    def computed(
        self,
        step_id: int,
        rank: int,
        key: SequenceKey,
        start: int,
        token_ids: Sequence[int],
        written_slots: Sequence[int],
        *rest: Any,
    ) -> None:
        for slot in written_slots:
            block, offset = divmod(slot, self._size)
            self._written[block] = max(self._written[block], offset + 1)

    def worker_copied(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._written[target] = self._written[source]

    def worker_swapped_in(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        for host, device in pairs:
            self._written[device] = self._host[host]

    def step_updated(self, step_id: int, view: PoolView) -> None:
        self._tables = view.pool_state().tables

    def swapped_out(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        least = self._least(request_id)
        self._host.update((host, self._written[device]) for device, host in pairs)
        self.counts["swaps out"] += 1
        self.counts["blocks out"] += len(pairs)
        self.counts["least blocks out"] += len(least)
        self.counts["slots out"] += len(pairs) * self._size
        self.counts["least slots out"] += sum(least.values())
        self._out[request_id] = len(pairs)

    def swapped_in(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        self.counts["swaps in"] += 1
        self.counts["blocks in"] += len(pairs)
        self.counts["least blocks in"] += self._out.pop(request_id)

    def _least(self, request_id: str) -> dict[int, int]:
        """Block -> slots written, of the request's tables after the last step."""
        return {
            block: self._written[block]
            for key, table in self._tables.items()
            if key.request_id == request_id
            for block in table
            if self._written[block]
        }


def main() -> None:
    """Print copied and least, both ways."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    arguments = parser.parse_args()
    print(machine())
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        counts += run_trial(draw_trial(Random(seed)), CopyObserver).counts
    rows = [
        [what, str(counts[what]), str(counts[f"least {what}"]), ratio(counts, what)]
        for what in ("blocks out", "blocks in", "slots out")
    ]
    print(f"{arguments.trials} trials, {counts['swaps out']} swaps out, {counts['swaps in']} in")
    print_table(["what", "copied", "least", "ratio"], rows)


def ratio(counts: Counter[str], what: str) -> str:
    """Copied over least."""
    return f"{counts[what] / counts[f'least {what}']:.3f}"


if __name__ == "__main__":
    main()
