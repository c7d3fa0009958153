"""Campaigns on other people's schedulers: drawn trials, every check, outputs against a closed form.

    python -m benchmarks.scheduler_campaign vllm-scheduler --trials 20000
    python -m benchmarks.scheduler_campaign nano-vllm-scheduler --trials 300 --clean
    python -m benchmarks.scheduler_campaign vllm-scheduler --first SEED --trials 1 --verbose

Run it where the engine is installed; everything runs in one process. The same seed gives the same
trial. `--clean` gives each trial room and no plan: whatever is found then is a false alarm, or a
fault that needs no preemption. Steps per second are of the recorded trial, and with all checks.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from preempt_engine.exact import EOS_TOKEN_ID, reference_generate
from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.adapters.registry import AdapterRegistry
from preempt_harness.budget import KVBudget
from preempt_harness.checks import run_checks
from preempt_harness.explore.random_settings import random_settings
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.record import Preempted, StepLaunched, TrialRecord
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec

_SHOWN_SEEDS = 5
_AIMED = 0.5  # share of trials that aim at several things at once, as searches do


def drawn_settings(source: random.Random, adapter: EngineAdapter) -> dict[str, Any]:
    """Half of the trials with a step decided ahead and a third with drafts, where there are any."""
    settings: dict[str, Any] = {}
    if protocol.ASYNC_SCHEDULING in adapter.capabilities:
        settings["async_scheduling"] = int(source.random() < 0.5)
    if protocol.SPECULATION in adapter.capabilities and source.random() < 0.35:
        settings["speculative_config"] = {
            "method": "scripted",
            "num_speculative_tokens": source.randint(1, 4),
            "acceptance_rate": source.choice((0.0, 0.5, 0.9, 1.0)),
        }
    return settings


def drawn_trial(seed: int, adapter: EngineAdapter, *, clean: bool) -> Trial:
    """The trial of a seed."""
    source = random.Random(f"{seed}/scheduler campaign")
    settings = random_settings(source, adapter, "exact")
    drawn = drawn_settings(source, adapter)
    settings = msgspec.structs.replace(
        settings, **drawn, enable_prefix_caching=source.random() < 0.6
    )
    if source.random() < _AIMED:
        trial = _aimed(seed, adapter)
    else:
        trial = random_trial(
            seed,
            adapter,
            model="exact",
            max_requests=6,
            max_tokens=24,
            settings=_with_least_budget(settings),
        )
    return _with_room(trial, adapter) if clean else trial


def _aimed(seed: int, adapter: EngineAdapter) -> Trial:
    """A trial whose settings are drawn, and aimed, with it."""
    trial = random_trial(seed, adapter, model="exact", max_requests=6, max_tokens=24)
    return msgspec.structs.replace(trial, settings=_with_least_budget(trial.settings))


def _with_least_budget(settings: EngineSettings) -> EngineSettings:
    """The settings with a token budget that every engine can work with."""
    drafts = (settings.speculative_config or {}).get("num_speculative_tokens", 0)
    # Below, vLLM 0.33 waits for ever for a step that holds a token and its drafts.
    budget = max(settings.max_num_batched_tokens, 1 + drafts)
    return msgspec.structs.replace(
        settings,
        max_num_batched_tokens=budget,
        max_num_seqs=min(settings.max_num_seqs, budget),  # every engine decodes one token each
    )


def _with_room(trial: Trial, adapter: EngineAdapter) -> Trial:
    """The same requests with room for all, no plan, and no operation that preempts."""
    operations = [
        operation
        for operation in trial.workload.operations
        if operation.kind != "reset_running_requests"
    ]
    workload = msgspec.structs.replace(trial.workload, operations=operations)
    room = KVBudget.roomy(workload, adapter.admission_model(trial.settings)).num_blocks
    settings = msgspec.structs.replace(trial.settings, num_blocks=room)
    return Trial(engine=trial.engine, settings=settings, workload=workload)


def features(settings: EngineSettings, trial: Trial) -> Iterator[str]:
    """What a trial exercises, by name."""
    kinds = {operation.kind for operation in trial.workload.operations}
    if settings.async_scheduling:
        yield "asynchronous"
    if settings.speculative_config is not None:
        yield "drafts"
    if settings.scheduling_policy == "priority":
        yield "priority"
    if kinds & {"reset_prefix_cache", "reset_running_requests"}:
        yield "reset"
    if "abort" in kinds or "abort:" in trial.plan:
        yield "abort"
    if settings.enable_prefix_caching:
        yield "prefix caching"
    if settings.tensor_parallel_size > 1:
        yield "two ranks"


def wrong_outputs(trial: Trial, record: TrialRecord) -> Iterator[str]:
    """Requests whose output is not the closed form of their prompt."""
    for request in trial.workload.requests:
        result = record.results.get(request.id)
        if result is None or result.error or not result.outputs:
            continue
        expected = _closed_form(request, record)
        output = result.outputs[0]
        if output.finish_reason in ("abort", None):
            expected = expected[: len(output.token_ids)]
        if output.token_ids != expected:
            yield f"{request.id}: {output.token_ids} where {expected} is right"


def _closed_form(request: RequestSpec, record: TrialRecord) -> list[int]:
    header = record.header
    limit = request.sampling.max_tokens
    if header.max_total_tokens is not None:
        limit = min(limit, header.max_total_tokens - request.num_prompt_tokens)
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops.add(EOS_TOKEN_ID)
    return reference_generate(
        request.prompt_token_ids,
        limit,
        header.vocab_size,
        num_ranks=header.num_ranks,
        stop_token_ids=stops,
    )


def campaign(
    adapter: EngineAdapter, trials: int, first: int, *, clean: bool, verbose: bool
) -> Counter[str]:
    """Run the trials of seeds [first, first + trials) and count."""
    counts: Counter[str] = Counter()
    seconds = {"recorded": 0.0, "checked": 0.0}
    for seed in range(first, first + trials):
        trial = drawn_trial(seed, adapter, clean=clean)
        if verbose:
            print(trial, flush=True)
        started = time.process_time()
        record = run_trial(trial, adapter)
        recorded = time.process_time()
        findings = [str(finding) for finding in run_checks(record).findings]
        seconds["recorded"] += recorded - started
        seconds["checked"] += time.process_time() - started
        findings += [f"OUTPUT: {what}" for what in wrong_outputs(trial, record)]
        counts["trials"] += 1
        counts["preemptions"] += sum(isinstance(event, Preempted) for event in record.events)
        counts["steps"] += sum(isinstance(event, StepLaunched) for event in record.events)
        for name in features(trial.settings, trial):
            counts[f"trials with {name}"] += 1
        for code in dict.fromkeys(text.partition(":")[0] for text in findings):
            counts[f"finding {code}"] += 1
            if counts[f"finding {code}"] <= _SHOWN_SEEDS or verbose:
                shown = next(text for text in findings if text.startswith(f"{code}:"))
                print(f"seed {seed}: {shown[:400]}", flush=True)
    for name, spent in seconds.items():
        if spent:
            counts[f"steps per CPU second, {name}"] = round(counts["steps"] / spent)
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", help="name of an adapter")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--clean", action="store_true", help="room for all, no plan")
    parser.add_argument("--verbose", action="store_true", help="print every trial and finding")
    given = parser.parse_args(arguments)
    adapter = AdapterRegistry().get(given.engine)
    missing = adapter.missing()
    if missing:
        print(f"engine {given.engine} cannot be used here: {missing}", file=sys.stderr)
        return 2
    if protocol.STEPPED not in adapter.capabilities:
        print(f"engine {given.engine} cannot be stepped", file=sys.stderr)
        return 2
    counts = campaign(adapter, given.trials, given.first, clean=given.clean, verbose=given.verbose)
    for name, count in sorted(counts.items()):
        print(f"{name + ':':<36}{count}")
    return 1 if any(name.startswith("finding") for name in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
