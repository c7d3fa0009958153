"""Deterministic mode, end to end: the logits of a history are the same bits whatever happens.

Hypothesis draws batch mixes, chunk sizes, block sizes, prefix hits, natural and forced preemption.
Every row of logits that any run computes is kept under the token history it belongs to; a history
met again must give the same bits. The reference rows come from scoring each sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preempt_engine import LLM, SamplingParams
from preempt_engine.step import SchedulerOutput
from preempt_engine.worker.state import WorkerState
from preempt_harness.checkpoints import tiny_checkpoint

Rows = dict[tuple[int, ...], torch.Tensor]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "opt")


class RowTap:
    """Stands before a runner and keeps every row of logits under its token history."""

    def __init__(self, llm: LLM, rows: Rows) -> None:
        self._runner = llm._executor.runner  # type: ignore[attr-defined]
        self._execute = self._runner.execute
        self._state = WorkerState(llm.config.block_size)
        self._rows = rows
        self.num_compared = 0
        self._runner.execute = self.execute

    def execute(self, step: SchedulerOutput) -> Any:
        logits = self._execute(step)
        self._state.apply(step)
        row = 0
        for item, sequence in self._state.rows(step):
            for position in range(item.logits_start, item.end):
                history = tuple(sequence.token_ids[: position + 1])
                found = torch.from_numpy(logits.row(row).copy())
                row += 1
                known = self._rows.setdefault(history, found)
                assert torch.equal(known, found), f"{item.key} at position {position}"
                self.num_compared += known is not found
        return logits


def score_alone(model: str, sequences: list[list[int]], rows: Rows) -> None:
    """Rows of every position of every sequence, one sequence at a time."""
    with LLM(model, deterministic=True, enable_prefix_caching=False, num_kv_blocks=64) as llm:
        RowTap(llm, rows)
        for sequence in sequences:
            llm.score(sequence[:1], sequence[1:])


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_company(family: str, threads: int) -> None:
    model = str(tiny_checkpoint(family))
    num_compared = num_preemptions = 0

    @given(data=st.data())
    @settings(max_examples=3)
    def run(data: st.DataObject) -> None:
        nonlocal num_compared, num_preemptions
        shared = data.draw(st.lists(st.integers(4, 500), min_size=0, max_size=9))
        prompts = [
            shared + data.draw(st.lists(st.integers(4, 500), min_size=1, max_size=20))
            for _ in range(data.draw(st.integers(2, 4)))
        ]
        max_tokens = data.draw(st.integers(4, 10))
        block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
        longest = max(len(prompt) for prompt in prompts) + max_tokens
        rows: Rows = {}
        with LLM(
            model,
            deterministic=True,
            block_size=block_size,
            num_kv_blocks=-(-longest // block_size) + data.draw(st.integers(0, 3)),
            max_num_batched_tokens=data.draw(st.sampled_from([3, 8, 64])),
            enable_prefix_caching=data.draw(st.booleans()),
            block_reuse_order="lifo",
            poison=True,
        ) as llm:
            tap = RowTap(llm, rows)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            outputs = _run(llm, prompts, params, data.draw(st.integers(1, 6)))
            num_preemptions += llm.counters.num_preemptions
            sequences = [
                prompt + outputs[name]
                for name, prompt in zip(sorted(outputs), prompts, strict=True)
            ]
        before = len(rows)
        score_alone(model, sequences, rows)
        num_compared += before + tap.num_compared

    run()
    assert num_preemptions > 0
    assert num_compared > 20


def _run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, every: int
) -> dict[str, list[int]]:
    """Run to the end; before every so many steps the youngest running request is preempted."""
    for index, prompt in enumerate(prompts):
        llm.add_request(prompt, params, request_id=f"r{index}")
    outputs: dict[str, list[int]] = {}
    forced = 0
    while llm.has_unfinished_requests():
        running = llm.scheduler.running
        if llm.scheduler.next_step_id % (every + 2) == every and running and forced < 4:
            forced += 1
            llm.preempt_request(running[-1].request_id)
        for output in llm.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        llm.scheduler.check_integrity()
    return outputs


def test_another_history_has_other_bits() -> None:
    """The comparison can fail: one exchanged token far back changes the rows that follow."""
    model = str(tiny_checkpoint("llama"))
    rows: Rows = {}
    first = [9, 8, 7, 6, 5, 4, 30, 31]
    second = [*first[:1], 99, *first[2:]]
    score_alone(model, [first, second], rows)
    assert not torch.equal(rows[tuple(first[:7])], rows[tuple(second[:7])])
