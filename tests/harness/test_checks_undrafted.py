"""Withheld drafts: who could have some and has none; and who need not have any."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import run_fake, work_findings

from preempt_harness.checks import Code, Finding
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    Event,
    Finished,
    PlanApplied,
    PoolCounts,
    Preempted,
    Scheduled,
    TokensDelivered,
)
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

replace = msgspec.structs.replace
SCRIPTED = {"method": "scripted", "num_speculative_tokens": 2}
PROMPT = [1, 2, 3, 2, 4]


def judged(
    *events: Event,
    speculative: dict[str, object] = SCRIPTED,
    max_tokens: int = 8,
    n: int = 1,
    capabilities: tuple[str, ...] = ("recompute", "strict_order"),
    **config: object,
) -> list[Finding]:
    """Findings on a log that begins so; blocks of four tokens, eight tokens a step."""
    sampling = SamplingSpec(max_tokens=max_tokens, n=n)
    asked = Workload(
        requests=[RequestSpec(id=name, prompt_token_ids=PROMPT, sampling=sampling) for name in "ab"]
    )
    record = run_fake(asked)
    record.header = replace(
        record.header,
        capabilities=list(capabilities),
        block_size=4,
        num_blocks=8,
        config={
            "max_num_batched_tokens": 8,
            "max_num_seqs": 4,
            "num_speculative_tokens": 2,
            "speculative_config": speculative,
            **config,
        },
    )
    record.events = list(events)
    return work_findings(record, "withheld drafts")


def pool(step: int, held: int = 0) -> PoolCounts:
    return PoolCounts(step, 8, 6 - held, 0, 2, held)


def begun(token_id: int = 2, *, blocks: tuple[int, ...] = (0, 1)) -> list[Event]:
    """The first step computes the prompt and gives a token."""
    return [
        Arrived(0, "a", PROMPT, 8, 0),
        BlocksAllocated(0, "a.0", list(blocks), 0),
        Scheduled(0, "a.0", 0, 5),
        TokensDelivered(0, "a.0", [token_id], None, ""),
        pool(0),
    ]


def then(end: int, *more: Event, held: int = 0) -> list[Event]:
    """The second step computes up to `end`."""
    return [*more, Scheduled(1, "a.0", 5, end), pool(1, held)]


def test_the_newest_token_alone_is_found() -> None:
    (found,) = judged(*begun(), *then(6))
    assert (found.code, found.step, found.sequence) == (Code.WORK_DRAFTS, 1, "a.0")
    assert "at position 5" in found.message
    assert not judged(*begun(), *then(7))


def test_no_draft_is_wanted_where_no_token_comes_behind_it() -> None:
    assert judged(*begun(), *then(6), max_tokens=3)
    assert not judged(*begun(), *then(6), max_tokens=2)


def test_no_draft_is_wanted_where_there_is_no_room() -> None:
    tokens = TokensDelivered(0, "a.0", [7, 8], None, "")
    full = [*begun()[:-1], tokens, pool(0), Scheduled(1, "a.0", 5, 8), pool(1)]
    assert not judged(*full)
    assert not judged(*begun(), *then(6), max_num_batched_tokens=1)


def test_a_draft_model_always_has_a_guess_and_a_lookup_only_of_what_was_there() -> None:
    for method in ("draft_model", "scripted", "ngram"):
        assert judged(*begun(2), *then(6), speculative={"method": method})
    assert not judged(*begun(9), *then(6), speculative={"method": "ngram"})
    pairs = {"method": "ngram", "prompt_lookup_min": 2}
    assert not judged(*begun(2), *then(6), speculative=pairs)  # 4 2 is new
    assert not judged(*begun(2), *then(6), speculative={"method": "somehow"})


def test_who_got_no_token_in_the_step_before_has_no_drafts_yet() -> None:
    late = [pool(1), Scheduled(2, "a.0", 5, 6), pool(2)]
    assert not judged(*begun(), *late)


@pytest.mark.parametrize(
    "event",
    [
        PlanApplied(1, "squeeze:all@1..3"),
        Preempted(1, "b", "recompute", "decode", "out_of_blocks", 6, 7),
        Arrived(1, "b", PROMPT, 8, 0),
    ],
    ids=["plan", "preemption", "arrival"],
)
def test_steps_with_something_else_to_do_are_excused(event: Event) -> None:
    assert not judged(*begun(), *then(6, event))


def test_held_blocks_those_who_wait_and_those_who_go_without_excuse() -> None:
    assert not judged(*begun(), *then(6, held=2))
    waits: list[Event] = [Arrived(0, "b", PROMPT, 8, 0), *begun()]
    assert not judged(*waits, *then(6))
    assert judged(*waits, Finished(0, "b", "length"), pool(0), *then(6)) == []
    runs = [*waits[:1], BlocksAllocated(0, "b.0", [2, 3], 0), *waits[1:]]
    assert not judged(*runs, *then(6))
    assert judged(*runs, *then(6, Scheduled(1, "b.0", 0, 4)))


def test_engines_that_promise_less_are_not_judged() -> None:
    assert not judged(*begun(), *then(6), capabilities=("recompute",))
    assert not judged(*begun(), *then(6), n=2)


def test_what_is_decided_ahead_must_find_room_behind_the_draft() -> None:
    assert judged(*begun(), *then(6), async_scheduling=1)
    assert not judged(*begun(), *then(6), async_scheduling=2)
