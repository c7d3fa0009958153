"""Random trials of everything a request carries: one run in peace, one under preemption.

    python tests/engine/state_trials.py --trials 10000
    python tests/engine/state_trials.py --trials 300 --model tiny-llama

A trial is drawn from a seed: requests with any mix of features, arrivals, aborts, cache resets,
changes of priority, withheld blocks, forced preemptions, a pool that is too small. `compare` runs
it twice and lists what differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preempt_engine import (
    LLM,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from preempt_engine.observer import EngineObserver, PoolView
from preempt_engine.sequence import Request
from preempt_engine.step import SequenceKey

VOCAB_SIZE = 128  # has braces and quotes, for JSON
EOS_TEXT = "!"
MAX_STEPS = 20_000

FEATURES = (
    "sampling",
    "penalties",
    "min_tokens",
    "stop",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "bad_words",
    "processor",
    "function",
    "grammar",
)
_PROMPT_IDS = range(1, 12)
_REGEXES = ("[a-f]{3,12}x", "(ab|cd){2,9}", "[0-9]{4,14}")
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}


class ChecksumLane:
    """Allows half of the vocabulary, by a checksum of all tokens in order."""

    def __init__(self) -> None:
        self.checksum = 1

    def reset(self, prompt_token_ids: Sequence[int]) -> None:
        self.checksum = 1
        for token_id in prompt_token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        self.checksum = (self.checksum * 31 + token_id + 1) % 65_521

    def process(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        scores[self.checksum % 2 :: 2] = -np.inf
        return scores


def discourage_recent(output_token_ids: list[int], scores: Any) -> Any:
    """A function of the output: the last three tokens become unlikely, the latest most."""
    for distance, token_id in enumerate(reversed(output_token_ids[-3:])):
        scores[token_id] -= 4.0 - distance
    return scores


@dataclass(frozen=True)
class Arrival:
    """One request of a trial."""

    step: int
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int


@dataclass(frozen=True)
class Trial:
    """What to run; the disturbances apply to the second run alone."""

    arrivals: list[Arrival]
    seed: int
    options: dict[str, Any]
    preempt_rate: float
    aborts: dict[int, list[str]] = field(default_factory=dict)
    resets: dict[int, bool] = field(default_factory=dict)
    holds: dict[int, int] = field(default_factory=dict)
    priorities: dict[int, tuple[str, int]] = field(default_factory=dict)


def random_trial(seed: int, features: Iterable[str] = FEATURES) -> Trial:
    """Draw a trial; each has a random half of the features."""
    source = random.Random(seed)
    chosen = [feature for feature in features if source.random() < 0.5]
    by_priority = source.random() < 0.5
    block_size = source.choice((1, 2, 3, 4, 8))
    prefix = source.choices(_PROMPT_IDS, k=3 * block_size)
    arrivals = [
        _random_arrival(source, chosen, prefix, block_size, by_priority)
        for _ in range(source.randint(1, 5))
    ]
    arrivals.sort(key=lambda arrival: arrival.step)
    num_blocks = max(
        item.params.n * -(-(len(item.prompt_token_ids) + item.params.max_tokens) // block_size)
        for item in arrivals
    )
    num_blocks += source.randint(0, 4)
    names = [str(index) for index in range(len(arrivals))]
    steps = range(1, 40)
    return Trial(
        arrivals=arrivals,
        seed=seed,
        options={
            "num_kv_blocks": num_blocks,
            "block_size": block_size,
            "max_num_batched_tokens": source.choice((1, 3, 8, 64)),
            "max_num_seqs": max(item.params.n for item in arrivals) + source.choice((0, 1, 7)),
            "preemption_mode": source.choice(("recompute", "swap")),
            "swap_space_blocks": source.choice((0, num_blocks // 2, 2 * num_blocks)),
            "enable_prefix_caching": source.random() < 0.7,
            "block_reuse_order": source.choice(("fifo", "lifo", "random")),
            "watermark": source.choice((0.0, 0.1)),
            "scheduling_policy": "priority" if by_priority else "fcfs",
            "poison": source.random() < 0.5,
        },
        preempt_rate=source.choice((0.0, 0.05, 0.3)),
        aborts={source.choice(steps): [source.choice(names)]} if source.random() < 0.2 else {},
        resets={source.choice(steps): source.random() < 0.5} if source.random() < 0.3 else {},
        holds={source.choice(steps): source.randint(1, num_blocks)}
        if source.random() < 0.3
        else {},
        priorities={
            source.choice(steps): (source.choice(names), source.randrange(3))
            for _ in range(source.randint(0, 3) if by_priority else 0)
        },
    )


def _random_arrival(
    source: random.Random,
    features: list[str],
    prefix: list[int],
    block_size: int,
    by_priority: bool,
) -> Arrival:
    # At, before and behind a block boundary, and anywhere.
    length = max(1, source.randint(1, 5) * block_size + source.choice((-1, 0, 1, 0)))
    shared = source.choice((0, 0, block_size, 2 * block_size, 3 * block_size))
    prompt = (prefix[:shared] + source.choices(_PROMPT_IDS, k=length))[: max(1, length)]
    return Arrival(
        step=source.choice((0, 0, 0, source.randrange(12))),
        prompt_token_ids=prompt,
        params=_random_params(source, features),
        priority=source.randrange(3) if by_priority else 0,
    )


def _random_params(source: random.Random, features: list[str]) -> SamplingParams:
    options: dict[str, Any] = {
        "temperature": 0.0,
        "ignore_eos": source.random() < 0.7,
        "max_tokens": source.choice((0, 1, 2, 5, 9, 17)),
        "n": source.choice((1, 1, 2, 3)),
    }
    for feature in features:
        if source.random() < 0.6:
            options.update(_feature_options(feature, source, options["max_tokens"]))
    return SamplingParams(**options)


def _feature_options(feature: str, source: random.Random, max_tokens: int) -> dict[str, Any]:
    match feature:
        case "sampling":
            seed = source.choice((None, source.randrange(1000)))
            return {"temperature": source.choice((0.5, 1.5)), "seed": seed, "top_p": 0.95}
        case "penalties":
            return {
                "repetition_penalty": source.choice((1.0, 1.3, 0.8)),
                "presence_penalty": source.choice((0.0, 0.7)),
                "frequency_penalty": source.choice((0.4, -0.3)),
            }
        case "min_tokens":
            ids = tuple(range(0, VOCAB_SIZE, 3))
            return {"min_tokens": source.randint(0, max_tokens), "stop_token_ids": ids}
        case "stop":
            return {"stop": [chr(33 + source.randrange(1, 90)) for _ in range(6)] + ["ab"]}
        case "logprobs":
            return {"logprobs": source.randrange(3)}
        case "prompt_logprobs":
            return {"prompt_logprobs": source.randrange(3)}
        case "logit_bias":
            return {"logit_bias": {source.randrange(VOCAB_SIZE): 3.0, 5: -100.0, 7: -np.inf}}
        case "bad_words":
            return {"bad_words": [chr(34 + source.randrange(80)) for _ in range(9)] + ["ab"]}
        case "processor":
            return {"logits_processors": [ChecksumLane()]}
        case "function":
            return {"logits_processors": [discourage_recent]}
    regex = source.choice((*_REGEXES, None))
    structured = StructuredOutputsParams(regex=regex, json=None if regex else _SCHEMA)
    return {"structured_outputs": structured, "ignore_eos": False}


class Watcher(EngineObserver):
    """What the user would have seen arrive, and which hits the first admission had."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids: dict[SequenceKey, list[int]] = {}
        self.text: dict[SequenceKey, str] = {}
        self.num_first_hits: dict[str, int] = {}

    def tokens_delivered(
        self,
        step_id: int,
        key: SequenceKey,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, float]] | None,
        text: str,
    ) -> None:
        self.token_ids.setdefault(key, []).extend(token_ids)
        self.text[key] = self.text.get(key, "") + text

    def blocks_allocated(
        self, step_id: int, key: SequenceKey, block_ids: Sequence[int], num_cached: int
    ) -> None:
        self.num_first_hits.setdefault(key.request_id, num_cached * self.block_size)

    def step_updated(self, step_id: int, view: PoolView) -> None:
        counts = view.pool_counts()
        parts = counts.free + counts.cached + counts.held + counts.fenced + counts.used
        assert parts == counts.num_blocks


class RandomPreemptions:
    """Forces preemptions at random, up to a number, so that a run ends."""

    def __init__(self, seed: int, rate: float, max_count: int = 40) -> None:
        self.source = random.Random(seed)
        self.rate = rate
        self.remaining = max_count

    def select_victims(self, step_id: int, running: Sequence[Request]) -> Iterable[str]:
        for request in running:
            if self.remaining and self.source.random() < self.rate:
                self.remaining -= 1
                yield request.request_id


@dataclass
class Run:
    """What a run gave."""

    outputs: dict[str, RequestOutput]
    watcher: Watcher
    counters: Counter[str]
    num_steps: int

    @property
    def num_preemptions(self) -> int:
        return self.counters["num_preemptions"]


EXACT = {"model": "exact", "exact_vocab_size": VOCAB_SIZE}


def run_in_peace(trial: Trial, model: dict[str, Any] = EXACT) -> Run:
    """Room for all, whole prompts in one step, nothing disturbed."""
    options = {"num_kv_blocks": 128, "block_size": 16, "max_num_batched_tokens": 2048}
    return _run(trial, {**model, **options}, disturbed=False)


def run_disturbed(trial: Trial, model: dict[str, Any] = EXACT) -> Run:
    """With everything that the trial has in store."""
    return _run(trial, {**model, **trial.options}, disturbed=True)


def _run(trial: Trial, options: dict[str, Any], *, disturbed: bool) -> Run:
    watcher = Watcher(options["block_size"])
    controller = RandomPreemptions(trial.seed, trial.preempt_rate if disturbed else 0.0)
    llm = LLM(preemption_controller=controller, observer=watcher, **options)
    outputs: dict[str, RequestOutput] = {}
    pending = list(enumerate(trial.arrivals))
    step = 0
    while pending or llm.has_unfinished_requests():
        assert step < MAX_STEPS, "the run does not end"
        while pending and pending[0][1].step <= step:
            index, arrival = pending.pop(0)
            priority = arrival.priority if disturbed else 0
            llm.add_request(
                arrival.prompt_token_ids, arrival.params, request_id=str(index), priority=priority
            )
        if disturbed:
            _disturb(trial, llm, step, outputs)
        for output in llm.step():
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()
        step += 1
    llm.hold_blocks(0)
    llm.close()
    counts = llm.scheduler.pool_counts()
    assert counts.free + counts.cached == counts.num_blocks, "blocks leaked"
    return Run(outputs, watcher, Counter(asdict(llm.counters)), step)


def _disturb(trial: Trial, llm: LLM, step: int, outputs: dict[str, RequestOutput]) -> None:
    for name in trial.aborts.get(step, ()):
        output = llm.abort_request(name)
        if output is not None:
            outputs[name] = output
    if step in trial.resets:
        llm.reset_prefix_cache(reset_running_requests=trial.resets[step])
    if step in trial.priorities:
        llm.set_priority(*trial.priorities[step])
    if step in trial.holds:
        llm.hold_blocks(trial.holds[step])
    elif step - 5 in trial.holds:
        llm.hold_blocks(0)


def compare(trial: Trial, model: dict[str, Any] = EXACT) -> tuple[list[str], int]:
    """Run a trial twice; returns what differs, as text, and the number of preemptions.

    Args:
        trial: what to run.
        model: the model and its options; bitwise equal logits are needed.
    """
    peace, disturbed = run_in_peace(trial, model), run_disturbed(trial, model)
    return list(differences(trial, peace, disturbed)), disturbed.num_preemptions


def differences(trial: Trial, peace: Run, disturbed: Run) -> Iterable[str]:
    """What a user would see differ between two runs of a trial, as text."""
    for name, output in disturbed.outputs.items():
        yield from _differences(name, output, peace.outputs[name])
        yield from _delivery_problems(name, output, disturbed.watcher)
    aborted = {name for names in trial.aborts.values() for name in names}
    if disturbed.outputs.keys() | aborted != peace.outputs.keys() | aborted:
        yield "requests have no output"


def _differences(name: str, output: RequestOutput, expected: RequestOutput) -> Iterable[str]:
    for mine, other in zip(output.outputs, expected.outputs, strict=True):
        yield from _branch_differences(f"request {name}.{mine.index}", mine, other)
    was_aborted = any(branch.finish_reason == "abort" for branch in output.outputs)
    known, wanted = output.prompt_logprobs, expected.prompt_logprobs
    if was_aborted:
        wanted = known and wanted and wanted[: len(known)]
    if known != wanted:
        yield f"request {name}: prompt_logprobs is {known}, undisturbed {wanted}"
    if str(output.error) != str(expected.error) and not was_aborted:
        yield f"request {name}: error is {output.error}, undisturbed {expected.error}"


def _branch_differences(
    name: str, mine: CompletionOutput, other: CompletionOutput
) -> Iterable[str]:
    cut = len(mine.token_ids) if mine.finish_reason == "abort" else None
    pairs: list[tuple[str, Any, Any]] = [
        ("token_ids", mine.token_ids, other.token_ids[:cut]),
        ("logprobs", mine.logprobs, other.logprobs and other.logprobs[:cut]),
    ]
    if cut is None:
        pairs += [
            ("text", mine.text, other.text),
            ("finish_reason", mine.finish_reason, other.finish_reason),
            ("stop_reason", mine.stop_reason, other.stop_reason),
            ("cumulative_logprob", mine.cumulative_logprob, other.cumulative_logprob),
        ]
    for what, got, wanted in pairs:
        if got != wanted:
            yield f"{name}: {what} is {got}, undisturbed {wanted}"


def _delivery_problems(name: str, output: RequestOutput, watcher: Watcher) -> Iterable[str]:
    for branch in output.outputs:
        key = SequenceKey(name, branch.index)
        if watcher.token_ids.get(key, []) != branch.token_ids:
            yield f"{key}: {watcher.token_ids.get(key)} were delivered"
        if watcher.text.get(key, "") != branch.text:
            yield f"{key}: the text {watcher.text.get(key)!r} was delivered"
        if branch.logprobs is not None and len(branch.logprobs) != len(branch.token_ids):
            yield f"{key}: {len(branch.logprobs)} log probabilities"
    if output.num_cached_tokens != watcher.num_first_hits.get(name, 0):
        yield f"request {name}: num_cached_tokens is {output.num_cached_tokens}"


def tiny_model(name: str) -> dict[str, Any]:
    """A checkpoint with random weights, and options for bitwise equal logits."""
    from preempt_harness.checkpoints import resolve_model_name

    return {"model": str(resolve_model_name(name)), "deterministic": True, "device": "cpu"}


def main() -> int:
    """Run many trials; prints the seed of each that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--model", default="exact", help="or a tiny model of the harness")
    arguments = parser.parse_args()
    model = EXACT if arguments.model == "exact" else tiny_model(arguments.model)
    num_failed = num_preempted = num_preemptions = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.trials):
        problems, count = compare(random_trial(seed), model)
        num_preempted += count > 0
        num_preemptions += count
        if problems:
            num_failed += 1
            print(f"seed {seed}:", *problems, sep="\n  ")
    print(
        f"{arguments.trials} trials, {num_preempted} of them with preemptions "
        f"({num_preemptions} in all), {num_failed} with differences"
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
