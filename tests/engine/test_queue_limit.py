"""`max_waiting_requests`: arrivals are refused, never those who ran."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from naive_model import engine

from preempt_engine import SamplingParams
from preempt_engine.errors import QueueFullError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_an_arrival_at_a_full_queue_ends_alone() -> None:
    llm = engine(max_waiting_requests=2)
    names = [llm.add_request([1, 2, 3], GREEDY) for _ in range(3)]
    outputs = {}
    while llm.has_unfinished_requests():
        outputs.update({output.request_id: output for output in llm.step() if output.finished})
    assert [outputs[name].outputs[0].finish_reason for name in names] == [
        "length",
        "length",
        "error",
    ]
    assert isinstance(outputs[names[2]].error, QueueFullError)
    assert "max_waiting_requests is 2" in str(outputs[names[2]].error)


@given(preempt_at=st.lists(st.integers(1, 30), max_size=8, unique=True), limit=st.integers(1, 3))
def test_preempted_requests_return_to_a_full_queue(preempt_at: list[int], limit: int) -> None:
    llm = engine(preempt_at, max_waiting_requests=limit, num_kv_blocks=7)
    finished = []
    pending = [[index + 1] * 9 for index in range(6)]
    while pending or llm.has_unfinished_requests():
        if pending and len(llm.scheduler.waiting) < limit:
            llm.add_request(pending.pop(), GREEDY)
        finished += [output for output in llm.step() if output.finished]
    assert [output.error for output in finished] == [None] * 6
    assert {output.outputs[0].finish_reason for output in finished} == {"length"}


def test_generate_waits_for_room_in_the_queue() -> None:
    prompts = [[index + 1] * 5 for index in range(7)]
    limited = engine(max_waiting_requests=2).generate(prompts, GREEDY, use_tqdm=False)
    free = engine().generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error for output in limited] == [None] * 7
    assert [output["token_ids"] for output in limited] == [output["token_ids"] for output in free]


def test_without_a_limit_any_number_waits() -> None:
    llm = engine(max_num_seqs=1)
    for _ in range(50):
        llm.add_request([1], GREEDY)
    assert len(llm.scheduler.waiting) == 50
