"""What an observer is told is what happened: it can keep an account that agrees with the engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from preempt_engine import LLM, SamplingParams
from preempt_engine.observer import EngineObserver, PoolView
from preempt_engine.step import SequenceKey
from tests.engine.preemption_trials import CountingObserver, draw_trial, run_trial

_AHEAD = ("arrived", "aborted", "priority_changed")  # happen before the step that they name


class Account(CountingObserver):
    """Blocks, queues and figures by events alone; compared with the engine's after every step."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.tables: defaultdict[SequenceKey, Counter[int]] = defaultdict(Counter)
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.figures: Counter[str] = Counter()
        self.farthest: dict[SequenceKey, int] = {}
        self.steps: set[int] = set()
        self.preempted_before = -1

    def _see(self, name: str, step_id: int) -> None:
        """The number of the step that decides or brings it, or of the one it comes before."""
        expected = self.llm.scheduler.next_step_id - (name not in _AHEAD)
        assert step_id == expected, f"{name} in step {step_id}, which is {expected}"

    def arrived(self, step_id: int, request_id: str, *rest: Any) -> None:
        self._see("arrived", step_id)
        self.waiting.add(request_id)

    def aborted(self, step_id: int, request_id: str) -> None:
        self._see("aborted", step_id)
        self._leave(request_id)

    def priority_changed(self, step_id: int, request_id: str, priority: int) -> None:
        self._see("priority_changed", step_id)
        assert self.llm.scheduler.requests[request_id].priority == priority

    def finished(self, step_id: int, request_id: str, reason: str) -> None:
        self._see("finished", step_id)
        self.figures["num_finished_requests"] += 1
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        assert (request_id in self.waiting) != (request_id in self.running)
        self.waiting.discard(request_id)
        self.running.discard(request_id)

    def scheduled(self, step_id: int, key: SequenceKey, start: int, end: int) -> None:
        self._see("scheduled", step_id)
        assert key.request_id in self.running
        assert start < end
        before = self.farthest.get(key, 0)
        self.figures["num_computed_tokens"] += end - start
        self.figures["num_recomputed_tokens"] += max(0, min(end, before) - start)
        self.farthest[key] = max(before, end)
        self.steps.add(step_id)

    def blocks_allocated(
        self, step_id: int, key: SequenceKey, block_ids: Sequence[int], num_cached: int
    ) -> None:
        self._see("blocks_allocated", step_id)
        assert 0 <= num_cached <= len(block_ids)
        assert not any(self._references(block_id) for block_id in block_ids[num_cached:])
        self.tables[key].update(block_ids)
        self.waiting.discard(key.request_id)
        self.running.add(key.request_id)

    def _references(self, block_id: int) -> int:
        return sum(table[block_id] for table in self.tables.values())

    def blocks_freed(self, step_id: int, key: SequenceKey, block_ids: Sequence[int]) -> None:
        if step_id != self.preempted_before:
            self._see("blocks_freed", step_id)
        assert Counter(block_ids) <= self.tables[key]
        self.tables[key] -= Counter(block_ids)

    def blocks_copied(self, step_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._see("blocks_copied", step_id)
        self.figures["num_copied_blocks"] += len(pairs)

    def forked(self, step_id: int, parent: SequenceKey, child: SequenceKey) -> None:
        super().forked(step_id, parent, child)
        self._see("forked", step_id)
        self.tables[child] = Counter(self.tables[parent])
        self.farthest[child] = self.farthest[parent]

    def tokens_chosen(self, step_id: int, key: SequenceKey, token_ids: Sequence[int]) -> None:
        self._see("tokens_chosen", step_id)
        assert len(token_ids) == 1

    def swapped_out(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        self._see("swapped_out", step_id)
        self.figures["num_swapped_out_blocks"] += len(pairs)

    def swapped_in(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        self._see("swapped_in", step_id)
        self.figures["num_swapped_in_blocks"] += len(pairs)

    def preempted(self, step_id: int, request_id: str, *, mode: str, **rest: Any) -> None:
        super().preempted(step_id, request_id, mode=mode, **rest)
        request = self.llm.scheduler.requests[request_id]
        sequences = request.sequences.values()
        assert rest["num_tokens"] == sum(sequence.num_tokens for sequence in sequences)
        computed = sum(sequence.num_computed_tokens for sequence in sequences)
        assert rest["num_computed_tokens"] == computed
        if rest["reason"] == "forced" and step_id == self.llm.scheduler.next_step_id:
            self.preempted_before = step_id  # between steps, by a reset
        else:
            self._see("preempted", step_id)
        self.figures["num_preemptions"] += 1
        self.running.discard(request_id)
        self.waiting.add(request_id)

    def resumed(self, step_id: int, request_id: str, num_cached_tokens: int) -> None:
        self._see("resumed", step_id)
        assert request_id in self.waiting

    def step_updated(self, step_id: int, view: PoolView) -> None:
        state = view.pool_state()
        tables = {key: Counter(table) for key, table in state.tables.items()}
        assert tables == {key: table for key, table in self.tables.items() if table}
        assert set(state.waiting) == self.waiting
        assert set(state.running) == self.running
        counters = dict(state.counters)
        for name in self.figures:
            assert counters[name] == self.figures[name], name
        assert counters["num_steps"] == len(self.steps)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_an_account_by_events_agrees_with_the_engine(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + 20):
        total += run_trial(draw_trial(Random(seed)), Account).counts
    assert total["swapped blocks"]
    assert total["recomputed tokens"]
    assert total["forks"]


class Phases(EngineObserver):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def preempted(self, step_id: int, request_id: str, *, phase: str, **rest: Any) -> None:
        self.seen.append(phase)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("num_steps", "phase"),
    [
        (1, "prefill_first"),
        (2, "prefill_middle"),
        (3, "prefill_middle"),
        (4, "prefill_last"),
        (5, "first_decode"),
        (6, "decode"),
        (7, "decode"),
    ],
)
def test_phases_are_named_as_they_are(num_steps: int, phase: str, mode: str) -> None:
    """A prompt of 19 tokens in chunks of 4; what it does next when it is preempted."""
    phases = Phases()
    with LLM(
        "exact", block_size=4, num_kv_blocks=16, max_num_batched_tokens=4, swap_space_blocks=16
    ) as llm:
        llm.set_observer(phases)
        given = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        llm.add_request(list(range(1, 20)), given)
        for _ in range(num_steps):
            llm.step()
        llm.preempt_request("0", mode)  # type: ignore[arg-type]
        llm.step()
        while not llm.scheduler.running:
            llm.step()
        llm.preempt_request("0", mode)  # type: ignore[arg-type]
        llm.step()
    assert phases.seen == [phase, "just_resumed"]
