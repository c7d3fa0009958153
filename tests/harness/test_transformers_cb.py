"""The transformers-cb adapter on the tiny llama: what it sees, what it finds, what it refuses."""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preempt_harness.suite
from preempt_harness.adapters.transformers_cb import TransformersAdapter
from preempt_harness.adapters.transformers_cb_threaded import (
    ThreadedTransformersAdapter,
    ThreadedTransformersSession,
)
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.harness import PreemptHarness
from preempt_harness.record import BlocksReplaced, Computed, Forked
from preempt_harness.result import TrialResult
from preempt_harness.trial import run_trial
from preempt_harness.verdict import Verdict
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

pytestmark = pytest.mark.skipif(
    TransformersAdapter().missing() is not None, reason="needs transformers 5.24 or later"
)

BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def harness() -> PreemptHarness:
    return PreemptHarness(TransformersAdapter(), {"block_size": BLOCK})


def tight(harness: PreemptHarness, **settings: Any) -> TrialResult:
    workload = harness.workload(requests=3, prompt_tokens=(6, 14), max_tokens=16)
    return harness.run(workload, "tight", **settings)


def codes(result: TrialResult) -> set[str]:
    return {str(finding.code) for finding in result.findings}


# A trial of the engine as it is -------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_tight_pool_preempts_and_is_clean(harness: PreemptHarness, prefix_caching: bool) -> None:
    result = tight(harness, enable_prefix_caching=prefix_caching, max_num_batched_tokens=9)
    result.assert_preempted(mode="recompute", phase="decode")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "tokens", "delivery", "progress"])


@pytest.mark.parametrize("host_blocks", [64, 4])
def test_swap_in_a_tight_pool(harness: PreemptHarness, host_blocks: int) -> None:
    """What finds no room in the swap space is recomputed."""
    options = {"preemption_mode": "swap", "swap_space_blocks": host_blocks}
    result = tight(harness, options=options)
    result.assert_preempted(mode="swap" if host_blocks == 64 else "recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "tokens", "delivery"])


def test_both_ways_of_preempting_in_one_run(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=10)
    plan = "preempt:r0@out=3:swap/preempt:r0@out=6/preempt:r1@out=4:swap"
    result = harness.run(workload, plan=plan)
    result.assert_preempted(request="r0", mode="swap")
    result.assert_preempted(request="r0", mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


def test_a_trial_repeats_exactly(harness: PreemptHarness) -> None:
    first = tight(harness)
    first.assert_preempted()
    again = run_trial(first.trial, harness.adapter)
    again.baseline = first.record.baseline
    again.scores = first.record.scores
    assert again.digest() == first.record.digest()


@pytest.mark.parametrize("sharing", [True, False])
def test_several_outputs_of_a_request(harness: PreemptHarness, sharing: bool) -> None:
    workload = harness.workload(requests=2, prompt_tokens=(7, 9), max_tokens=12, n=3)
    result = harness.run(workload, 9, enable_prefix_caching=sharing)
    result.assert_preempted()
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])
    assert sum(isinstance(event, Forked) for event in result.record.events) > 0
    assert [len(item.outputs) for item in result.record.results.values()] == [3, 3]


def test_a_block_that_is_there_already_is_given_up(harness: PreemptHarness) -> None:
    prompt = harness.prompts.take(2 * BLOCK + 1)
    workload = Workload(
        requests=[
            RequestSpec(
                id=f"r{index}", prompt_token_ids=prompt, sampling=SamplingSpec(max_tokens=4)
            )
            for index in range(2)
        ]
    )
    result = harness.run(workload, "roomy", expect_preemption=False)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])
    assert any(isinstance(event, BlocksReplaced) for event in result.record.events)


def test_a_forced_preemption_of_the_only_request(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=1, prompt_tokens=9, max_tokens=6)
    result = harness.run(workload, plan="preempt:r0@out=2/preempt:r0@resume=1")
    result.assert_preempted(request="r0", at_least=2)
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan"])


def test_more_log_probabilities_than_the_engine_hands_over(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=6, logprobs=3)
    result = harness.run(workload, plan="preempt:r0@out=2")
    result.assert_preempted(request="r0")
    result.assert_matches_baseline()
    result.assert_clean()
    output = result.record.results["r0"].outputs[0]
    assert output.logprobs is not None
    assert [len(entry) for entry in output.logprobs] == [3] * 6
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert max(entry, key=entry.__getitem__) == token_id


# What is wrong with it ----------------------------------------------------------------------------


def test_survivors_cancelled_after_an_offload_leave_the_others_hung(
    harness: PreemptHarness,
) -> None:
    """After an offload nobody is admitted until somebody finishes, and a cancelled one does not."""
    workload = harness.workload(requests=2, prompt_tokens=8, max_tokens=32)
    result = harness.run(workload, 10, plan="abort:r0@out=16")
    result.assert_preempted(request="r1")
    assert result.verdict is Verdict.HANG
    assert "CRASH-HANG" in codes(result)


def test_a_prompt_larger_than_the_pool_ends_everybody(harness: PreemptHarness) -> None:
    workload = harness.workload(requests=2, prompt_tokens=(6, 60), max_tokens=4)
    result = harness.run(workload, 8, expect_preemption=False)
    assert codes(result) == {"CRASH-EXCEPTION"}


def test_known_issues_name_scenarios_that_ship() -> None:
    suite = Path(preempt_harness.suite.__file__).parent
    text = "".join(path.read_text() for path in suite.glob("test_*.py"))
    names = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    for issue in TransformersAdapter.known_issues:
        plain = issue.scenario.partition("[")[0]
        assert fnmatch.filter(names, plain), issue.scenario


# What it would not miss ---------------------------------------------------------------------------


def test_a_token_lost_on_the_way_back_is_found(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.requests import RequestState

    original = RequestState.create_equivalent_initial_request

    def forgetful(self: Any) -> Any:
        state = original(self)
        del state.initial_tokens[-1], state.remaining_prefill_tokens[-1]
        return state

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", forgetful)
    result = tight(harness)
    assert result.verdict is Verdict.DIVERGED
    assert "TOK-LENGTH" in codes(result)


def test_blocks_swapped_back_in_another_order_are_found(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    original = OffloadingManager.restore_scheduled_requests

    def disordered(self: Any, batch: list[Any]) -> None:
        for future in batch:
            if future.state.is_cpu_offloaded:
                for host in self._request_id_to_cpu_blocks[future.state.request_id].values():
                    host.reverse()
        original(self, batch)

    monkeypatch.setattr(OffloadingManager, "restore_scheduled_requests", disordered)
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=8)
    result = harness.run(workload, plan="preempt:r0@out=3:swap")
    assert result.verdict is Verdict.DIVERGED
    assert "KVSAN-STALE-READ" in codes(result)


def test_blocks_that_are_not_swapped_back_are_found(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import offloading_manager

    original = offloading_manager.OffloadingManager.restore_scheduled_requests

    def forgetful(self: Any, batch: list[Any]) -> None:
        copy_view = self.cache.cache_allocators["full_attention"]._copy_view
        before = copy_view.clone()
        original(self, batch)
        copy_view.copy_(before)

    monkeypatch.setattr(
        offloading_manager.OffloadingManager, "restore_scheduled_requests", forgetful
    )
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=8)
    result = harness.run(workload, plan="preempt:r0@out=3:swap/preempt:r0@out=5:swap")
    assert any(code.startswith("KVSAN-") for code in codes(result))


def test_a_block_read_for_another_is_found(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator,
    )

    original = FullAttentionCacheAllocator.get_read_indices

    def swapped(self: Any, request_id: str, past: int, length: int) -> list[int]:
        indices = original(self, request_id, past, length)
        if request_id != "r1" or len(indices) < 2 * BLOCK:
            return indices
        return indices[BLOCK : 2 * BLOCK] + indices[:BLOCK] + indices[2 * BLOCK :]

    monkeypatch.setattr(FullAttentionCacheAllocator, "get_read_indices", swapped)
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=6)
    result = harness.run(workload, "roomy", expect_preemption=False, baseline="solo")
    assert "KVSAN-STALE-READ" in codes(result)


def test_blocks_that_are_not_given_back_are_found(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    original = PagedAttentionCache.free_blocks

    def leaky(self: Any, request_id: str, no_cache: bool = False) -> None:
        if request_id != "r0":
            original(self, request_id, no_cache)

    monkeypatch.setattr(PagedAttentionCache, "free_blocks", leaky)
    workload = harness.workload(requests=2, prompt_tokens=9, max_tokens=6)
    result = harness.run(workload, "roomy", expect_preemption=False)
    assert {"KVSAN-LEAK", "ACC-LEAK"} <= codes(result)


def test_the_workers_view_is_not_the_schedulers(
    harness: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are seen as they enter the model, whatever the scheduler believes."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    original = ContinuousBatchingIOs.prepare_batch_tensors

    def corrupting(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.input_ids[0] = 3

    monkeypatch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", corrupting)
    workload = harness.workload(requests=1, prompt_tokens=9, max_tokens=3)
    result = harness.run(workload, "roomy", expect_preemption=False)
    assert "KVSAN-TOKEN-MISMATCH" in codes(result)
    row = next(event for event in result.record.events if isinstance(event, Computed))
    assert row.token_ids[0] == 3


# The public manager, in its own thread ------------------------------------------------------------


@pytest.fixture
def threaded() -> PreemptHarness:
    return PreemptHarness(ThreadedTransformersAdapter(), {"block_size": BLOCK}, poll_timeout_s=1.0)


def test_the_managers_thread_preempts_and_is_clean(threaded: PreemptHarness) -> None:
    result = tight(threaded)
    result.assert_preempted(mode="recompute")
    result.assert_matches_baseline()
    result.assert_clean(require=["kvsan", "tokens", "delivery"])


def test_the_managers_thread_hangs_when_survivors_are_cancelled(
    threaded: PreemptHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchProcessor,
    )

    cancelled = threading.Event()
    update, abort = ContinuousBatchProcessor.update_batch, ThreadedTransformersSession.abort

    def updating(self: Any) -> None:
        """Go on only when the request was cancelled, whatever the two threads do."""
        update(self)
        state = self.scheduler.active_requests.get("r0")
        if state is not None and len(state.generated_tokens) >= 16:
            cancelled.wait(60)

    def aborting(self: ThreadedTransformersSession, request: str) -> None:
        abort(self, request)
        cancelled.set()

    workload = threaded.workload(requests=2, prompt_tokens=8, max_tokens=32)
    baseline = threaded.baselines.get(threaded.settings(), workload, threaded.adapter)
    assert not baseline.problems
    monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", updating)
    monkeypatch.setattr(ThreadedTransformersSession, "abort", aborting)
    result = threaded.run(workload, 10, plan="abort:r0@out=16")
    result.assert_preempted(request="r1")
    assert result.verdict is Verdict.HANG


def test_what_ended_the_managers_thread_is_not_swallowed(threaded: PreemptHarness) -> None:
    """`generate_batch` gives back what there is, and says nothing."""
    workload = threaded.workload(requests=2, prompt_tokens=(6, 60), max_tokens=4)
    result = threaded.run(workload, 8, expect_preemption=False)
    assert codes(result) == {"CRASH-EXCEPTION"}
    assert "No requests can be scheduled" in str(result.findings[0])


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"block_size": 2}, {"max_model_len": 64}])
def test_settings_that_it_has_not_are_refused(settings: dict[str, Any]) -> None:
    harness = PreemptHarness(TransformersAdapter())
    with pytest.raises(UnsupportedTrialError, match="refuses"):
        harness.run(harness.workload(requests=1), "roomy", expect_preemption=False, **settings)


def test_an_old_transformers_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preempt_harness.adapters.transformers_cb.version", lambda name: "4.57.1")
    missing = TransformersAdapter().missing()
    assert missing is not None
    assert "transformers>=5.24" in missing
    assert "\n" not in missing
