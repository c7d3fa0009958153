"""Random trials of speculation: drafts and everything that can disturb them, against peace without.

    python -m tests.engine.spec_trials --trials 10000
    python -m tests.engine.spec_trials --trials 300 --model tiny-llama

The trials are those of `state_trials` (any mix of sampling, penalties, grammars, stops, several
outputs; arrivals, aborts, resets, priorities, held blocks, forced preemptions, small pools). The
disturbed run drafts as well; the one in peace does not. Outputs must be equal in every bit.
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

_FIGURES = (
    "trials with a preemption",
    "trials with both",
    "num_preemptions",
    "num_drafted_tokens",
    "num_accepted_tokens",
    "num_rejected_tokens",
)


def draw_trial(seed: int, model: dict[str, Any] = EXACT) -> Trial:
    """A trial whose disturbed run drafts.

    Args:
        seed: of everything.
        model: the model and its options. The exact model's tokens are known beforehand, and can be
            drafted at any rate; others are drafted for by themselves, whole or truncated.
    """
    trial = random_trial(seed)
    source = random.Random(f"{seed}/drafts")
    drafts: dict[str, Any] = {
        "method": source.choice(("ngram", "scripted", "draft_model")),
        "num_speculative_tokens": source.choice((1, 2, 3, 5, 8)),
    }
    if drafts["method"] == "ngram":
        drafts["prompt_lookup_min"] = source.choice((1, 1, 2))
    elif model["model"] == EXACT["model"]:
        drafts["acceptance_rate"] = source.choice((0.0, 0.3, 0.7, 0.9, 1.0))
        drafts["seed"] = seed
    else:
        drafts["method"] = "draft_model"
        drafts["num_hidden_layers"] = source.choice((None, 1))
    if drafts["method"] == "draft_model":
        drafts["model"] = model["model"]
    options = trial.options | {
        "speculative_config": drafts,
        "debug_worker_state": True,
        "max_num_batched_tokens": source.choice((1, 3, 8, 64, 64)),
    }
    return dataclasses.replace(trial, options=options)


def compare(trial: Trial, model: dict[str, Any] = EXACT) -> tuple[list[str], Counter[str]]:
    """Run a trial twice; returns what differs, as text, and what the disturbed run counted."""
    peace, disturbed = run_in_peace(trial, model), run_disturbed(trial, model)
    problems = list(differences(trial, peace, disturbed))
    counts = disturbed.counters
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
    arguments = parser.parse_args()
    model = EXACT if arguments.model == "exact" else tiny_model(arguments.model)
    total: Counter[str] = Counter()
    num_failed = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.trials):
        problems, counts = compare(draw_trial(seed, model), model)
        total += counts
        total["trials with a preemption"] += counts["num_preemptions"] > 0
        total["trials with both"] += bool(
            counts["num_preemptions"] and counts["num_drafted_tokens"]
        )
        if problems:
            num_failed += 1
            print(f"seed {seed}:", *problems, sep="\n  ")
    figures = ", ".join(f"{name} {total[name]}" for name in _FIGURES)
    print(f"{arguments.trials} trials, {num_failed} with differences; {figures}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
