"""What stands for vLLM's model runner: rows from what the scheduler sends, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from preempt_harness.adapters.vllm_runner import STALE, ModelRunner, RunnerStateError

BLOCK = 4


def runner(drafts: list[int] | None = None) -> ModelRunner:
    """A runner that drafts these tokens every time."""
    made = drafts or []
    return ModelRunner(BLOCK, len(made), lambda name, token_ids: list(made))


def sent(
    scheduled: dict[str, int],
    *,
    new: dict[str, tuple[list[int], list[int], int]] | None = None,
    more: dict[str, list[int]] | None = None,
    drafts: dict[str, int] | None = None,
    finished: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> Any:
    """A scheduler's output: new is request -> (token ids, blocks, computed tokens)."""
    admitted = [
        SimpleNamespace(
            req_id=name,
            prefill_token_ids=token_ids,
            block_ids=(blocks,),
            num_computed_tokens=computed,
        )
        for name, (token_ids, blocks, computed) in (new or {}).items()
    ]
    running = [name for name in scheduled if name not in (new or {})]
    blocks = [([*(more or {})[name]],) if name in (more or {}) else None for name in running]
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=admitted,
        scheduled_cached_reqs=SimpleNamespace(req_ids=running, new_block_ids=blocks),
        scheduled_spec_decode_tokens={n: [STALE] * k for n, k in (drafts or {}).items()},
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def test_a_prompt_is_computed_in_chunks_and_then_its_output() -> None:
    worker = runner()
    first = worker.launch(sent({"r0": 3}, new={"r0": ([5, 6, 7, 8, 9], [2, 4], 0)}))
    worker.take_tokens(first, [[40]])
    assert first.rows[0].token_ids == [5, 6, 7]
    assert first.sampled == {"r0": []}, "a chunk samples nothing"
    second = worker.launch(sent({"r0": 2}))
    worker.take_tokens(second, [[41]])
    assert (second.rows[0].start, second.rows[0].token_ids) == (3, [8, 9])
    assert second.sampled == {"r0": [41]}
    third = worker.launch(sent({"r0": 1}))
    (row,) = third.rows
    assert (row.start, row.token_ids, row.slots) == (5, [41], [17])
    assert (row.table, row.read_len) == ([2, 4], 6)


def test_blocks_are_appended() -> None:
    worker = runner()
    worker.take_tokens(worker.launch(sent({"r0": 4}, new={"r0": ([5, 6, 7, 8], [1], 0)})), [[9]])
    (row,) = worker.launch(sent({"r0": 1}, more={"r0": [7]})).rows
    assert (row.table, row.slots) == ([1, 7], [28])


def test_a_cached_prefix_is_not_computed() -> None:
    (row,) = runner().launch(sent({"r0": 1}, new={"r0": ([5, 6, 7, 8, 9], [3, 0], 4)})).rows
    assert (row.start, row.token_ids, row.read_len) == (4, [9], 5)


def test_drafts_that_are_right_are_accepted_and_the_rest_is_computed_again() -> None:
    worker = runner([50, 51])
    worker.take_tokens(worker.launch(sent({"r0": 2}, new={"r0": ([5, 6], [0, 1], 0)})), [[7]])
    step = worker.launch(sent({"r0": 3}, drafts={"r0": 2}))
    assert step.rows[0].token_ids == [7, 50, 51]
    worker.take_tokens(step, [[50, 60, 61]])
    assert step.sampled == {"r0": [50, 60]}
    assert step.rejected == {"r0": 1}
    (row,) = worker.launch(sent({"r0": 3}, drafts={"r0": 2})).rows
    assert (row.start, row.token_ids) == (4, [60, 50, 51])


def test_a_resumed_request_is_told_everything_again() -> None:
    worker = runner()
    worker.take_tokens(worker.launch(sent({"r0": 2}, new={"r0": ([5, 6], [0], 0)})), [[7]])
    again = sent({"r0": 3}, new={"r0": ([5, 6, 7], [3], 0)}, preempted=["r0"])
    (row,) = worker.launch(again).rows
    assert (row.start, row.token_ids, row.table) == (0, [5, 6, 7], [3])


def test_a_slot_that_nobody_fills_is_stale() -> None:
    worker = runner()
    worker.take_tokens(worker.launch(sent({"r0": 2}, new={"r0": ([5, 6], [0, 1], 0)})), [[7]])
    (row,) = worker.launch(sent({"r0": 2})).rows
    assert row.token_ids == [STALE, 7]


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_a_request_that_was_dropped_is_unknown(how: str) -> None:
    worker = runner()
    worker.take_tokens(worker.launch(sent({"r0": 2}, new={"r0": ([5, 6], [0], 0)})), [[7]])
    with pytest.raises(RunnerStateError, match="r0 is scheduled, and the runner was never told"):
        worker.launch(sent({"r0": 1}, **{how: ["r0"]}))  # type: ignore[arg-type]  # a name of it


def test_a_missing_block_is_an_error_that_names_the_positions() -> None:
    with pytest.raises(RunnerStateError, match=r"r0 is to compute positions \[0, 5\)"):
        runner().launch(sent({"r0": 5}, new={"r0": ([5, 6, 7, 8, 9], [0], 0)}))


def test_fewer_tokens_than_drafts_are_an_error() -> None:
    worker = runner([50, 51])
    with pytest.raises(RunnerStateError, match="fewer than its 2 drafts"):
        worker.launch(sent({"r0": 2}, new={"r0": ([5, 6], [0], 0)}, drafts={"r0": 2}))
