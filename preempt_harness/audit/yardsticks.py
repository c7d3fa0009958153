"""Two usual recipes for testing preemption, as yardsticks for the suite and the search.

    random      artificial preemption of running requests with probability 0.5, at most 500 times
    tiny-pool   a pool of a fixed, small number of blocks, so that the engine preempts by itself

Both then ask one question: are greedy outputs equal to those of an unpreempted run? Prompts,
lengths and settings are what such tests use: eight prompts, the engine's usual block size, with
and without prefix caching and chunked prefill.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.audit.kill import Kill, Outcome
from preempt_harness.budget import KVBudget
from preempt_harness.explore.watchdog import watched
from preempt_harness.generators import random_tokens
from preempt_harness.record import EngineError, TrialRecord
from preempt_harness.trial import Trial, run_trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

YARDSTICKS = ("random", "tiny-pool")

_NUM_PROMPTS = 8
_LONGEST_PROMPT = 100
_MAX_TOKENS = 32
_BLOCK_SIZE = 16
_TINY_POOL = 20  # blocks: two or three of the eight requests at once
_CHUNK = 48
_POLL_CPU_S = 20.0


def run_yardstick(name: str, adapter: EngineAdapter, model: str, seed: int) -> Kill:
    """Apply a recipe; "killed" as soon as an output differs or the engine fails.

    Args:
        name: of `YARDSTICKS`.
        adapter, model: what to test.
        seed: of prompts and preemptions.

    Returns:
        KILLED or SURVIVED; the caller knows whether there was a fault.
    """
    started = time.process_time()
    count = 0
    for trial, unpreempted in _trials(name, adapter, model, seed):
        count += 1
        problem = _difference(_run(trial, adapter), _run(unpreempted, adapter))
        if problem:
            return Kill(
                outcome=Outcome.KILLED,
                where=f"trial {count}",
                message=problem,
                num_trials=count,
                cpu_s=time.process_time() - started,
            )
    return Kill(outcome=Outcome.SURVIVED, num_trials=count, cpu_s=time.process_time() - started)


def _trials(
    name: str, adapter: EngineAdapter, model: str, seed: int
) -> Iterator[tuple[Trial, Trial]]:
    """Pairs of a trial and its unpreempted twin."""
    for prefix_caching, chunk, variant in itertools.product((True, False), (2048, _CHUNK), (0, 1)):
        settings = EngineSettings(
            model=model,
            num_blocks=1,
            block_size=_BLOCK_SIZE,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=prefix_caching,
        )
        workload = _workload(adapter.vocab_size(settings), f"{seed}/{variant}")
        roomy = KVBudget.roomy(workload, adapter.admission_model(settings)).num_blocks
        plan = f"random:p=0.5,max=500,seed={seed + variant}" if name == "random" else ""
        blocks = roomy if name == "random" else _TINY_POOL
        yield (
            _trial(adapter, settings, workload, blocks, plan),
            _trial(adapter, settings, workload, roomy, ""),
        )


def _trial(
    adapter: EngineAdapter, settings: EngineSettings, workload: Workload, blocks: int, plan: str
) -> Trial:
    import msgspec

    return Trial(
        engine=adapter.name,
        settings=msgspec.structs.replace(settings, num_blocks=blocks),
        workload=workload,
        plan=plan,
    )


def _workload(vocab_size: int, name: str) -> Workload:
    source = random.Random(name)
    return Workload(
        requests=[
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=random_tokens(
                    vocab_size, f"{name}/{index}", source.randint(5, _LONGEST_PROMPT)
                ),
                sampling=SamplingSpec(max_tokens=_MAX_TOKENS),
            )
            for index in range(_NUM_PROMPTS)
        ]
    )


def _run(trial: Trial, adapter: EngineAdapter) -> TrialRecord:
    return run_trial(trial, adapter, open_session=watched(adapter, _POLL_CPU_S))


def _difference(record: TrialRecord, unpreempted: TrialRecord) -> str:
    """What a test that compares greedy outputs would report; "" when it passes."""
    for event in (*unpreempted.events, *record.events):
        if isinstance(event, EngineError):
            return f"{event.kind}: {event.message}"
    for request, result in unpreempted.results.items():
        expected = [output.token_ids for output in result.outputs]
        other = record.results.get(request)
        if other is None or [output.token_ids for output in other.outputs] != expected:
            return f"{request}: outputs differ"
    return ""
