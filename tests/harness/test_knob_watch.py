"""A claimed knob that does nothing is an error, not a trial that shows nothing."""

from __future__ import annotations

import pytest

from preempt_harness._knob_watch import IdleKnobError, KnobWatch
from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.embedded_pool import EnginePool
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.generators import block_edges
from preempt_harness.record import (
    AnyEvent,
    BlocksAllocated,
    BlocksFreed,
    BlocksPoisoned,
    EngineError,
    Forked,
    PoolCounts,
    Preempted,
    Scheduled,
    TokensDelivered,
)
from preempt_harness.trial import Trial, run_trial


class IdlePreempt(EmbeddedSession):
    def preempt(self, request: str, mode: str) -> None:
        pass


class IdleHold(EmbeddedSession):
    def hold_blocks(self, num_blocks: int) -> int:
        return num_blocks


class HoldsNone(EmbeddedSession):
    def hold_blocks(self, num_blocks: int) -> int:
        return 0


class IdlePoison(EmbeddedSession):
    def poll(self, timeout_s: float) -> list[AnyEvent]:
        return [event for event in super().poll(timeout_s) if type(event) is not BlocksPoisoned]


def errors(session: type[EmbeddedSession], plan: str, **settings: object) -> list[str]:
    trial = Trial(
        engine="embedded",
        settings=EngineSettings(model="exact", num_blocks=40, block_size=4, **settings),  # type: ignore[arg-type]
        workload=block_edges(vocab_size=64, block_size=4, seed=0),
        plan=plan,
    )
    pool = EnginePool()
    record = run_trial(trial, EmbeddedAdapter(), open_session=lambda chosen: session(chosen, pool))
    return [f"{e.kind}: {e.message}" for e in record.events if isinstance(e, EngineError)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("plan", ["preempt:r1@out=3", "preempt-all@step=4", "every:3,max=2"])
def test_a_preempt_that_preempts_nobody(plan: str, ahead: int) -> None:
    assert errors(EmbeddedSession, plan, async_scheduling=ahead) == []
    (error,) = errors(IdlePreempt, plan, async_scheduling=ahead)
    assert error.startswith("IdleKnobError: Engine 'embedded' was told to preempt r")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_hold_that_holds_nothing(ahead: int) -> None:
    plan = "squeeze:3@2..6"
    assert errors(EmbeddedSession, plan, async_scheduling=ahead) == []
    (error,) = errors(IdleHold, plan, async_scheduling=ahead)
    assert "says that 3 blocks are held, and shows 0" in error


@pytest.mark.parametrize("wanted", ["3", "all"])
def test_a_hold_of_nothing_where_blocks_are_free(wanted: str) -> None:
    plan = f"squeeze:{wanted}@2..6"
    assert errors(EmbeddedSession, plan) == []
    (error,) = errors(HoldsNone, plan)
    assert "and holds none, though it showed" in error


def test_a_hold_of_nothing_may_be_right() -> None:
    full, spare = PoolCounts(3, 8, 0, 0, 8, 0, 0), PoolCounts(3, 8, 5, 0, 3, 0, 0)
    watch = KnobWatch("e")
    watch.held(0, 3)  # nothing is known of the pool
    for events in ([full], [spare, full], [spare], []):
        watch.take(events)
        if events == [spare]:
            with pytest.raises(IdleKnobError, match="5 free blocks just before"):
                watch.held(0, 3)
            watch.held(0, 0)
        else:
            watch.held(0, 3)
    ahead = KnobWatch("e", num_ahead=1)
    ahead.take([spare])
    ahead.held(0, 3)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_poison_that_poisons_nothing(ahead: int) -> None:
    given = {"async_scheduling": ahead, "enable_prefix_caching": False}
    for poison in (False, True):
        options = {"poison": poison}
        assert errors(EmbeddedSession, "preempt:r1@out=3", options=options, **given) == []
    (error,) = errors(IdlePoison, "preempt:r1@out=3", options=options, **given)
    assert "was told to poison freed blocks" in error
    options = {"poison": False}
    assert errors(IdlePoison, "preempt:r1@out=3", options=options, **given) == []


@pytest.mark.parametrize(
    "between",
    [
        [],  # steps that compute nothing
        [Scheduled(1, "r0.0", 0, 1), BlocksAllocated(1, "r0.0", [4])],
        [Scheduled(1, "r0.0", 0, 1), BlocksPoisoned(1, 0, [7])],
        [Scheduled(1, "r0.0", 0, 1), Forked(1, "r0.0", "r0.1")],
    ],
)
def test_what_need_not_be_poisoned_or_was(between: list[AnyEvent]) -> None:
    watch = KnobWatch("e", poisons=True)
    watch.take([BlocksFreed(0, "r1.0", [4])])
    for _ in range(5):
        watch.take(between)


def test_what_is_held_need_not_be_poisoned() -> None:
    def take_all(watch: KnobWatch) -> None:
        watch.take([BlocksFreed(0, "r1.0", [4])])
        for step in range(5):
            watch.take([Scheduled(step, "r0.0", step, step + 1)])

    watch = KnobWatch("e", poisons=True)
    watch.held(2)
    watch.held(0)
    take_all(watch)
    with pytest.raises(IdleKnobError, match="block 4 has been free for 2 steps"):
        take_all(KnobWatch("e", poisons=True))


def test_what_an_engine_always_keeps_is_not_held_for_the_plan() -> None:
    watch = KnobWatch("e", num_reserved_blocks=1)
    counts = PoolCounts(3, 8, 5, 0, 2, 1, 0)
    watch.take([counts])
    watch.held(2)
    with pytest.raises(IdleKnobError, match="1 of which it always keeps"):
        watch.take([counts])
    watch.held(0)
    watch.take([counts])


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_steps_that_were_decided_before_hold_nothing_yet(num_ahead: int) -> None:
    watch = KnobWatch("e", num_ahead=num_ahead)
    for start in (0, 10):
        watch.held(2)
        for step in range(start, start + num_ahead):
            watch.take([PoolCounts(step, 8, 5, 0, 3, 0, 0)])
        watch.held(0)
    watch.held(2)
    for step in range(20, 20 + num_ahead):
        watch.take([PoolCounts(step, 8, 5, 0, 3, 0, 0)])
    with pytest.raises(IdleKnobError, match="2 blocks are held, and shows 0"):
        watch.take([PoolCounts(29, 8, 5, 0, 3, 0, 0)])


def test_a_request_that_ends_right_away_shows_nothing_of_the_knob() -> None:
    watch = KnobWatch("e")
    watch.preempted("r0")
    for step in range(2):
        watch.take([TokensDelivered(step, "r0.0", [5])])
    for step in range(2, 9):
        watch.take([TokensDelivered(step, "r1.0", [5])])


def test_one_preemption_shows_that_the_knob_works() -> None:
    watch = KnobWatch("e")
    watch.preempted("r0")
    watch.take([Preempted(0, "r0", "recompute", "decode", "forced", 3, 4)])
    watch.preempted("r1")
    for step in range(9):
        watch.take([TokensDelivered(step, "r1.0", [5])])
