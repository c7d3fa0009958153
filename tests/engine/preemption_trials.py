"""Random trials of the exact engine: requests of every kind, tight pools, forced preemptions.

A trial is drawn from a `random.Random`, so that hypothesis can shrink it (`st.randoms`) and a
script can repeat it from a seed. `run_trial` steps the engine, asserts its integrity after every
step and compares what it gave with `exact_reference`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from preempt_engine import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from preempt_engine.observer import EngineObserver
from preempt_engine.step import SchedulerOutput
from tests.engine.exact_reference import VOCAB_SIZE, Expected, expected_outputs

Params = SamplingParams | BeamSearchParams
MAX_STEPS = 5000  # far beyond the few hundred that the largest trial takes


@dataclass
class Case:
    """A request: prompt, parameters, and before which step it arrives."""

    prompt: list[int]
    params: Params
    arrival_step: int = 0
    priority: int = 0
    abort_step: int | None = None


@dataclass
class Trial:
    """What to run.

    Attributes:
        forced: step -> (request, mode).
        held: step -> blocks to withhold.
        priorities: step -> (request, its new priority).
        resets: steps before which the cache is reset and what runs is preempted.
    """

    options: dict[str, Any]
    cases: list[Case]
    forced: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    priorities: dict[int, tuple[int, int]] = field(default_factory=dict)
    resets: set[int] = field(default_factory=set)


@dataclass
class Outcome:
    """Counts of what happened, by name."""

    counts: Counter[str] = field(default_factory=Counter)
    steps: int = 0


class CountingObserver(EngineObserver):
    """Counts preemptions by mode and by how many sequences the request had."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.counts: Counter[str] = Counter()

    def preempted(self, step_id: int, request_id: str, *, mode: str, **rest: Any) -> None:
        request = self.llm.scheduler.requests[request_id]
        branches = "several" if len(request.sequences) > 1 else "one"
        self.counts[f"{mode}, {branches} sequences"] += 1

    def forked(self, step_id: int, parent: Any, child: Any) -> None:
        self.counts["forks"] += 1

    def blocks_copied(self, step_id: int, pairs: Any) -> None:
        self.counts["copied blocks"] += len(pairs)


def blocks_alone(case: Case, block_size: int) -> int:
    """Blocks with which the request reaches `max_tokens` whatever its branches share."""
    shared = len(case.prompt) // block_size
    longest = len(case.prompt) + case.params.max_tokens - 1
    own = -(-longest // block_size) - shared
    return max(-(-len(case.prompt) // block_size), shared + case.params.num_sequences * own)


def draw_trial(rng: Random) -> Trial:
    """A trial in which every request can finish."""
    block_size = rng.choice([1, 2, 3, 4])
    base = [rng.randrange(1, VOCAB_SIZE) for _ in range(5 * block_size + 1)]
    cases = [draw_case(rng, base, block_size) for _ in range(rng.randint(1, 4))]
    needed = [blocks_alone(case, block_size) for case in cases]
    num_blocks = max(needed) + rng.choice([0, 0, 1, sum(needed) // 3])
    widest = max(case.params.num_sequences for case in cases)
    options = {
        "block_size": block_size,
        "num_kv_blocks": num_blocks,
        "max_num_batched_tokens": rng.choice([1, 2, 3, 7, 64]),
        "max_num_seqs": rng.choice([widest, widest + 2, 64]),
        "enable_prefix_caching": rng.random() < 0.5,
        "block_reuse_order": rng.choice(["fifo", "lifo", "random"]),
        "poison": rng.random() < 0.5,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "preemption_mode": rng.choice(["recompute", "swap", "swap"]),
        "swap_space_blocks": rng.choice([0, 1, num_blocks // 2, num_blocks, 3 * num_blocks]),
    }
    forced: dict[int, list[tuple[int, str]]] = {}
    for _ in range(rng.choice([0, 1, 2, 4, 8])):
        victim = rng.randrange(len(cases)), rng.choice(["recompute", "swap"])
        forced.setdefault(rng.randint(1, 20), []).append(victim)
    held = {}
    if rng.random() < 0.2:
        start = rng.randint(1, 15)
        held = {start: rng.randint(1, num_blocks), start + rng.randint(1, 6): 0}
    trial = Trial(options, cases, forced, held)
    if rng.random() < 0.2:
        trial.resets = {rng.randint(1, 20) for _ in range(2)}
    if rng.random() < 0.5:
        options["scheduling_policy"] = "priority"
        for case in cases:
            case.priority = rng.randrange(3)
        for _ in range(rng.choice([0, 0, 3])):
            trial.priorities[rng.randint(1, 20)] = rng.randrange(len(cases)), rng.randrange(3)
    return trial


def draw_case(rng: Random, base: list[int], block_size: int) -> Case:
    """A request; its prompt may share a beginning with others and ends near a block's end."""
    length = max(1, rng.randint(1, 4) * block_size + rng.choice([-1, 0, 0, 1]))
    num_shared = rng.choice([0, length, length - 1, block_size])
    prompt = base[:num_shared][:length]
    prompt += [rng.randrange(1, VOCAB_SIZE) for _ in range(length - len(prompt))]
    return Case(
        prompt=prompt,
        params=draw_params(rng),
        arrival_step=rng.choice([0, 0, 0, 2, 9]),
        abort_step=rng.randint(1, 25) if rng.random() < 0.15 else None,
    )


def draw_params(rng: Random) -> Params:
    """Greedy, sampled with one or several outputs, or a beam search."""
    max_tokens = rng.choice([1, 2, 5, 9, 13])
    stop_token_ids = tuple(rng.sample(range(1, VOCAB_SIZE), rng.choice([0, 0, 1, 3])))
    ignore_eos = rng.random() < 0.5
    if rng.random() < 0.35:
        return BeamSearchParams(
            beam_width=rng.choice([1, 2, 3, 4]),
            max_tokens=max_tokens,
            length_penalty=rng.choice([1.0, 0.0, 2.0, -1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
        )
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3, 4]),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        seed=rng.randrange(1000),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        logprobs=rng.choice([None, None, 0, 2]),
    )


def run_trial(trial: Trial, observer_type: type[CountingObserver] = CountingObserver) -> Outcome:
    """Run it and assert that nobody noticed the preemptions."""
    options = {"exact_vocab_size": VOCAB_SIZE, "debug_worker_state": True} | trial.options
    with LLM("exact", **options) as llm:
        observer = observer_type(llm)
        llm.set_observer(observer)
        outputs: dict[str, RequestOutput] = {}
        step = 0
        while step < 50 or llm.has_unfinished_requests():
            assert step < MAX_STEPS, "the engine makes no progress"
            _act(llm, trial, step, outputs)
            if llm.has_unfinished_requests():
                for output in step_watched(llm):
                    outputs[output.request_id] = output
                llm.scheduler.check_integrity()
            elif step > _last_action(trial):
                break
            step += 1
        assert_idle(llm)
        for index, case in enumerate(trial.cases):
            num_ranks = llm.config.tensor_parallel_size
            assert_as_expected(case, outputs[str(index)].outputs, num_ranks)
        counts = observer.counts
        counts["swapped blocks"] = llm.counters.num_swapped_out_blocks
        counts["trials with a preemption"] = bool(llm.counters.num_preemptions)
        counts["recomputed tokens"] = llm.counters.num_recomputed_tokens
        return Outcome(counts, step)


def step_watched(llm: LLM) -> list[RequestOutput]:
    """One step in its three phases, with a look at what the workers are told."""
    step = llm.schedule()
    if step is None:
        return []
    assert_copies_keep_apart(llm, step)
    return llm.update(step, llm.execute(step).result())


def assert_copies_keep_apart(llm: LLM, step: SchedulerOutput) -> None:
    """Nothing else in a step touches what it swaps: the copies may run at any time in it."""
    blocks = llm.scheduler.blocks
    written = {device for _, device in step.swap_in}
    written |= {target for _, target in step.block_copies}
    size = blocks.block_size
    for item in step.scheduled:
        table = llm.scheduler.requests[item.key.request_id].sequences[item.key.branch].block_table
        written |= set(table[item.start // size : -(-item.end // size)])
    sources = {device for device, _ in step.swap_out}
    host_ends = [host for _, host in step.swap_out] + [host for host, _ in step.swap_in]
    assert not written & sources
    assert len(set(host_ends)) == len(host_ends)
    assert all(blocks.ref_counts[block] or block in blocks.fenced_blocks for block in sources)


def _last_action(trial: Trial) -> int:
    return max([case.arrival_step for case in trial.cases] + list(trial.held))


def _act(llm: LLM, trial: Trial, step: int, outputs: dict[str, RequestOutput]) -> None:
    for index, case in enumerate(trial.cases):
        if case.arrival_step == step:
            llm.add_request(case.prompt, case.params, request_id=str(index), priority=case.priority)
        if case.abort_step == step and case.arrival_step < step:
            aborted = llm.abort_request(str(index))
            if aborted is not None:
                outputs[str(index)] = aborted
            llm.scheduler.check_integrity()
    for index, mode in trial.forced.get(step, ()):
        llm.preempt_request(str(index), mode)  # type: ignore[arg-type]
    if step in trial.priorities:
        index, priority = trial.priorities[step]
        llm.set_priority(str(index), priority)
    if step in trial.resets:
        llm.reset_prefix_cache(reset_running_requests=True)
        llm.scheduler.check_integrity()
    if step in trial.held:
        llm.hold_blocks(trial.held[step])


def assert_idle(llm: LLM) -> None:
    """Nothing is left in use, on the device or on the host."""
    llm.hold_blocks(0)
    counts = llm.scheduler.pool_counts()
    assert counts.used == counts.fenced == counts.held == 0
    host = llm.scheduler.swapper.host
    assert len(host.free_blocks) == host.num_blocks


def assert_as_expected(case: Case, outputs: list[CompletionOutput], num_ranks: int = 1) -> None:
    """Ids, log probabilities, reasons and scores; of what was aborted, its beginning."""
    expected = expected_outputs(case.prompt, case.params, num_ranks)
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        if got.finish_reason == "abort":
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            continue
        assert got.token_ids == want.token_ids
        assert got.finish_reason == want.finish_reason
        _assert_numbers(case.params, got, want)


def _assert_numbers(params: Params, got: CompletionOutput, want: Expected) -> None:
    if isinstance(params, SamplingParams):
        assert got.logprobs == want.logprobs  # the same function of the same row
        return
    # The reference takes its own logarithms and sums in its own order: about 100 roundings, each
    # of at most 2**-53, relative to sums of at most 64 * 6.
    assert got.score == pytest.approx(want.score, rel=1e-12, abs=1e-12)
    assert got.logprobs is not None
    assert want.logprobs is not None
    for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)
