"""KVSan on histories written by hand: drafts, steps in flight, forks, swaps, odd logs."""

from __future__ import annotations

import sys

import pytest
from msgspec.structs import replace

from preempt_harness.checks import Code, Finding
from preempt_harness.checks.kvsan import KVSan
from preempt_harness.record import (
    Arrived,
    BlocksAllocated,
    BlocksFreed,
    BlocksPoisoned,
    Computed,
    EngineError,
    Event,
    Finished,
    Forked,
    Header,
    Preempted,
    Resumed,
    Scheduled,
    StepDone,
    StepLaunched,
    SwappedIn,
    SwappedOut,
    TokensDelivered,
    WorkerCopied,
    WorkerSwappedIn,
    WorkerSwappedOut,
    event_names,
)

SIZE = 4


class History:
    """Builds a log for one rank; tables are kept so that deltas are right."""

    def __init__(self, *, observed: frozenset[str] | None = None) -> None:
        self.events: list[Event] = []
        self.step = 0
        self.header = Header(
            workload={"requests": []},
            engine="by hand",
            model="none",
            block_size=SIZE,
            num_blocks=10,
            vocab_size=100,
            observed=sorted(event_names() if observed is None else observed),
        )
        self._sent: dict[str, list[int]] = {}

    def emit(self, *events: Event) -> None:
        self.events += events

    def arrive(self, request: str, prompt: list[int]) -> None:
        self.emit(Arrived(self.step, request, prompt, 16))

    def allocate(self, seq: str, blocks: list[int], num_cached: int = 0) -> None:
        self.emit(BlocksAllocated(self.step, seq, blocks, num_cached))

    def free(self, seq: str, blocks: list[int]) -> None:
        self.emit(BlocksFreed(self.step, seq, blocks))

    def schedule(self, seq: str, start: int, end: int) -> None:
        self.emit(Scheduled(self.step, seq, start, end))

    def compute(
        self, seq: str, start: int, tokens: list[int], table: list[int], step: int | None = None
    ) -> None:
        before = self._sent.get(seq, [])
        keep = len(before) if table[: len(before)] == before else 0
        self._sent[seq] = table
        end = start + len(tokens)
        slots = [table[p // SIZE] * SIZE + p % SIZE for p in range(start, end)]
        at = self.step if step is None else step
        self.emit(Computed(at, 0, seq, start, tokens, slots, keep, table[keep:], end))

    def deliver(self, seq: str, *tokens: int) -> None:
        self.emit(TokensDelivered(self.step, seq, list(tokens)))

    def done(self) -> None:
        self.emit(StepDone(self.step))
        self.step += 1

    def findings(self) -> list[Finding]:
        found = []
        for verify in ("incremental", "full"):
            sanitizer = KVSan(self.header, verify=verify)
            for event in self.events:
                sanitizer.feed(event)
            found.append(sanitizer.finish())
        assert found[0] == found[1]
        return found[0]

    def codes(self) -> list[Code]:
        return [finding.code for finding in self.findings()]


@pytest.fixture
def history() -> History:
    """r0 with a prompt of five tokens, prefilled in step 0."""
    made = History()
    made.arrive("r0", [1, 2, 3, 4, 5])
    made.allocate("r0.0", [0, 1])
    made.schedule("r0.0", 0, 5)
    made.compute("r0.0", 0, [1, 2, 3, 4, 5], [0, 1])
    made.done()
    return made


# Tokens that nobody knows yet ---------------------------------------------------------------------


def test_token_computed_before_its_delivery_is_judged_when_it_arrives(history: History) -> None:
    history.compute("r0.0", 5, [6], [0, 1])  # step 1 runs before step 0's token is delivered
    history.deliver("r0.0", 6)
    history.done()
    history.compute("r0.0", 6, [7], [0, 1])
    history.deliver("r0.0", 7)
    assert history.findings() == []


def test_wrong_token_computed_before_its_delivery_is_a_stale_read_later(history: History) -> None:
    history.compute("r0.0", 5, [66], [0, 1])
    history.deliver("r0.0", 6)
    history.done()
    history.compute("r0.0", 6, [7], [0, 1])
    finding = history.findings()[0]
    assert finding.code == Code.KVSAN_STALE_READ
    assert (finding.step, finding.position) == (2, 5)
    assert "r0.0 in step 1" in finding.message


def test_rejected_drafts_that_are_written_over_are_no_finding(history: History) -> None:
    history.deliver("r0.0", 6)
    history.compute("r0.0", 5, [6, 70, 71], [0, 1])  # drafts 70, 71
    history.deliver("r0.0", 7)  # 70 is rejected
    history.done()
    history.compute("r0.0", 6, [7, 80], [0, 1])
    history.deliver("r0.0", 80, 9)  # 80 is accepted
    history.done()
    history.allocate("r0.0", [2])
    history.compute("r0.0", 8, [9], [0, 1, 2])
    history.deliver("r0.0", 10)
    assert history.findings() == []


def test_read_through_a_rejected_drafts_slot_is_found(history: History) -> None:
    history.deliver("r0.0", 6)
    history.compute("r0.0", 5, [6, 70, 71], [0, 1])
    history.deliver("r0.0", 7, 8)  # both rejected
    history.done()
    history.compute("r0.0", 7, [8], [0, 1])  # position 6 still holds draft 70
    finding = history.findings()[0]
    assert (finding.code, finding.position) == (Code.KVSAN_STALE_READ, 6)


def test_drafts_never_delivered_at_the_end_are_no_finding(history: History) -> None:
    history.deliver("r0.0", 6)
    history.compute("r0.0", 5, [6, 70, 71], [0, 1])
    history.free("r0.0", [0, 1])
    history.emit(Finished(history.step, "r0", "length"))
    assert history.findings() == []


def test_placeholder_token_that_reaches_the_model_is_found(history: History) -> None:
    history.compute("r0.0", 5, [-1], [0, 1])
    assert history.codes() == [Code.KVSAN_TOKEN_MISMATCH]


def test_wrong_prompt_token_names_both_tokens(history: History) -> None:
    history.arrive("r1", [1, 2, 3])
    history.allocate("r1.0", [4])
    history.compute("r1.0", 0, [1, 2, 9], [4])
    finding = history.findings()[0]
    assert (finding.code, finding.position) == (Code.KVSAN_TOKEN_MISMATCH, 2)
    assert "token 9" in finding.message
    assert "own token is 3" in finding.message


# Steps in flight ----------------------------------------------------------------------------------


def test_step_in_flight_is_judged_by_the_lease_it_was_scheduled_with(history: History) -> None:
    history.schedule("r0.0", 5, 6)
    history.emit(StepLaunched(history.step))
    history.free("r0.0", [0, 1])  # the request ended by step 0's token
    history.emit(Finished(history.step, "r0", "stop"))
    history.compute("r0.0", 5, [6], [0, 1])
    history.done()
    assert history.findings() == []


def test_worker_that_computes_after_the_blocks_are_gone_is_found(history: History) -> None:
    history.free("r0.0", [0, 1])
    history.step += 1
    history.compute("r0.0", 5, [6], [0, 1])
    finding = history.findings()[0]
    assert (finding.code, finding.block) == (Code.KVSAN_USE_AFTER_FREE, 0)
    assert "nobody holds it" in finding.message


def test_block_of_another_request_names_its_holder(history: History) -> None:
    history.arrive("r1", [1, 2, 3])
    history.allocate("r1.0", [4])
    history.compute("r1.0", 0, [1, 2, 3], [1])
    finding = history.findings()[0]
    assert (finding.code, finding.block) == (Code.KVSAN_USE_AFTER_FREE, 1)
    assert "r0.0 holds it" in finding.message


# Whole blocks -------------------------------------------------------------------------------------


def fork(history: History) -> None:
    history.deliver("r0.0", 6)
    history.emit(Forked(history.step, "r0.0", "r0.1"))


def test_fork_with_copy_on_write_is_clean(history: History) -> None:
    fork(history)
    history.allocate("r0.1", [2])
    history.free("r0.1", [1])
    history.emit(WorkerCopied(history.step, 0, [(1, 2)]))
    history.compute("r0.0", 5, [6], [0, 1])
    history.compute("r0.1", 5, [6], [0, 2])
    history.done()
    history.deliver("r0.0", 7)
    history.deliver("r0.1", 8)
    history.compute("r0.0", 6, [7], [0, 1])
    history.compute("r0.1", 6, [8], [0, 2])
    assert history.findings() == []


def test_write_to_a_forked_block_without_copy_is_found(history: History) -> None:
    fork(history)
    history.compute("r0.0", 5, [6], [0, 1])
    finding = history.findings()[0]
    assert (finding.code, finding.position, finding.block) == (Code.KVSAN_SHARED_WRITE, 5, 1)
    assert "r0.1" in finding.message


def swap_out(history: History) -> None:
    history.deliver("r0.0", 6)
    history.emit(Preempted(history.step, "r0", "swap", "decode", "forced", 5, 6))
    history.emit(SwappedOut(history.step, "r0", [(0, 0), (1, 1)]))
    history.free("r0.0", [0, 1])
    history.emit(WorkerSwappedOut(history.step, 0, [(0, 0), (1, 1)]))
    history.emit(BlocksPoisoned(history.step, 0, [0, 1]))
    history.step += 1
    history.emit(Resumed(history.step, "r0", 0))
    history.allocate("r0.0", [5, 6])
    history.emit(SwappedIn(history.step, "r0", [(0, 5), (1, 6)]))


def test_swap_out_and_in_keeps_contents(history: History) -> None:
    swap_out(history)
    history.emit(WorkerSwappedIn(history.step, 0, [(0, 5), (1, 6)]))
    history.compute("r0.0", 5, [6], [5, 6])
    assert history.findings() == []


def test_swap_in_that_mixes_blocks_is_a_stale_read(history: History) -> None:
    swap_out(history)
    history.emit(WorkerSwappedIn(history.step, 0, [(0, 6), (1, 5)]))
    history.compute("r0.0", 5, [6], [5, 6])
    finding = history.findings()[0]
    assert (finding.code, finding.position, finding.block) == (Code.KVSAN_STALE_READ, 0, 5)


def test_swap_in_that_never_happens_is_a_use_before_write(history: History) -> None:
    swap_out(history)
    history.compute("r0.0", 5, [6], [5, 6])
    finding = history.findings()[0]
    assert (finding.code, finding.position) == (Code.KVSAN_USE_BEFORE_WRITE, 0)


def test_copies_read_all_sources_before_they_write(history: History) -> None:
    history.deliver("r0.0", 6)
    history.emit(WorkerCopied(history.step, 0, [(0, 1), (1, 0)]))
    history.compute("r0.0", 5, [6], [1, 0])
    assert history.findings() == []


@pytest.mark.parametrize(
    "event",
    [
        BlocksPoisoned(1, 0, [10]),
        WorkerCopied(1, 0, [(0, -1)]),
        WorkerSwappedIn(1, 0, [(0, 99)]),
        WorkerSwappedOut(1, 0, [(99, 0)]),
        BlocksAllocated(1, "r0.0", [10]),
    ],
)
def test_block_ids_outside_the_pool_are_found(history: History, event: Event) -> None:
    history.emit(event)
    assert history.codes() == [Code.KVSAN_ID_RANGE]


# Places -------------------------------------------------------------------------------------------


def test_a_block_that_is_not_its_own_is_found_at_its_first_position(history: History) -> None:
    history.deliver("r0.0", 6)
    history.compute("r0.0", 5, [6], [0, 7])
    finding = next(item for item in history.findings() if item.block == 7)
    assert (finding.code, finding.position) == (Code.KVSAN_USE_AFTER_FREE, SIZE)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_bad_read_is_found_at_its_position_at_any_block_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block is replaced by that of another prompt, which differs in its last token."""
    monkeypatch.setattr(sys.modules[__name__], "SIZE", size)
    made = History()
    own = list(range(1, 2 * size + 1))
    for request, tokens, table in (
        ("r0", own, [0, 1]),
        ("r1", [*own[:-1], 99], [2, 3]),
    ):
        made.arrive(request, tokens)
        made.allocate(f"{request}.0", table)
        made.compute(f"{request}.0", 0, tokens, table)
    made.done()
    made.emit(WorkerCopied(1, 0, [(3, 1)]))
    made.deliver("r0.0", 50)
    made.allocate("r0.0", [4])
    made.compute("r0.0", 2 * size, [50], [0, 1, 4])
    (finding,) = made.findings()
    assert (finding.code, finding.position) == (Code.KVSAN_STALE_READ, 2 * size - 1)


def test_the_first_owner_may_not_write_anew_what_others_have_found(history: History) -> None:
    history.arrive("r1", [1, 2, 3, 4, 9])
    history.allocate("r1.0", [0, 2], num_cached=1)
    history.compute("r1.0", 4, [9], [0, 2])
    history.done()
    history.compute("r0.0", 1, [77], [0, 1])
    assert Code.KVSAN_SHARED_WRITE in history.codes()


@pytest.mark.parametrize("block", [9, 10, 11, 100])
def test_a_table_that_names_a_block_beyond_the_pool_is_found_in_a_decode(
    history: History, block: int
) -> None:
    history.deliver("r0.0", 6)
    history.compute("r0.0", 5, [6], [0, block])
    assert (Code.KVSAN_ID_RANGE in history.codes()) == (block >= 10)


# Odd logs -----------------------------------------------------------------------------------------


def test_missing_and_surplus_slots_are_wrong_slots(history: History) -> None:
    history.emit(Computed(1, 0, "r0.0", 5, [6, 7], [5], 2, [], 7))
    assert history.codes() == [Code.KVSAN_WRONG_SLOT]
    surplus = History()
    surplus.arrive("r0", [1])
    surplus.allocate("r0.0", [0])
    surplus.emit(Computed(0, 0, "r0.0", 0, [1], [0, 1], 0, [0], 1))
    assert surplus.codes() == [Code.KVSAN_WRONG_SLOT]


def test_a_slot_missing_of_tokens_that_are_known_is_a_wrong_slot(history: History) -> None:
    history.deliver("r0.0", 6, 7)
    history.emit(Computed(1, 0, "r0.0", 5, [6, 7], [5], 2, [], 7))
    assert Code.KVSAN_WRONG_SLOT in history.codes()


def test_granted_block_that_never_reaches_the_worker_is_found() -> None:
    made = History()
    made.arrive("r0", [1, 2, 3, 4])
    made.allocate("r0.0", [0])
    made.compute("r0.0", 0, [1, 2, 3, 4], [0])
    made.deliver("r0.0", 5)
    made.allocate("r0.0", [1])
    made.emit(Computed(1, 0, "r0.0", 4, [5], [4], 1, [], 5))
    finding = made.findings()[0]
    assert (finding.code, finding.position) == (Code.KVSAN_WRONG_SLOT, 4)
    assert "only 1 blocks" in finding.message


def test_poison_of_a_block_that_somebody_has_is_found_before_it_is_read(history: History) -> None:
    history.emit(BlocksPoisoned(1, 0, [1]))
    (finding,) = history.findings()
    assert finding.code == Code.KVSAN_SHARED_WRITE
    assert (finding.step, finding.sequence, finding.block) == (1, "r0.0", 1)


def test_poison_of_a_block_that_was_freed_while_its_last_step_ran_is_none(
    history: History,
) -> None:
    history.deliver("r0.0", 6)
    history.schedule("r0.0", 5, 6)
    history.free("r0.0", [0, 1])  # decided while step 1 runs
    history.compute("r0.0", 5, [6], [0, 1])
    history.done()
    history.emit(BlocksPoisoned(2, 0, [0, 1]))
    assert history.findings() == []


def test_poison_of_a_block_that_a_later_step_is_to_write_is_none(history: History) -> None:
    history.allocate("r1.0", [2])  # decided ahead, for step 2
    history.events[-1] = replace(history.events[-1], step=2)
    history.emit(BlocksPoisoned(1, 0, [2]))
    assert history.findings() == []


@pytest.mark.parametrize("granted_in", [1, 3])
def test_poison_of_a_block_that_its_last_holder_gets_again_later_is_none(
    history: History, granted_in: int
) -> None:
    """The worker's table is the old one until the sequence runs again."""
    history.deliver("r0.0", 6)
    history.schedule("r0.0", 5, 6)
    history.free("r0.0", [0, 1])  # decided while step 1 runs
    history.compute("r0.0", 5, [6], [0, 1])
    history.allocate("r0.0", [2, 1])
    history.events[-1] = replace(history.events[-1], step=granted_in)
    history.done()
    history.emit(BlocksPoisoned(2, 0, [1]))
    assert (Code.KVSAN_SHARED_WRITE in history.codes()) == (granted_in < 2)


def test_unknown_rank_is_found(history: History) -> None:
    history.emit(Computed(1, 3, "r0.0", 5, [6], [5], 0, [0, 1], 6))
    assert history.codes() == [Code.KVSAN_RANKS_DISAGREE]


def test_leak_is_not_claimed_of_a_crashed_engine(history: History) -> None:
    history.emit(Finished(1, "r0", "length"))
    assert history.codes() == [Code.KVSAN_LEAK]
    history.emit(EngineError(1, "signal", "killed"))
    assert history.codes() == []


def test_without_the_schedulers_view_contents_are_judged_still() -> None:
    made = History(observed=frozenset({"Arrived", "Computed", "TokensDelivered"}))
    made.arrive("r0", [1, 2, 3, 4, 5])
    made.compute("r0.0", 0, [1, 2, 3, 4, 5], [0, 1])
    made.deliver("r0.0", 6)
    made.compute("r0.0", 5, [6], [0, 1], step=1)
    assert made.findings() == []
    made.emit(BlocksPoisoned(2, 0, [0]))
    made.deliver("r0.0", 7)
    made.compute("r0.0", 6, [7], [0, 1], step=2)
    assert made.codes() == [Code.KVSAN_STALE_READ]
