"""The part of vLLM's model runner (V2) that turns a `SchedulerOutput` into rows, without a GPU.

Knows what the real one is told and nothing else: a request's token ids when it is admitted, its
new blocks, how many tokens to compute. What it sampled, accepted and drafted is its own to
remember. The slots of a step's inputs that nobody fills hold `STALE`, as a buffer on the device
holds whatever an earlier step left there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from preempt_harness.adapters.exact_workers import Row, slots_of

STALE = -1
Proposer = Callable[[str, Sequence[int]], list[int]]
"""Request and its tokens -> draft tokens."""


class RunnerStateError(RuntimeError):
    """The runner is handed a step that its state does not allow to compute."""


@dataclass
class _State:
    token_ids: list[int]
    prefill_len: int
    num_computed: int
    table: list[int]
    drafts: list[int] = field(default_factory=list)


@dataclass
class Launched:
    """One step on its way.

    Attributes:
        output: what the scheduler sent.
        rows: one per request, in the order of `num_scheduled_tokens`.
        sampled: request -> tokens that it sampled; none within a chunked prefill.
        rejected: request -> drafts that were not accepted.
    """

    output: Any
    rows: list[Row]
    sampled: dict[str, list[int]] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)


class ModelRunner:
    """State of all requests on the worker.

    Args:
        block_size: tokens per block.
        num_drafts: draft tokens per request and step; 0 without speculation.
        propose: makes them.
    """

    def __init__(self, block_size: int, num_drafts: int, propose: Proposer) -> None:
        self._block_size = block_size
        self._num_drafts = num_drafts
        self._propose = propose
        self._states: dict[str, _State] = {}

    def launch(self, output: Any) -> Launched:
        """Take in what the scheduler sent, and make the rows of the step.

        Raises:
            RunnerStateError: a request is unknown, or has no block for a position.
        """
        for name in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            self._states.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._states[new.req_id] = _State(
                token_ids=list(new.prefill_token_ids),
                prefill_len=len(new.prefill_token_ids),
                num_computed=new.num_computed_tokens,
                table=list(new.block_ids[0]),
                drafts=[0] * self._num_drafts,
            )
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None:
                self._state(name).table += blocks[0]
        return Launched(output, [self._row(name, output) for name in output.num_scheduled_tokens])

    def take_tokens(self, launched: Launched, greedy: Sequence[Sequence[int]]) -> None:
        """Accept drafts and remember what was sampled.

        Args:
            launched: the step.
            greedy: per row, the best token after each position that gives logits.
        """
        for row, best in zip(launched.rows, greedy, strict=True):
            name = row.seq.rpartition(".")[0]
            state = self._states[name]
            sampled: list[int] = []
            if row.read_len >= state.prefill_len:
                drafts = row.token_ids[len(row.token_ids) - len(best) + 1 :]
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == best[accepted]:
                    accepted += 1
                sampled = list(best[: accepted + 1])
                launched.rejected[name] = len(best) - len(sampled)
            launched.sampled[name] = sampled
            state.token_ids += sampled
            state.num_computed = row.read_len - launched.rejected.get(name, 0)
            if self._num_drafts:
                state.drafts = self._propose(name, state.token_ids)

    def drafts(self, launched: Launched) -> dict[str, list[int]]:
        """What was drafted behind a step: request -> tokens."""
        return {name: list(self._states[name].drafts) for name in launched.sampled}

    def _state(self, name: str) -> _State:
        if name not in self._states:
            raise RunnerStateError(f"{name} is scheduled, and the runner was never told its tokens")
        return self._states[name]

    def _row(self, name: str, output: Any) -> Row:
        state = self._state(name)
        num_tokens = output.num_scheduled_tokens[name]
        num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        start, end = state.num_computed, state.num_computed + num_tokens
        if num_tokens < num_drafts + 1:
            raise RunnerStateError(
                f"{name} is given {num_tokens} tokens, fewer than its {num_drafts} drafts and one"
            )
        if end > len(state.table) * self._block_size:
            raise RunnerStateError(
                f"{name} is to compute positions [{start}, {end}), and its block table has "
                f"{len(state.table)} blocks of {self._block_size}"
            )
        token_ids = [STALE] * num_tokens
        if start < state.prefill_len:
            known = state.token_ids[start : min(end, state.prefill_len)]
            token_ids[: len(known)] = known
        if end > state.prefill_len:
            first = num_tokens - num_drafts - 1
            if start + first >= state.prefill_len:
                token_ids[first] = state.token_ids[-1]
            token_ids[first + 1 :] = state.drafts[:num_drafts]
        return Row(
            seq=f"{name}.0",
            start=start,
            token_ids=token_ids,
            slots=slots_of(state.table, start, end, self._block_size),
            table=list(state.table),
            read_len=end,
            num_logits=num_drafts + 1,
        )
