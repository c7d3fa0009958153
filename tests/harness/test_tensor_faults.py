"""Mistakes with keys and values that no table shows, on a real model: outputs tell."""

from __future__ import annotations

import pytest

from preempt_engine.worker.kv_cache import KVCache
from preempt_engine.worker.swap_space import SwapSpace
from preempt_harness.adapters.embedded import EmbeddedAdapter
from preempt_harness.harness import PreemptHarness
from preempt_harness.result import TrialResult
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

KEYS, VALUES = 0, 1


def trial() -> TrialResult:
    """Three branches of one prompt that ends within a block, swapped out and back."""
    harness = PreemptHarness(
        EmbeddedAdapter(),
        {"model": "tiny-llama", "block_size": 4, "options": {"poison": True}},
    )
    request = RequestSpec(
        id="r0",
        prompt_token_ids=list(range(20, 30)),
        sampling=SamplingSpec(n=3, temperature=1.0, seed=1, max_tokens=10),
    )
    # A mistake at a fork is made with room as well; branches that run alone do not fork.
    return harness.run(Workload(requests=[request]), plan="preempt:r0@step=5:swap", baseline="solo")


def codes(result: TrialResult) -> set[str]:
    return {str(finding.code) for finding in result.findings}


def test_the_clean_engine_is_clean() -> None:
    result = trial()
    assert (result.verdict, codes(result)) == ("EQUAL", set())


@pytest.mark.parametrize("left_out", [KEYS, VALUES], ids=["keys", "values"])
def test_copy_on_write_of_one_half_is_found(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = KVCache.copy_blocks

    def half(self: KVCache, pairs: list[tuple[int, int]]) -> None:
        before = self.pool[:, left_out].clone()
        copy(self, pairs)
        self.pool[:, left_out] = before

    monkeypatch.setattr(KVCache, "copy_blocks", half)
    assert "TOK-DIVERGED" in codes(trial())


@pytest.mark.parametrize("left_out", [KEYS, VALUES], ids=["keys", "values"])
def test_swap_in_of_one_half_is_found(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = SwapSpace.swap_in

    def half(self: SwapSpace, pairs: list[tuple[int, int]]) -> None:
        before = self._pool[:, left_out].clone()
        swap_in(self, pairs)
        self._pool[:, left_out] = before

    monkeypatch.setattr(SwapSpace, "swap_in", half)
    assert "TOK-DIVERGED" in codes(trial())
