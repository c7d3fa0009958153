"""The exact workers and the log that adapters of schedulers share."""

from __future__ import annotations

import pytest

from preempt_engine.exact import reference_generate
from preempt_harness.adapters.exact_workers import VOCAB_SIZE, ExactWorkers, Row, slots_of
from preempt_harness.adapters.scheduler_log import Log
from preempt_harness.record import Computed, Preempted, Resumed
from preempt_harness.workload import RequestSpec, SamplingSpec

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10]


def row(start: int, token_ids: list[int], table: list[int], num_logits: int = 1) -> Row:
    end = start + len(token_ids)
    slots = slots_of(table, start, end, BLOCK)
    return Row("r0.0", start, token_ids, slots, table, end, num_logits)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_that_read_what_was_written_give_the_closed_form(num_ranks: int) -> None:
    workers = ExactWorkers(4, BLOCK, num_ranks)
    log = Log(64, BLOCK)
    output: list[int] = []
    given = PROMPT
    for step in range(5):
        one = row(len(PROMPT) + len(output) - 1 if step else 0, given, [2, 0, 3])
        ((token,),) = workers.compute(step, [[one]] * num_ranks, log.add)
        output.append(token)
        given = [token]
    assert output == reference_generate(PROMPT, 5, VOCAB_SIZE, num_ranks=num_ranks)


def test_a_wrong_block_of_one_rank_changes_the_token() -> None:
    log = Log(64, BLOCK)
    right = ExactWorkers(4, BLOCK, 2).compute(0, [[row(0, PROMPT, [1, 2])]] * 2, log.add)
    workers = ExactWorkers(4, BLOCK, 2)
    written = row(0, PROMPT, [1, 2])
    elsewhere = Row("r0.0", 0, PROMPT, written.slots, [1, 3], 6)
    wrong = workers.compute(0, [[written], [elsewhere]], log.add)
    assert wrong != right


def test_several_logits_of_a_row_are_those_of_its_last_positions() -> None:
    expected = reference_generate(PROMPT, 3, VOCAB_SIZE)
    tokens = [*PROMPT, *expected[:2]]
    ((*chosen,),) = ExactWorkers(4, BLOCK).compute(
        0, [[row(0, tokens, [0, 1, 2], num_logits=3)]], Log(64, BLOCK).add
    )
    assert chosen == expected


def test_tables_are_recorded_as_changes() -> None:
    workers, log = ExactWorkers(4, BLOCK), Log(64, BLOCK)
    workers.compute(0, [[row(0, PROMPT, [1, 2])]], log.add)
    workers.compute(1, [[row(6, [3], [1, 3])]], log.add)
    first, second = [event for event in log.take() if isinstance(event, Computed)]
    assert (first.table_keep, first.table_new) == (0, [1, 2])
    assert (second.table_keep, second.table_new) == (1, [3])


def test_a_table_that_is_too_short_is_an_error() -> None:
    with pytest.raises(IndexError):
        slots_of([1], 0, 5, BLOCK)


def phase_after(log: Log, *scheduled: tuple[int, int], delivered: int = 0) -> str:
    """The phase in which r0, a prompt of 6 tokens, is preempted after these steps."""
    spec = RequestSpec(id="r0", prompt_token_ids=PROMPT, sampling=SamplingSpec(max_tokens=8))
    if "r0" not in log.tracks:
        log.arrived(spec)
    log.holds("r0", [0, 1])
    for start, end in scheduled:
        log.scheduled("r0", start, end, 6)
    log.delivered("r0", [9] * delivered)
    log.preempted("r0", "forced", scheduled[-1][1], 6 + delivered)
    log.freed("r0", [1, 0])
    (event,) = [event for event in log.take() if isinstance(event, Preempted)]
    return event.phase


def test_phases() -> None:
    assert phase_after(Log(2, BLOCK), (0, 2)) == "prefill_first"
    assert phase_after(Log(1, BLOCK), (0, 2), (2, 3)) == "prefill_middle"
    assert phase_after(Log(2, BLOCK), (0, 2), (2, 4)) == "prefill_last"
    assert phase_after(Log(8, BLOCK), (0, 6), delivered=1) == "first_decode"
    assert phase_after(Log(8, BLOCK), (0, 6), (6, 7), delivered=2) == "decode"
    log = Log(8, BLOCK)
    phase_after(log, (0, 6), delivered=1)
    assert phase_after(log, (0, 7)) == "just_resumed"


def test_the_first_blocks_after_a_preemption_are_a_return() -> None:
    log = Log(8, BLOCK)
    phase_after(log, (0, 6), delivered=1)
    log.holds("r0", [3, 2], num_cached=1)
    (event,) = [event for event in log.take() if isinstance(event, Resumed)]
    assert (event.request, event.num_cached_tokens) == ("r0", BLOCK)
