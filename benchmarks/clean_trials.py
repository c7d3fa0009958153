"""False alarms: drawn trials of any engine with room and no plan, beside each request alone.

    python -m benchmarks.clean_trials transformers-cb-threaded --model tiny-llama --trials 200

Whatever is found is a false alarm, or a fault that needs no preemption. All trials have one pool,
so that a server is started once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, Session
from preempt_harness.adapters.registry import AdapterRegistry
from preempt_harness.explore.random_trials import random_features
from preempt_harness.generators import random_workload
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import Preempted
from preempt_harness.workload import Workload

_SHOWN = 5


def drawn_workload(
    seed: int, adapter: EngineAdapter, model: str, block_size: int, most: tuple[int, int]
) -> Workload:
    """Requests of a seed, as the search strategies draw them, without what preempts.

    Args:
        seed: of everything.
        adapter: whose capabilities bound what is drawn.
        model: whose vocabulary prompts are of.
        block_size: in which lengths are counted.
        most: requests, and output tokens of each.
    """
    source = random.Random(f"{seed}/clean trials")
    settings = protocol.EngineSettings(model=model, num_blocks=1, block_size=block_size)
    workload = random_workload(
        seed,
        vocab_size=adapter.vocab_size(settings),
        block_size=block_size,
        max_requests=most[0],
        max_tokens=most[1],
        features=random_features(source, adapter),
    )
    return Workload(
        requests=[item for item in workload.requests if item.priority == 0],
        operations=[item for item in workload.operations if item.kind == "abort"],
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", help="name of an adapter")
    parser.add_argument("--model", help="by default the adapter's first")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-requests", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=20)
    given = parser.parse_args(arguments)
    adapter = AdapterRegistry().get(given.engine)
    missing = adapter.missing()
    if missing:
        print(f"engine {given.engine} cannot be used here: {missing}", file=sys.stderr)
        return 2
    model = given.model or adapter.models[0]

    def open_session(settings: EngineSettings) -> Session:
        """Baselines have as much room as the trials: another pool would be another server."""
        num_blocks = max(settings.num_blocks, given.num_blocks)
        return adapter.open(msgspec.structs.replace(settings, num_blocks=num_blocks))

    harness = PreemptHarness(
        adapter, {"model": model, "block_size": given.block_size}, open_session=open_session
    )
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for seed in itertools.count(given.first):
        if counts["trials"] == given.trials:
            break
        most = (given.max_requests, given.max_tokens)
        workload = drawn_workload(seed, adapter, model, given.block_size, most)
        if not workload.requests:  # all were more or less urgent than others
            continue
        result = harness.run(workload, given.num_blocks, expect_preemption=False, baseline="solo")
        record = result.record
        counts["trials"] += 1
        counts[f"verdict {result.verdict.name}"] += 1
        counts["requests"] += len(workload.requests)
        outputs = [output for item in record.results.values() for output in item.outputs]
        counts["output tokens"] += sum(len(output.token_ids) for output in outputs)
        counts["preemptions"] += sum(isinstance(event, Preempted) for event in record.events)
        for code in {str(finding.code) for finding in result.findings}:
            counts[f"finding {code}"] += 1
            if counts[f"finding {code}"] <= _SHOWN:
                shown = next(item for item in result.findings if str(item.code) == code)
                print(f"seed {seed}: {str(shown)[:400]}", flush=True)
    if isinstance(adapter, protocol.KeepsEngines):
        adapter.close_kept()
    counts["seconds"] = round(time.monotonic() - started)
    for name, count in sorted(counts.items()):
        print(f"{name + ':':<28}{count}")
    return 1 if any(name.startswith("finding") for name in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
