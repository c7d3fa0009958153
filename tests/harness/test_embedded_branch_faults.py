"""Mistakes with swapping, forks and beams, planted in the embedded engine: each is found.

Each is public history, or a mistake of that kind: https://github.com/vllm-project/vllm/issues/4422
(one new token per swapped group is assumed), xLLM 1984 (beams read stale blocks), 29870 (a block is
reused while it is being copied).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_embedded_branches import requests, run

from preempt_engine.residency import Residency
from preempt_engine.sequence import Request, Sequence
from preempt_engine.step import SchedulerOutput
from preempt_engine.swapping import Pairs, Swapper
from preempt_engine.worker.exact_runner import ExactRunner
from preempt_harness.checks.run import run_checks
from preempt_harness.workload import BeamSpec, SamplingSpec

Patch = Callable[[pytest.MonkeyPatch], None]
SAMPLES = SamplingSpec(n=3, temperature=1.0, seed=5, max_tokens=12)
BEAMS = SamplingSpec(beam=BeamSpec(num_beams=3), max_tokens=12)


def late_swap_in(patch: pytest.MonkeyPatch) -> None:
    """Blocks come back after the step has read them."""
    execute = ExactRunner.execute

    def wrapped(self: ExactRunner, step: SchedulerOutput) -> Any:
        pairs, step.swap_in = step.swap_in, []
        logits = execute(self, step)
        self._cache.swap_in(pairs)
        if pairs and self.observer is not None:
            self.observer.worker_swapped_in(step.step_id, 0, pairs)
        return logits

    patch.setattr(ExactRunner, "execute", wrapped)


def lost_block_copy(patch: pytest.MonkeyPatch) -> None:
    """The shared block is exchanged, and its content stays behind."""
    execute = ExactRunner.execute

    def wrapped(self: ExactRunner, step: SchedulerOutput) -> Any:
        step.block_copies = []
        return execute(self, step)

    patch.setattr(ExactRunner, "execute", wrapped)


def write_to_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    """No copy-on-write at all."""
    patch.setattr("preempt_engine.block_manager.BlockManager.copy_on_write", lambda *_: None)
    patch.setattr("preempt_engine.block_manager.num_private_copies", lambda *_: 0)


def shared_blocks_twice(patch: pytest.MonkeyPatch) -> None:
    """Every sequence takes its own copy of shared blocks to the host."""

    def computed(self: Swapper, request: Request) -> list[int]:
        return [
            block
            for sequence in request.sequences.values()
            for block in sequence.block_table[
                : self.blocks.blocks_for(sequence.num_computed_tokens)
            ]
        ]

    patch.setattr(Swapper, "_computed_blocks", computed)


def forgotten_branch(patch: pytest.MonkeyPatch) -> None:
    """All branches but the last come back."""
    swap_in = Swapper.swap_in

    def wrapped(self: Swapper, request: Request, step_id: int) -> tuple[Pairs, dict[int, int]]:
        last = next(reversed(request.sequences.values()))
        last.swapped_table = []
        pairs, num_shared = swap_in(self, request, step_id)
        return pairs, num_shared

    patch.setattr(Swapper, "swap_in", wrapped)


def kept_beams(patch: pytest.MonkeyPatch) -> None:
    """A dropped beam's blocks are not given back."""

    def drop(self: Residency, request: Request, sequence: Sequence) -> None:
        del request.sequences[sequence.key.branch]

    patch.setattr(Residency, "drop", drop)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Blocks are handed out while they are still being copied to the host."""
    swap_out = Swapper.swap_out

    def wrapped(self: Swapper, request: Request, step_id: int) -> Pairs:
        free = self.blocks.free
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.blocks, "free", lambda sequence, step: free(sequence, None))
            return swap_out(self, request, step_id)

    patch.setattr(Swapper, "swap_out", wrapped)


def one_token_per_group(patch: pytest.MonkeyPatch) -> None:
    """A swapped group is taken to have one sequence."""
    swap_in = Swapper.swap_in

    def wrapped(self: Swapper, request: Request, step_id: int) -> tuple[Pairs, dict[int, int]]:
        assert len(request.sequences) == 1, "one new token per group"
        return swap_in(self, request, step_id)

    patch.setattr(Swapper, "swap_in", wrapped)


FAULTS: list[tuple[Patch, SamplingSpec, set[str]]] = [
    (late_swap_in, SAMPLES, {"KVSAN-USE-BEFORE-WRITE", "TOK-DIVERGED"}),
    (lost_block_copy, BEAMS, {"KVSAN-USE-BEFORE-WRITE", "ACC-WORKER-COPIES"}),
    (write_to_shared_blocks, SAMPLES, {"KVSAN-SHARED-WRITE"}),
    (shared_blocks_twice, SAMPLES, {"ACC-POOL-LISTS"}),
    (forgotten_branch, SAMPLES, {"CRASH-EXCEPTION"}),
    (kept_beams, BEAMS, {"ACC-REF-COUNT"}),
    (no_fence, SAMPLES, {"KVSAN-STALE-READ", "TOK-DIVERGED"}),
    (one_token_per_group, SAMPLES, {"CRASH-EXCEPTION"}),
]


@pytest.mark.parametrize(
    ("plant", "sampling", "expected"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_a_planted_mistake_is_found(
    plant: Patch, sampling: SamplingSpec, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = natural_swaps(sampling)
    assert clean == set()
    plant(monkeypatch)
    found = natural_swaps(sampling)
    assert expected <= found, found


def natural_swaps(sampling: SamplingSpec) -> set[str]:
    """Codes of what is found in a tight pool that swaps, with a forced swap on top."""
    record = run(
        requests(sampling, sampling, sampling),
        17,
        "preempt:r0@out=4:swap",
        preemption_mode="swap",
        block_reuse_order="lifo",
    )
    return {str(finding.code) for finding in run_checks(record).findings}
