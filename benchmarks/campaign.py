"""Campaigns: many drawn trials, counted. `python -m benchmarks.campaign exact --trials 20000`

exact   the embedded engine on the exact model against the closed form, pool integrity every step
checks  the same trials through the whole harness: every check, verdict against the baseline
kvsan   incremental and full KVSan on the same records: equal findings
budget  what budgets claim, against the engine: forcing counts preempt, roomy ones never do
clean   A/A: unpreempted, with permutations that must not matter; any finding is a false alarm
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from preempt_engine.exact import EOS_TOKEN_ID, reference_generate
from preempt_harness.adapters.embedded import EmbeddedAdapter, EmbeddedSession
from preempt_harness.adapters.embedded_pool import EnginePool
from preempt_harness.adapters.protocol import EngineSettings
from preempt_harness.baseline import (
    BaselineStore,
    as_baseline,
    output_lengths,
    unpreempted_settings,
)
from preempt_harness.budget import KVBudget, NoPreemptingBudgetError
from preempt_harness.checks import KVSan
from preempt_harness.evidence import gather_scores
from preempt_harness.explore.random_settings import random_settings
from preempt_harness.explore.random_trials import random_trial
from preempt_harness.generators import random_workload
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import Preempted, TrialRecord
from preempt_harness.result import TrialResult
from preempt_harness.tolerances import shipped
from preempt_harness.trial import Trial, run_trial
from preempt_harness.verdict import Verdict
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

CONFIDENCE = 0.95


class CheckedSession(EmbeddedSession):
    """Asserts the engine's own integrity after every step."""

    def poll(self, timeout_s: float) -> list:  # type: ignore[type-arg]
        events = super().poll(timeout_s)
        self.llm.scheduler.check_integrity()
        return list(events)


def campaign_exact(trials: int, first_seed: int, model: str) -> Counter[str]:
    """Outputs against the closed form."""
    adapter, counts, pool = EmbeddedAdapter(), Counter[str](), EnginePool()
    for seed in range(first_seed, first_seed + trials):
        trial = random_trial(seed, adapter, model=model)
        record = run_trial(
            trial, adapter, open_session=lambda settings: CheckedSession(settings, pool)
        )
        counts["trials"] += 1
        counts["preemptions"] += _num_preemptions(record)
        for request in trial.workload.requests:
            if _has_closed_form(request):
                counts["outputs compared"] += 1
                if not _equals_closed_form(request, record):
                    _report(counts, "outputs that differ", seed)
        if any(type(event).__name__ == "EngineError" for event in record.events):
            _report(counts, "engine errors", seed)
    return counts


def campaign_checks(trials: int, first_seed: int, model: str) -> Counter[str]:
    """Every check, and the comparison with an unpreempted run."""
    adapter, counts = EmbeddedAdapter(), Counter[str]()
    harness = PreemptHarness(adapter, {"model": model})
    for seed in range(first_seed, first_seed + trials):
        trial = random_trial(seed, adapter, model=model)
        record = run_trial(trial, adapter)
        record.baseline = harness.baselines.get(trial.settings, trial.workload, adapter)
        result = TrialResult.judge(
            trial=trial,
            record=record,
            admission=adapter.admission_model(trial.settings),
            expect_preemption=False,
        )
        counts["trials"] += 1
        counts["preemptions"] += len(result.preemptions)
        counts[f"verdict {result.verdict}"] += 1
        for finding in result.findings:
            _report(counts, f"finding {finding.code}", seed)
    return counts


def campaign_kvsan(trials: int, first_seed: int, model: str) -> Counter[str]:
    """Two ways of verifying, one answer."""
    adapter, counts = EmbeddedAdapter(), Counter[str]()
    for seed in range(first_seed, first_seed + trials):
        record = run_trial(random_trial(seed, adapter, model=model), adapter)
        counts["trials"] += 1
        counts["preemptions"] += _num_preemptions(record)
        fast, full = KVSan(record.header), KVSan(record.header, verify="full")
        for event in record.events:
            fast.feed(event)
            full.feed(event)
        if fast.finish() != full.finish():
            _report(counts, "records judged differently", seed)
    return counts


BUDGETED = (
    "shared_prefix",
    "equal_later_blocks",
    "late_arrivals",
    "sampling",
    "stops",
    "operations",
    "long_prompts",
    "outputs",
)


def campaign_budget(trials: int, first_seed: int, model: str) -> Counter[str]:
    """The verdict of a budget against what the engine does with as many blocks."""
    adapter, counts = EmbeddedAdapter(), Counter[str]()
    baselines = BaselineStore(lambda trial: run_trial(trial, adapter))
    for seed in range(first_seed, first_seed + trials):
        source = random.Random(f"{seed}/budget")
        settings = msgspec.structs.replace(
            random_settings(source, adapter, model), tensor_parallel_size=1
        )
        workload = random_workload(
            seed,
            vocab_size=adapter.vocab_size(settings),
            block_size=settings.block_size,
            features=[name for name in BUDGETED if source.random() < 0.5],
        )
        admission = adapter.admission_model(settings)
        room = KVBudget.roomy(workload, admission)

        def preempts(num_blocks: int, settings=settings, workload=workload) -> bool:  # type: ignore[no-untyped-def]
            roomy = msgspec.structs.replace(settings, num_blocks=num_blocks)
            trial = Trial(engine="embedded", settings=roomy, workload=workload)
            return _num_preemptions(run_trial(trial, adapter)) > 0

        counts["trials"] += 1
        if preempts(room.num_blocks_never) or preempts(room.num_blocks):
            _report(counts, "roomy budgets that preempt", seed)
        lengths = output_lengths(baselines.get(settings, workload, adapter))
        try:
            tight = KVBudget.tight(workload, admission, output_lengths=lengths)
        except NoPreemptingBudgetError:
            counts["no count preempts"] += 1
            continue
        counts[f"forcing counts, {tight.proof.kind}"] += 1
        if not preempts(tight.num_blocks):
            _report(counts, "forcing counts that do not preempt", seed)
    return counts


def campaign_clean(
    trials: int, first_seed: int, model: str, dtype: str | None = None
) -> Counter[str]:
    """A/A trials: the same workload with room, in two harmless variations.

    Args:
        trials, first_seed, model: as everywhere.
        dtype: run the engine in it and not deterministically; None is deterministic.
    """
    adapter, counts, pool = EmbeddedAdapter(), Counter[str](), EnginePool()

    def run(trial: Trial) -> TrialRecord:
        return run_trial(
            trial, adapter, open_session=lambda settings: EmbeddedSession(settings, pool)
        )

    for seed in range(first_seed, first_seed + trials):
        source = random.Random(f"{seed}/clean")
        settings = random_settings(source, adapter, model)
        if dtype is not None:
            settings = msgspec.structs.replace(settings, deterministic=False, dtype=dtype)
        workload = random_workload(
            seed, vocab_size=adapter.vocab_size(settings), block_size=settings.block_size
        )
        workload = msgspec.structs.replace(workload, operations=[])
        first = _roomy(settings, workload)
        varied, permuted = _vary(source, settings, workload)
        second = _roomy(varied, permuted)
        baseline = as_baseline(run(first))
        record = run(second)
        record.baseline = baseline
        gather_scores(record, second, adapter)
        result = TrialResult.judge(
            trial=second,
            record=record,
            admission=adapter.admission_model(varied),
            tolerance=shipped().of(record.header),
            expect_preemption=False,
        )
        counts["trials"] += 1
        counts[f"verdict {result.verdict}"] += 1
        if result.verdict not in (Verdict.EQUAL, Verdict.BENIGN):
            _report(counts, f"verdict {result.verdict}", seed)
        counts["trials with incomparable outputs"] += "tokens" in result.report.not_observable
        for finding in (*result.findings, *baseline.problems):
            _report(counts, f"finding {finding}", seed)
    return counts


def _roomy(settings: EngineSettings, workload: Workload) -> Trial:
    branches = max(request.sampling.num_sequences for request in workload.requests)
    settings = msgspec.structs.replace(
        settings,
        max_num_seqs=max(settings.max_num_seqs, branches),
        scheduling_policy="priority" if any(r.priority for r in workload.requests) else "fcfs",
    )
    return Trial(
        engine="embedded",
        settings=unpreempted_settings(settings, workload, EmbeddedAdapter()),
        workload=workload,
    )


def _vary(
    source: random.Random, settings: EngineSettings, workload: Workload
) -> tuple[EngineSettings, Workload]:
    """Another chunk size, block size, batch mix and arrival order; seeds stay with requests."""
    varied = msgspec.structs.replace(
        settings,
        block_size=source.choice((1, 2, 4, 16)),
        max_num_batched_tokens=source.choice((5, 16, 64)),
        max_num_seqs=source.choice((1, 2, 256)),
    )
    requests = [
        msgspec.structs.replace(
            request,
            arrival_step=source.randint(0, 6),
            sampling=request.sampling
            if request.sampling.beam is not None
            else msgspec.structs.replace(request.sampling, seed=index),
        )
        for index, request in enumerate(workload.requests)
    ]
    seeded = [
        msgspec.structs.replace(request, sampling=other.sampling)
        for request, other in zip(workload.requests, requests, strict=True)
    ]
    workload.requests[:] = seeded
    source.shuffle(requests)
    return varied, Workload(requests=requests)


def _has_closed_form(request: RequestSpec) -> bool:
    """One greedy output of plain logits, and no stop token is banned for a while."""
    sampling = request.sampling
    bans = sampling.min_tokens > 0 and (sampling.stop_token_ids or not sampling.ignore_eos)
    plain = SamplingSpec(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        seed=sampling.seed,
    )
    return sampling == plain and not bans


def _equals_closed_form(request: RequestSpec, record: TrialRecord) -> bool:
    result = record.results[request.id]
    if result.error:
        return not any(output.token_ids for output in result.outputs)
    output = result.outputs[0]
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops.add(EOS_TOKEN_ID)
    limit = record.header.max_total_tokens
    length = request.sampling.max_tokens
    if limit is not None:
        length = min(length, limit - request.num_prompt_tokens)
    expected = reference_generate(
        request.prompt_token_ids,
        length,
        record.header.vocab_size,
        num_ranks=record.header.num_ranks,
        stop_token_ids=stops,
    )
    if output.finish_reason == "abort":
        expected = expected[: len(output.token_ids)]
    return output.token_ids == expected


def _num_preemptions(record: TrialRecord) -> int:
    return sum(isinstance(event, Preempted) for event in record.events)


def _report(counts: Counter[str], what: str, seed: int) -> None:
    counts[f"BAD {what}"] += 1
    print(f"seed {seed}: {what}", file=sys.stderr)


CAMPAIGNS: dict[str, Callable[..., Counter[str]]] = {
    "exact": campaign_exact,
    "checks": campaign_checks,
    "kvsan": campaign_kvsan,
    "budget": campaign_budget,
    "clean": campaign_clean,
}


def main() -> int:
    """Run one campaign and print its counts; exit status 1 if anything is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("campaign", choices=sorted(CAMPAIGNS))
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--model", default="exact")
    parser.add_argument("--dtype", help="for clean: not deterministic, and in this dtype")
    arguments = parser.parse_args()
    more = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    if more and arguments.campaign != "clean":
        parser.error("--dtype is for the campaign clean.")
    started = time.perf_counter()
    counts = CAMPAIGNS[arguments.campaign](
        arguments.trials, arguments.first_seed, arguments.model, **more
    )
    for line in _lines(counts, time.perf_counter() - started):
        print(line)
    return 1 if any(name.startswith("BAD") for name in counts) else 0


def _lines(counts: Counter[str], seconds: float) -> Iterator[str]:
    for name, number in counts.items():
        yield f"{name}: {number}"
    trials = counts["trials"]
    yield f"{seconds:.1f} s, {trials / seconds:.0f} trials/s"
    if not any(name.startswith("BAD") for name in counts):
        bound = 1 - (1 - CONFIDENCE) ** (1 / trials)
        yield f"nothing bad in {trials}: below {bound:.2e} a trial ({CONFIDENCE:.0%} confidence)"


if __name__ == "__main__":
    sys.exit(main())
