"""Swap, several outputs and beam search under preemption: drawn trials, counted.

    python -m benchmarks.branch_trials exact [--trials 10000] [--seed 0]
    python -m benchmarks.branch_trials tiny-llama tiny-qwen3 tiny-opt [--trials 120] [--seed 0]

The exact model's outputs are compared with the closed form and a naive beam search. A real model
runs every workload twice on one deterministic engine: with room, and with so many blocks held that
requests preempt each other, and some forced on top; ids, log probabilities and text must be equal
in every bit. Integrity is asserted after every step. Exits 1 at the first difference, naming the
seed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from random import Random

from benchmarks.measure import machine, print_table
from preempt_engine import LLM, CompletionOutput, RequestOutput
from preempt_engine.config import PreemptionMode
from preempt_harness.checkpoints import resolve_model_name
from tests.engine.preemption_trials import (
    Case,
    CountingObserver,
    blocks_alone,
    draw_case,
    draw_trial,
    run_trial,
    step_watched,
)

_NUM_BLOCKS = 512
_BLOCK_SIZE = 4
_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")


def exact_trial(rng: Random) -> Counter[str]:
    """One trial of the exact model."""
    return run_trial(draw_trial(rng)).counts


def model_trial(llm: LLM, observer: CountingObserver, rng: Random) -> Counter[str]:
    """One workload with room and without, on the same engine."""
    base = [rng.randrange(1, 64) for _ in range(5 * _BLOCK_SIZE)]
    cases = [draw_case(rng, base, _BLOCK_SIZE) for _ in range(rng.randint(1, 4))]
    room = run(llm, cases)
    observer.counts = Counter()
    needed = [blocks_alone(case, _BLOCK_SIZE) for case in cases]
    llm.hold_blocks(_NUM_BLOCKS - max(needed) - rng.choice([0, 0, 1, 3]))
    forced = {rng.randint(1, 15): rng.choice(_MODES) for _ in range(rng.randint(0, 4))}
    tight = run(llm, cases, forced, rng)
    llm.hold_blocks(0)
    llm.reset_prefix_cache()
    for case, with_room, without in zip(cases, room, tight, strict=True):
        seen = [comparable(branch) for branch in without.outputs]
        assert seen == [comparable(branch) for branch in with_room.outputs], case
    counts = observer.counts
    counts["trials with a preemption"] = any(output.num_preemptions for output in tight)
    return counts


def run(
    llm: LLM,
    cases: list[Case],
    forced: dict[int, PreemptionMode] | None = None,
    rng: Random | None = None,
) -> list[RequestOutput]:
    """All requests at once; before some steps one of them is preempted."""
    names = [llm.add_request(case.prompt, case.params) for case in cases]
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while llm.has_unfinished_requests():
        if forced and rng and step in forced:
            llm.preempt_request(rng.choice(names), forced[step])
        for output in step_watched(llm):
            outputs[output.request_id] = output
        llm.scheduler.check_integrity()
        step += 1
    return [outputs[name] for name in names]


def comparable(branch: CompletionOutput) -> tuple[object, ...]:
    """Everything that a user sees of a branch."""
    return (
        branch.token_ids,
        branch.text,
        branch.logprobs,
        branch.cumulative_logprob,
        branch.score,
        branch.finish_reason,
        branch.stop_reason,
    )


def campaign(model: str, trials: int, first_seed: int) -> bool:
    """Run and print; returns whether all outputs were equal."""
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    llm = observer = None
    if model != "exact":
        llm = LLM(
            str(resolve_model_name(model)),
            num_kv_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_num_batched_tokens=64,
            deterministic=True,
            poison=True,
            preemption_mode="swap",
            swap_space_blocks=40,
        )
        observer = CountingObserver(llm)
        llm.set_observer(observer)
    for seed in range(first_seed, first_seed + trials):
        try:
            if llm is None or observer is None:
                counts += exact_trial(Random(seed))
            else:
                counts += model_trial(llm, observer, Random(seed))
        except Exception:
            traceback.print_exc()
            print(f"{model}: the trial of seed {seed} failed", file=sys.stderr)
            return False
    rows = [[name, str(count)] for name, count in sorted(counts.items())]
    seconds = f"{time.perf_counter() - start:.0f}"
    print_table(["count", "value"], [["trials", str(trials)], ["seconds", seconds], *rows])
    return True


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", help='"exact", or a model that the harness knows')
    parser.add_argument("--trials", type=int, default=1000, help="of each model")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    arguments = parser.parse_args()
    print(machine())
    for model in arguments.models:
        print(f"\n{model}")
        if not campaign(model, arguments.trials, arguments.seed):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
