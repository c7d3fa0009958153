"""Random trials of asynchronous scheduling: steps decided ahead, against peace without.

    python -m tests.engine.async_trials --trials 10000
    python -m tests.engine.async_trials --trials 10000 --drafts
    python -m tests.engine.async_trials --trials 300 --model tiny-llama

The trials are those of `state_trials`, in order of arrival. The disturbed run decides one or two
steps ahead; requests are preempted, aborted, stopped and finished with outputs under way. Outputs
must be equal in every bit, each token delivered once. With `--drafts` the disturbed run drafts as
well.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections import Counter
from typing import Any

from tests.engine.state_trials import (
    EXACT,
    Trial,
    differences,
    random_trial,
    run_disturbed,
    run_in_peace,
    tiny_model,
)


def draw_trial(seed: int, *, num_ranks: int = 1) -> Trial:
    """A trial whose disturbed run decides steps ahead."""
    trial = random_trial(seed)
    source = random.Random(f"{seed}/async")
    options = trial.options | {
        "async_scheduling": source.choice((1, 2)),
        "scheduling_policy": "fcfs",
        "debug_worker_state": True,
        "tensor_parallel_size": num_ranks,
    }
    arrivals = [dataclasses.replace(arrival, priority=0) for arrival in trial.arrivals]
    return dataclasses.replace(trial, arrivals=arrivals, priorities={}, options=options)


def with_drafts(trial: Trial, seed: int, model: dict[str, Any] = EXACT) -> Trial:
    """The same trial; its disturbed run also drafts tokens, in steps that are decided ahead."""
    source = random.Random(f"{seed}/async drafts")
    known = model["model"] == EXACT["model"]  # its tokens can be drafted at any rate
    drafts: dict[str, Any] = {
        "method": source.choice(("ngram", "scripted")) if known else "ngram",
        "num_speculative_tokens": source.choice((1, 2, 3, 5, 8)),
    }
    if drafts["method"] == "scripted":
        drafts["acceptance_rate"] = source.choice((0.0, 0.3, 0.7, 0.9, 1.0))
        drafts["seed"] = seed
    else:
        drafts["prompt_lookup_min"] = source.choice((1, 1, 2))
    options = trial.options | {
        "speculative_config": drafts,
        "max_num_batched_tokens": source.choice((1, 3, 8, 64, 64)),
    }
    return dataclasses.replace(trial, options=options)


def compare(trial: Trial, model: dict[str, Any] = EXACT) -> tuple[list[str], Counter[str]]:
    """Run a trial twice; returns what differs, as text, and what the disturbed run counted."""
    ranks = {"tensor_parallel_size": trial.options["tensor_parallel_size"]}
    peace = run_in_peace(trial, model | ranks)
    disturbed = run_disturbed(trial, model)
    counts = disturbed.counters
    problems = list(differences(trial, peace, disturbed))
    judged = counts["num_accepted_tokens"] + counts["num_rejected_tokens"]
    if judged != counts["num_drafted_tokens"]:
        problems.append(f"{judged} drafts were judged, {counts['num_drafted_tokens']} computed")
    return problems, counts


def main() -> int:
    """Run many trials; prints the seed of each that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--model", default="exact", help="or a tiny model of the harness")
    parser.add_argument("--ranks", type=int, default=1, help="of the exact model")
    parser.add_argument("--drafts", action="store_true", help="speculation too")
    arguments = parser.parse_args()
    model = EXACT if arguments.model == "exact" else tiny_model(arguments.model)
    num_failed = num_preempted = 0
    total: Counter[str] = Counter()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.trials):
        trial = draw_trial(seed, num_ranks=arguments.ranks)
        if arguments.drafts:
            trial = with_drafts(trial, seed, model)
        problems, counts = compare(trial, model)
        total += counts
        num_preempted += counts["num_preemptions"] > 0
        if problems:
            num_failed += 1
            print(f"seed {seed}:", *problems, sep="\n  ")
    print(
        f"{arguments.trials} trials, {num_preempted} of them with preemptions "
        f"({total['num_preemptions']} in all), {num_failed} with differences; drafts: "
        f"{total['num_drafted_tokens']}, accepted {total['num_accepted_tokens']}"
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
