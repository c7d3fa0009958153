"""What a worker's runner tells its observer, kept until the step's answer carries it home."""

from __future__ import annotations

from collections.abc import Sequence

from preempt_engine.executor.wire import (
    ComputedReport,
    CopiedReport,
    PoisonedReport,
    Report,
    SwappedInReport,
    SwappedOutReport,
)
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SequenceKey


class ReportCollector(EngineObserver):
    """The observer inside a worker. Only the worker's view is reported there."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def take(self) -> list[Report]:
        """Everything since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def computed(
        self,
        step_id: int,
        rank: int,
        key: SequenceKey,
        start: int,
        token_ids: Sequence[int],
        written_slots: Sequence[int],
        block_table: Sequence[int],
        read_len: int,
    ) -> None:
        self._reports.append(
            ComputedReport(
                request_id=key.request_id,
                branch=key.branch,
                start=start,
                token_ids=list(token_ids),
                written_slots=list(written_slots),
                block_table=list(block_table),
                read_len=read_len,
            )
        )

    def blocks_poisoned(self, step_id: int, rank: int, block_ids: Sequence[int]) -> None:
        self._reports.append(PoisonedReport(list(block_ids)))

    def worker_copied(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._reports.append(CopiedReport(list(pairs)))

    def worker_swapped_out(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._reports.append(SwappedOutReport(list(pairs)))

    def worker_swapped_in(self, step_id: int, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._reports.append(SwappedInReport(list(pairs)))
