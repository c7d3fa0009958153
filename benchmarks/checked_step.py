"""What recording and checking costs, per decode step of the exact model.

    python -m benchmarks.checked_step [--repeats N] [--running N]

Unchecked: the engine alone, nobody watching. Checked: the same workload as a trial, with the
observer, the record, KVSan and all other checks. A step's cost is the difference between a long
trial and a short one, over the steps between, so that prefill and start-up cancel. CPU time of this
process; medians over paired repeats.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import msgspec

from benchmarks.measure import machine, median_ratio, paired, print_table
from preempt_engine import LLM, SamplingParams
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.budget import KVBudget
from preempt_harness.checks import CheckOptions, run_checks
from preempt_harness.checks._accounting_counters import TalliedTrial
from preempt_harness.checks.run import PARTS
from preempt_harness.checks.trace import Trace
from preempt_harness.record import Baseline, TrialRecord
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

_CONTEXTS = (100, 1000, 4000)
_SHORT, _LONG = 32, 544  # output tokens of each request in the two trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--running", type=int, default=16, help="requests that run at once")
    arguments = parser.parse_args()
    print(machine())
    rows, by_part = [], []
    for context in _CONTEXTS:
        short = trial_of(arguments.running, context, _SHORT)
        long = trial_of(arguments.running, context, _LONG)
        costs = {
            run.__name__: partial(_step_us, run, short, long)
            for run in (unchecked, recorded, checked)
        }
        figures = paired(costs, arguments.repeats)
        rows.append(
            [
                f"{context}",
                *(f"{median(figures[name]):.0f}" for name in figures),
                f"{median_ratio(figures['recorded'], figures['unchecked']):.2f}",
                f"{median_ratio(figures['checked'], figures['unchecked']):.2f}",
            ]
        )
        by_part.append(part_costs(short, long, arguments.repeats))
    print(f"{arguments.running} requests; us per step that decodes one token of each")
    print_table(
        ["prompt", "unchecked", "recorded", "checked", "recorded ratio", "checked ratio"], rows
    )
    print("\nus per step of each part of a check")
    print_table(
        ["part", *(f"prompt {context}" for context in _CONTEXTS)],
        [[name, *(f"{costs[name]:.0f}" for costs in by_part)] for name in by_part[0]],
    )


def part_costs(short: Trial, long: Trial, repeats: int) -> dict[str, float]:
    """Part of a check -> microseconds per step, median.

    What several parts share stands by itself: "trace", rows and steps taken together, and
    "totals", the harness's own counts.
    """
    records = [_own_baseline(run_trial(trial, EmbeddedAdapter())) for trial in (short, long)]
    costs: dict[str, Callable[[], float]] = {}
    costs["trace"] = partial(_difference_us, *(partial(_batches, record) for record in records))
    traces = [Trace(record) for record in records]
    costs["totals"] = partial(_difference_us, *(partial(TalliedTrial, trace) for trace in traces))
    for part in PARTS:
        judge = [partial(part.run, trace, CheckOptions()) for trace in traces]
        costs[f"{part.check} {part.part}"] = partial(_difference_us, *judge)
    figures = paired(costs, repeats)
    return {name: median(values) for name, values in figures.items()}


def _batches(record: TrialRecord) -> None:
    """What all parts share: rows of a step, and steps that are alike, taken together."""
    assert Trace(record).folded


def trial_of(running: int, context: int, max_tokens: int) -> Trial:
    """Requests that arrive together, in a pool with room, prefilled in one step."""
    draw = random.Random(0)
    workload = Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=[draw.randrange(4, 64) for _ in range(context)],
                sampling=SamplingSpec(max_tokens=max_tokens),
            )
            for index in range(running)
        ]
    )
    settings = EngineSettings(
        num_blocks=1,
        max_num_batched_tokens=running * context,
        max_num_seqs=running,
        max_model_len=context + max_tokens + 1,
        options={"skip_tokenizer_init": True},
    )
    room = KVBudget.roomy(workload, EmbeddedAdapter().admission_model(settings))
    return Trial(
        engine="embedded",
        settings=msgspec.structs.replace(settings, num_blocks=room.num_blocks),
        workload=workload,
    )


def unchecked(trial: Trial) -> None:
    """The engine alone."""
    settings = trial.settings
    with LLM(
        settings.model,
        num_kv_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        deterministic=settings.deterministic,
        **settings.options,
    ) as llm:
        for request in trial.workload.requests:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.sampling.max_tokens, ignore_eos=True
            )
            llm.add_request(request.prompt_token_ids, params, request_id=request.id)
        while llm.has_unfinished_requests():
            llm.step()


def recorded(trial: Trial) -> None:
    """With the observer and the record, without checks."""
    run_trial(trial, EmbeddedAdapter())


def checked(trial: Trial) -> None:
    """With everything."""
    findings = run_checks(_own_baseline(run_trial(trial, EmbeddedAdapter()))).findings
    assert not findings, findings[0]


def _own_baseline(record: TrialRecord) -> TrialRecord:
    """The output as its own baseline, so that every check has its input."""
    record.baseline = Baseline(kind="same-config", results=record.results)
    return record


def _step_us(run: Callable[[Trial], None], short: Trial, long: Trial) -> float:
    return _difference_us(partial(run, short), partial(run, long))


def _difference_us(short: Callable[[], object], long: Callable[[], object]) -> float:
    """What a step between the lengths of both costs, in microseconds of CPU time."""
    return 1e6 * (_cpu_seconds(long) - _cpu_seconds(short)) / (_LONG - _SHORT)


def _cpu_seconds(run: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    run()
    return time.process_time() - started


if __name__ == "__main__":
    main()
