"""Adapter "vllm" on the released engine, whole but for its executor, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest

from preempt_engine.exact import reference_generate
from preempt_harness.adapters.child import ChildHost
from preempt_harness.adapters.exact_workers import VOCAB_SIZE
from preempt_harness.adapters.vllm import TESTED_SIGNATURES
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import Preempted
from preempt_harness.result import TrialResult
from preempt_harness.workload import Operation, RequestSpec, Workload
from tests.harness.vllm_on_cpu import VllmOnCpuAdapter

BLOCK = 16


def _installed() -> str | None:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


pytestmark = [
    pytest.mark.skipif(
        _installed() not in TESTED_SIGNATURES,
        reason=f"needs vllm {', '.join(TESTED_SIGNATURES)}; see docs/adapters",
    ),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def host() -> Iterator[ChildHost]:
    """One child for all tests: importing vLLM takes seconds."""
    host = ChildHost(VllmOnCpuAdapter(), 120.0)
    yield host
    host.close()


@pytest.fixture
def harness(host: ChildHost) -> PreemptHarness:
    settings = {"model": "exact", "block_size": BLOCK, "max_num_batched_tokens": 64}
    return PreemptHarness(VllmOnCpuAdapter(), settings, open_session=host.open)


def assert_closed_form(result: TrialResult) -> None:
    for request in result.trial.workload.requests:
        (output,) = result.record.results[request.id].outputs
        expected = reference_generate(
            request.prompt_token_ids, request.sampling.max_tokens, VOCAB_SIZE
        )
        assert output.token_ids == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_tight_pool_preempts_by_the_engines_own_count(
    harness: PreemptHarness, prefix_caching: bool
) -> None:
    workload = harness.workload(requests=3, prompt_tokens=(20, 40), max_tokens=40)
    result = harness.run(workload, "tight", enable_prefix_caching=prefix_caching)
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean()
    assert_closed_form(result)


def test_a_reset_preempts_all_that_run(harness: PreemptHarness) -> None:
    """The counter belongs to the process, which has run other engines before."""
    requests = harness.workload(requests=3, prompt_tokens=(20, 40), max_tokens=20).requests
    reset = Operation(kind="reset_running_requests", step=6)
    result = harness.run(
        Workload(requests=requests, operations=[reset]), "roomy", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()
    assert_closed_form(result)
    count = sum(isinstance(event, Preempted) for event in result.record.events)
    assert count == 3


def test_an_aborted_request_leaves_the_others(harness: PreemptHarness) -> None:
    requests = harness.workload(requests=3, prompt_tokens=(20, 40), max_tokens=20).requests
    abort = Operation(kind="abort", step=5, request="r1")
    result = harness.run(
        Workload(requests=requests, operations=[abort]), "roomy", expect_preemption=False
    )
    result.assert_matches_baseline()
    result.assert_clean()
    assert result.record.results["r1"].outputs[0].finish_reason == "abort"


def test_a_prompt_that_never_fits_is_refused_alone(harness: PreemptHarness) -> None:
    (small,) = harness.workload(requests=1, prompt_tokens=20, max_tokens=4).requests
    giant = RequestSpec(id="giant", prompt_token_ids=harness.prompts.take(900))
    result = harness.run(Workload(requests=[small, giant]), 8, expect_preemption=False)
    result.assert_clean()
    assert result.record.results["r0"].error == ""
    assert "maximum context length" in result.record.results["giant"].error
