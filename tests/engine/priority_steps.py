"""Random steps of the priority scheduler, with every rule checked at every step.

    python tests/engine/priority_steps.py --steps 20000

Rules: no victim precedes a survivor; no victim of a step is scheduled in it; a step's tokens stay
within the budget; an eviction for a more urgent request lets a more urgent one in, in this very
step unless blocks are copied to the host in it; and every request ends within the bound that
`scheduler.py` states.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from preempt_engine import LLM, SamplingParams
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SequenceKey

BUDGET = 11
Precedence = tuple[int, int]


@dataclass
class Stay:
    """One request, from arrival to end.

    Attributes:
        num_tokens: prompt tokens + n * `max_tokens`.
        num_steps: steps since its arrival.
        predecessors: tokens of each request that preceded it at any time, itself included.
        num_interruptions: arrivals before it, changes of priority and cache resets.
    """

    num_tokens: int
    num_steps: int = 0
    predecessors: dict[str, int] = field(default_factory=dict)
    num_interruptions: int = 0

    @property
    def bound(self) -> int:
        """Most steps it may take."""
        longest = max(self.predecessors.values())
        return sum(self.predecessors.values()) + self.num_interruptions * longest


class StepWatcher(EngineObserver):
    """What one step did."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.forget()

    def forget(self) -> None:
        """A new step begins."""
        self.is_copying = False
        self.victims: dict[str, tuple[str, Precedence]] = {}
        self.admitted: set[str] = set()
        self.scheduled_tokens: dict[str, int] = {}

    def preempted(
        self,
        step_id: int,
        request_id: str,
        *,
        mode: str,
        phase: str,
        reason: str,
        num_computed_tokens: int,
        num_tokens: int,
    ) -> None:
        assert request_id not in self.scheduled_tokens, f"{request_id} is scheduled and a victim"
        precedence = self.llm.scheduler.requests[request_id].precedence
        self.victims[request_id] = (reason, precedence)

    def blocks_allocated(
        self, step_id: int, key: SequenceKey, block_ids: Sequence[int], num_cached: int
    ) -> None:
        self.admitted.add(key.request_id)

    def swapped_out(self, step_id: int, request_id: str, pairs: Sequence[tuple[int, int]]) -> None:
        self.is_copying = True

    def scheduled(self, step_id: int, key: SequenceKey, start: int, end: int) -> None:
        assert key.request_id not in self.victims, f"{key} is a victim and scheduled"
        self.scheduled_tokens[key.request_id] = (
            self.scheduled_tokens.get(key.request_id, 0) + end - start
        )

    def check(self, survivors: dict[str, Precedence]) -> None:
        """Judge the step; `survivors` run after it was scheduled."""
        assert sum(self.scheduled_tokens.values()) <= BUDGET
        urgent = [precedence for reason, precedence in self.victims.values() if reason != "forced"]
        for precedence in urgent:
            assert all(survivor < precedence for survivor in survivors.values()), (
                f"a victim {precedence} precedes one of {survivors}"
            )
        for reason, precedence in self.victims.values():
            if reason == "priority" and not self.is_copying:
                newcomers = [survivors[name] for name in self.admitted & survivors.keys()]
                assert any(newcomer[0] < precedence[0] for newcomer in newcomers), "in vain"


class Simulation:
    """An engine under random arrivals, aborts, resets and changes of priority.

    Args:
        seed: of everything.

    Attributes:
        num_steps, num_finished, num_victims, num_evictions: totals; evictions are for a more
            urgent request.
        tightest: largest share of its bound that a request took.
        swaps: whether victims are swapped out.
    """

    def __init__(self, seed: int, *, swaps: bool = False) -> None:
        self.source = random.Random(seed)
        block_size = self.source.choice((1, 2, 4))
        num_blocks = -(-48 // block_size) + self.source.randrange(6)
        self.llm = LLM(
            "exact",
            num_kv_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=self.source.choice((3, 6)),
            preemption_mode="swap" if swaps else "recompute",
            swap_space_blocks=self.source.choice((num_blocks, num_blocks // 3)) if swaps else 0,
            debug_worker_state=True,
            enable_prefix_caching=self.source.random() < 0.5,
            watermark=self.source.choice((0.0, 0.1)),
            scheduling_policy="priority",
            skip_tokenizer_init=True,
        )
        self.swaps = swaps
        self.watcher = StepWatcher(self.llm)
        self.llm.set_observer(self.watcher)
        self.stays: dict[str, Stay] = {}
        self.num_steps = self.num_finished = self.num_victims = self.num_evictions = 0
        self.tightest = 0.0
        self._num_arrived = 0

    def run(self, num_steps: int) -> None:
        """Random steps, and then until everything has ended."""
        for _ in range(num_steps):
            self._interfere()
            self._step()
        while self.llm.has_unfinished_requests():
            self._step()
        assert not self.stays

    def _interfere(self) -> None:
        source = self.source
        self.watcher.forget()
        while source.random() < 0.25 and len(self.stays) < 12:
            self._arrive()
        if not self.stays:
            return
        name = source.choice(list(self.stays))
        chance = source.random()
        if chance < 0.02:
            self.llm.abort_request(name)
            del self.stays[name]
        elif chance < 0.03:
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self._interrupt(self.stays)
        elif chance < 0.06:
            self.llm.set_priority(name, source.randrange(4))
            self._interrupt(self.stays)
            self._note_predecessors()

    def _arrive(self) -> None:
        name = f"q{self._num_arrived}"
        self._num_arrived += 1
        length, max_tokens = self.source.randint(1, 30), self.source.randint(0, 18)
        num_branches = self.source.choice((1, 1, 1, 2, 3))
        self.llm.add_request(
            [1 + self.source.randrange(2) for _ in range(length)],
            SamplingParams(n=num_branches, temperature=0.5, max_tokens=max_tokens, ignore_eos=True),
            request_id=name,
            priority=self.source.choice((0, 1, 1, 1, 2, 3)),
        )
        precedence = self._precedence(name)
        self._interrupt(other for other in self.stays if precedence < self._precedence(other))
        self.stays[name] = Stay(num_tokens=length + num_branches * max_tokens)
        self._note_predecessors()

    def _precedence(self, name: str) -> Precedence:
        return self.llm.scheduler.requests[name].precedence

    def _interrupt(self, names: Iterable[str]) -> None:
        for name in list(names):
            self.stays[name].num_interruptions += 1

    def _note_predecessors(self) -> None:
        order = sorted(self.stays, key=self._precedence)
        for index, name in enumerate(order):
            for other in order[: index + 1]:
                self.stays[name].predecessors[other] = self.stays[other].num_tokens

    def _step(self) -> None:
        llm, watcher = self.llm, self.watcher
        watcher.forget()
        step = llm.schedule()
        running = {request.request_id: request.precedence for request in llm.scheduler.running}
        watcher.check(running)
        self.num_victims += len(watcher.victims)
        self.num_evictions += sum(reason == "priority" for reason, _ in watcher.victims.values())
        outputs = [] if step is None else llm.update(step, llm.execute(step).result())
        llm.scheduler.check_integrity()
        self.num_steps += 1
        for stay in self.stays.values():
            stay.num_steps += 1
        for output in outputs:
            if output.finished:
                stay = self.stays.pop(output.request_id)
                assert output.error is None
                bound = stay.bound * (2 if self.swaps else 1)
                assert stay.num_steps <= bound, f"{stay} of {output.request_id}"
                self.tightest = max(self.tightest, stay.num_steps / bound)
                self.num_finished += 1


def main() -> int:
    """Simulations of 500 steps until there are as many as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args()
    done: list[Simulation] = []
    while sum(simulation.num_steps for simulation in done) < arguments.steps:
        simulation = Simulation(seed=len(done), swaps=len(done) % 2 == 1)
        simulation.run(500)
        done.append(simulation)
    print(
        f"{sum(item.num_steps for item in done)} steps, "
        f"{sum(item.num_finished for item in done)} requests finished, "
        f"{sum(item.num_victims for item in done)} victims "
        f"({sum(item.num_evictions for item in done)} for a more urgent request); "
        f"longest stay: {max(item.tightest for item in done):.0%} of its bound"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
