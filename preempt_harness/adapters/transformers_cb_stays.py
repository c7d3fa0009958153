"""Since when each sequence of a batch processor is admitted, and in which phase it is preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from preempt_harness import record
from preempt_harness.adapters.listening import phase_of
from preempt_harness.adapters.transformers_cb_log import BatchLog
from preempt_harness.adapters.transformers_cb_names import request_name, sequence_name


@dataclass(slots=True)
class _Stay:
    """One sequence since it was last admitted."""

    num_steps: int = 0
    num_chunks: int = 0
    is_return: bool = False


class Stays:
    """Follows admissions and preemptions, by the engine's names of sequences.

    Args:
        log: takes the events.
        token_budget: most tokens of a step.

    Attributes:
        forcing: a preemption comes from the harness.
    """

    def __init__(self, log: BatchLog, token_budget: int) -> None:
        self.forcing = False
        self._log = log
        self._budget = token_budget
        self._stays: dict[str, _Stay] = {}
        self._away: set[str] = set()

    def scheduled(self, state: Any, num_tokens: int) -> None:
        """The step computes the next so many tokens of a sequence."""
        start = state.position_offset
        stay = self._stays.setdefault(state.request_id, _Stay())
        stay.num_steps += 1
        stay.num_chunks += start < len(state.initial_tokens)
        seq = sequence_name(state.request_id)
        self._log.emit(record.Scheduled(self._log.step, seq, start, start + num_tokens))

    def admitted(self, engine_id: str, num_cached_tokens: int) -> None:
        """A sequence gets its first blocks."""
        self._stays[engine_id] = _Stay(is_return=engine_id in self._away)
        if engine_id in self._away:
            self._away.discard(engine_id)
            self._log.emit(
                record.Resumed(
                    self._log.step,
                    request_name(engine_id),
                    num_cached_tokens,
                    sequence_name(engine_id),
                )
            )

    def forked(self, engine_id: str) -> None:
        """A sequence begins as a copy of another."""
        self._stays[engine_id] = _Stay()

    def preempted(self, state: Any) -> record.Preempted:
        """A sequence is about to lose its blocks; the event is the caller's to emit."""
        self._away.add(state.request_id)
        return record.Preempted(
            step=self._log.step_of_change,
            request=request_name(state.request_id),
            mode="recompute",
            phase=self._phase(state),
            reason="forced" if self.forcing else "out_of_blocks",
            num_computed_tokens=state.position_offset,
            num_tokens=len(state.initial_tokens) + len(state.generated_tokens),
            seq=sequence_name(state.request_id),
        )

    def _phase(self, state: Any) -> str:
        stay = self._stays.get(state.request_id, _Stay())
        num_prompt = state._true_initial_tokens or len(state.initial_tokens)
        return phase_of(
            is_return=stay.is_return,
            num_steps=stay.num_steps,
            num_chunks=stay.num_chunks,
            num_left=len(state.initial_tokens) - state.position_offset,
            token_budget=self._budget,
            num_outputs=len(state.initial_tokens) - num_prompt + len(state.generated_tokens),
        )
