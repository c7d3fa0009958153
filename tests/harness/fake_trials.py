"""Drawn trials of the fake engine, for Hypothesis; and KVSan's agreement with itself on many.

PYTHONPATH=. python tests/harness/fake_trials.py 5000
"""

from __future__ import annotations

import sys

from fake_engine import FakeConfig, FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preempt_harness.checks.kvsan import check_kvsan
from preempt_harness.record import TrialRecord
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

CONTENT_FAULTS = (
    "double_map",
    "share_unfilled",
    "register_early",
    "skip_token",
    "stale_hash",
    "leak",
    "double_free",
    "no_parent",
    "no_content",
    "lost_copy",
    "swap_table",
    "old_table",
    "block_twice",
    "id_range",
    "stale_token",
    "rank_token",
    "wrong_slot",
    "read_long",
    "read_short",
    "poison_live",
)

BLOCK_SIZE = 4


def make_workload(
    lengths: list[int], *, max_tokens: int = 12, shared: int = 0, arrivals: tuple[int, ...] = ()
) -> Workload:
    """Requests r0, r1, ... with prompts of these lengths, the first `shared` tokens in common."""
    requests = []
    for index, length in enumerate(lengths):
        own = [(index * 17 + position * 5 + 3) % 60 for position in range(length)]
        prompt = ([7, 11, 13, 17, 19, 23, 29, 31] * 4)[: min(shared, length)]
        prompt += own[len(prompt) :]
        requests.append(
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingSpec(max_tokens=max_tokens),
                arrival_step=arrivals[index] if arrivals else 0,
            )
        )
    return Workload(requests=requests)


@st.composite
def workloads(draw: st.DrawFn, max_tokens: int = 12, last_arrival: int = 6) -> Workload:
    """Lengths around block boundaries, shared prefixes, equal later blocks, late arrivals."""
    requests = []
    for index in range(draw(st.integers(2, 5))):
        length = draw(st.integers(1, 18))
        shared = draw(st.sampled_from((0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE, 18)))
        prompt = [(5 * position + 1) % 60 for position in range(min(shared, length))]
        prompt += [draw(st.integers(0, 3)) for _ in range(length - len(prompt))]
        if shared and draw(st.booleans()):
            prompt[0] = index  # equal later blocks under another first block
        requests.append(
            RequestSpec(
                id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingSpec(max_tokens=draw(st.integers(1, max_tokens))),
                arrival_step=draw(st.integers(0, last_arrival)),
            )
        )
    operations = []
    if draw(st.booleans()):
        operations = [Operation(kind="abort", step=draw(st.integers(1, 12)), request="r1")]
    return Workload(requests=requests, operations=operations)


@st.composite
def trials(draw: st.DrawFn, faults: tuple[str, ...] = ()) -> TrialRecord:
    """Records of the fake engine; with `faults`, sometimes one of them is planted."""
    workload = draw(workloads())
    fault = draw(st.sampled_from((None, *faults)))
    names = [spec.id for spec in workload.requests]
    forced = draw(
        st.dictionaries(
            st.integers(1, 20), st.lists(st.sampled_from(names), unique=True).map(tuple), max_size=3
        )
    )
    config = FakeConfig(
        num_blocks=draw(st.integers(8, 12)),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=draw(st.sampled_from((5, 9, 16))),
        enable_prefix_caching=draw(st.booleans()),
        num_ranks=draw(st.sampled_from((1, 2))),
        move_every=draw(st.sampled_from((0, 2))),
        max_steps=200,
        forced=forced,
        faults=frozenset() if fault is None else frozenset({fault}),
    )
    return FakeEngine(workload, config).run()


def check_agreement(num_trials: int) -> None:
    """KVSan incremental and full say the same of drawn trials, faulty ones included.

    Raises:
        AssertionError: they differ on a trial, which Hypothesis shrinks and prints.
    """

    @settings(
        max_examples=num_trials,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trials(faults=CONTENT_FAULTS))
    def agree(record: TrialRecord) -> None:
        assert check_kvsan(record) == check_kvsan(record, "full")

    agree()


if __name__ == "__main__":
    check_agreement(int(sys.argv[1]))
    print(f"incremental and full agree on {sys.argv[1]} trials")
