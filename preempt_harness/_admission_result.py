"""What the admission simulator says of a workload in a pool."""

from __future__ import annotations

import msgspec


class PredictedPreemption(msgspec.Struct, frozen=True):
    """One preemption of a simulation: when, whom, and how far it had come."""

    step: int
    request: str
    num_computed_tokens: int
    num_output_tokens: int


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What the admission model predicts.

    Attributes:
        num_blocks: of the pool, reserved blocks included.
        preemptions: in order.
        steps: number of the first step with nothing left to do.
        last_step: the last step that computed something, -1 if none did.
        finished: request -> its output tokens.
        truncated: requests that the size of the pool ended early.
        infeasible: requests that can never run or, alone in the pool, outgrow it.
        aborted: requests ended by an operation of the workload.
        peak_blocks: most blocks in use when a step is computed.
        num_scheduled_tokens: tokens computed, recomputation included.
        num_recomputed_tokens: of those, positions that had been computed before.
        uncertain: requests that may stop before their assumed length.
    """

    num_blocks: int
    preemptions: tuple[PredictedPreemption, ...]
    steps: int
    last_step: int
    finished: dict[str, int]
    truncated: tuple[str, ...]
    infeasible: tuple[str, ...]
    aborted: tuple[str, ...]
    peak_blocks: int
    num_scheduled_tokens: int
    num_recomputed_tokens: int
    uncertain: tuple[str, ...]

    @property
    def num_preemptions(self) -> int:
        return len(self.preemptions)

    @property
    def preempted(self) -> frozenset[str]:
        """Requests that were preempted at least once."""
        return frozenset(event.request for event in self.preemptions)

    @property
    def recompute_ratio(self) -> float:
        """Recomputed tokens per token computed for the first time."""
        return self.num_recomputed_tokens / max(
            1, self.num_scheduled_tokens - self.num_recomputed_tokens
        )
