"""A second model drafts. Its KV lies in blocks of its own memory, under the target's block ids.

The draft model's runner follows the target's steps: it takes in the same deltas, copies, swaps and
poisons the same blocks, and computes the same tokens at the same positions. So its KV goes with the
target's whatever happens to a request: it is dropped, copied, found in the prefix cache and rebuilt
with it. Behind a step the runner computes the newest token and, one by one, its own drafts:

    target, step N       [ start ... d0 d1 d2 )           d0 was accepted, x stands in place of d1
    draft, with step N   [ start ... d0 x )               logits of x give e0
    draft, alone                         [ e0 [ e1 )      their logits give e1 and e2
    target, step N + 1                 [ x e0 e1 e2 )

What the runner knows beyond the target's workers, tokens or blocks, is cut off with its next delta
of the sequence. The draft model runs on the driver, on one rank, whatever the target runs on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.sampling.sampler import SampledToken, SampleRequest, sample
from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_engine.spec_decode.proposer import DraftRequest, changed, is_kept
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Executor, Runner


class DraftModelProposer:
    """Runs a draft model.

    Args:
        speculative: which model, and how many drafts.
        runner: of the draft model, with as many blocks as the target's pool.
    """

    needs_blocks = True

    def __init__(self, speculative: SpeculativeConfig, runner: Runner) -> None:
        self._config = speculative
        self._runner = runner
        # Tokens and blocks that the runner knows beyond the target's workers; rejected drafts, of
        # which only those know, count against it.
        self._surplus: dict[SequenceKey, tuple[int, int]] = {}

    def propose(self, step: SchedulerOutput, wanted: Seq[DraftRequest]) -> list[list[int]]:
        """Follow the target's step, and draft; see `Proposer.propose`."""
        by_key = {item.sequence.key: item for item in wanted}
        self._take_over(step)
        drafts: dict[SequenceKey, list[int]] = {item.sequence.key: [] for item in wanted}
        # Drafts may be written to blocks that the step has set free: first what is copied from
        # them to the host, and what sequences that have ended write to them.
        if step.swap_out:
            self._runner.execute(SchedulerOutput(step.step_id, swap_out=step.swap_out))
        first = [self._follow(item, None) for item in step.scheduled if item.key not in by_key]
        mirrored = msgspec.structs.replace(step, scheduled=first, swap_out=[], state_check=None)
        self._runner.execute(mirrored)
        newest = [
            self._follow(item, by_key[item.key]) for item in step.scheduled if item.key in by_key
        ]
        if newest:
            self._run(SchedulerOutput(step.step_id, scheduled=newest), by_key, drafts)
        for index in range(1, max((item.limit for item in wanted), default=1)):
            going_on = [item for item in wanted if item.limit > index]
            one_more = [self._next(item, drafts[item.sequence.key]) for item in going_on]
            self._run(SchedulerOutput(step.step_id, scheduled=one_more), by_key, drafts)
        return [drafts[item.sequence.key] for item in wanted]

    def known_keys(self) -> Iterable[SequenceKey]:
        """See `Proposer.known_keys`."""
        return self._surplus

    def reset(self) -> None:
        """Forget every sequence and block."""
        self._surplus.clear()
        self._runner.reset()

    def close(self) -> None:
        """Release weights and KV memory."""
        self._runner.close()

    def _take_over(self, step: SchedulerOutput) -> None:
        for parent, child in step.forks:
            self._surplus[child] = self._surplus.get(parent, (0, 0))
        for key in step.dropped:
            self._surplus.pop(key, None)

    def _follow(self, item: ScheduledSequence, wanted: DraftRequest | None) -> ScheduledSequence:
        """The target's row as the draft model computes it; with the newest token to draft from."""
        num_tokens, num_blocks = (0, 0) if item.reset else self._surplus.get(item.key, (0, 0))
        token_ids, block_ids, end = item.new_token_ids, item.new_block_ids, item.end
        surplus = 0, 0
        if wanted is not None:
            sequence = wanted.sequence
            num_rejected = sequence.num_stale_tokens
            newest = sequence.token_ids[sequence.num_sent_tokens :]
            ahead = sequence.block_table[sequence.num_sent_blocks :]
            token_ids = [*token_ids[: len(token_ids) - num_rejected], *newest]
            block_ids, end = [*block_ids, *ahead], sequence.num_tokens
            surplus = len(newest) - num_rejected, len(ahead)
        self._surplus[item.key] = surplus
        return msgspec.structs.replace(
            item,
            end=end,
            logits_start=end if wanted is None else end - 1,
            new_token_ids=token_ids,
            new_block_ids=block_ids,
            num_stale_tokens=item.num_stale_tokens + num_tokens,
            num_stale_blocks=item.num_stale_blocks + num_blocks,
            full_logits=True,
        )

    def _next(self, item: DraftRequest, drafts: list[int]) -> ScheduledSequence:
        """The latest draft, to be computed."""
        key = item.sequence.key
        num_tokens, num_blocks = self._surplus[key]
        self._surplus[key] = num_tokens + 1, num_blocks
        start = item.sequence.num_tokens + len(drafts) - 1
        return ScheduledSequence(key, start, start + 1, start, False, [drafts[-1]], [])

    def _run(
        self,
        step: SchedulerOutput,
        wanted: dict[SequenceKey, DraftRequest],
        drafts: dict[SequenceKey, list[int]],
    ) -> None:
        """Compute, and choose a draft from each row of logits."""
        logits = self._runner.execute(step)
        asked = [wanted[item.key] for item in step.scheduled if item.num_logits]
        requests = [
            self._sample_request(row, item, drafts[item.sequence.key])
            for row, item in enumerate(asked)
        ]
        for request, item, token in zip(requests, asked, sample(logits, requests), strict=True):
            assert isinstance(token, SampledToken)  # nothing is forbidden here
            key, config = item.sequence.key, self._config
            kept = is_kept(config.acceptance_rate, config.seed, key, request.position)
            token_id = token.token_id if kept else changed(token.token_id, logits.vocab_size)
            drafts[key].append(token_id)

    @staticmethod
    def _sample_request(row: int, item: DraftRequest, drafts: list[int]) -> SampleRequest:
        """With the target's own noise, so that an equal model drafts the target's choice."""
        sequence = item.sequence
        position = sequence.num_tokens + len(drafts)
        return SampleRequest(
            row=row,
            params=item.params,
            seed=item.seed,
            branch=sequence.key.branch,
            position=position,
            num_output_tokens=position - sequence.num_prompt_tokens,
            stop_ids=frozenset(),
        )


def make_draft_model(
    config: EngineConfig, speculative: SpeculativeConfig, target: Executor
) -> DraftModelProposer:
    """Build the draft model's runner.

    Args:
        config: of the engine.
        speculative: which model.
        target: whose blocks it follows.

    Raises:
        ConfigError: target and draft model do not share a vocabulary, or lengths.
        EngineError: whatever loading the model raises.
    """
    assert speculative.model is not None
    own = dataclasses.replace(
        config,
        model=speculative.model,
        tokenizer=None,
        speculative_config=None,
        tensor_parallel_size=1,
        num_kv_blocks=target.num_kv_blocks,
        kv_cache_memory_bytes=None,
        swap_space_blocks=target.num_host_blocks,
        swap_space_bytes=None,
        worker_hooks=(),
    )
    runner = _build_runner(own, speculative.num_hidden_layers)
    for name in ("vocab_size", "max_model_len"):
        mine, wanted = getattr(runner, name), getattr(target, name)
        if mine < wanted or (name == "vocab_size" and mine != wanted):
            runner.close()
            raise ConfigError(
                f"speculative_config: the draft model's {name} is {mine}, the target's {wanted}.",
                "Take a draft model of the same family, or lower max_model_len.",
            )
    return DraftModelProposer(speculative, runner)


def _build_runner(config: EngineConfig, num_hidden_layers: int | None) -> Runner:
    from preempt_engine.worker.build import build_runner

    return build_runner(config, num_hidden_layers=num_hidden_layers)
