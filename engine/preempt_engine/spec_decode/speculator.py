"""Has tokens drafted after each step, and hands them to the sequences.

Owns the choice of the proposer and of who is drafted for. Verification is no business of its own:
a step computes drafts like known tokens, and every position's token is sampled as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sequence import Request
from preempt_engine.spec_decode.allowance import grant_blocks
from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_engine.spec_decode.proposer import DraftRequest, Proposer
from preempt_engine.step import SchedulerOutput, SequenceKey

if TYPE_CHECKING:
    from preempt_engine.executor.protocol import Executor
    from preempt_engine.scheduler import Scheduler


class Speculator:
    """Drafts for one engine.

    Args:
        config: of the drafts.
        proposer: who drafts.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer) -> None:
        self.config = config
        self._proposer = proposer

    def draft(
        self, step: SchedulerOutput, requests: Seq[Request | None], scheduler: Scheduler
    ) -> None:
        """After the step: draft for its sequences that go on.

        Args:
            step: whose tokens are applied.
            requests: whose each scheduled sequence is, None where it ended before.
            scheduler: may give blocks to them.
        """
        wanted = list(self._wanted(step, requests, scheduler))
        if wanted and self._proposer.needs_blocks:
            wanted = self._with_blocks(step, wanted, scheduler)
        proposed = self._proposer.propose(step, wanted)
        for item, drafts in zip(wanted, proposed, strict=True):
            assert len(drafts) <= item.limit
            scheduler.offer_drafts(item.sequence, drafts)

    def check_nothing_is_left(self, dropped: Iterable[SequenceKey]) -> None:
        """Assert that nothing is kept of sequences but of those, when all requests have ended.

        Args:
            dropped: those of which the proposer is told with the next step.
        """
        kept = set(self._proposer.known_keys()).difference(dropped)
        assert not kept, f"sequences {sorted(map(str, kept))} ended and are drafted for"

    def reset(self) -> None:
        """Forget every sequence, for another trial."""
        self._proposer.reset()

    def close(self) -> None:
        """Release what the proposer holds."""
        self._proposer.close()

    def _wanted(
        self, step: SchedulerOutput, requests: Seq[Request | None], scheduler: Scheduler
    ) -> Iterable[DraftRequest]:
        most = self.config.num_speculative_tokens
        for item, request in zip(step.scheduled, requests, strict=True):
            if request is None or not isinstance(request.params, SamplingParams):
                continue
            sequence = request.sequences.get(item.key.branch)
            if sequence is None or not sequence.known_to_workers:
                continue  # it has ended
            if not scheduler.wants_drafts(sequence):
                continue
            # The token after the last draft is sampled too.
            limit = min(most, request.max_output_tokens - sequence.num_output_tokens - 1)
            if sequence.num_output_tokens and limit > 0:
                yield DraftRequest(sequence, request.params, request.seed, limit)

    def _with_blocks(
        self, step: SchedulerOutput, wanted: list[DraftRequest], scheduler: Scheduler
    ) -> list[DraftRequest]:
        """Those who have blocks for drafts, each with as many drafts as it has blocks for."""
        num_before = [len(item.sequence.block_table) for item in wanted]
        limits = grant_blocks(
            scheduler.running, scheduler.blocks, [(item.sequence, item.limit) for item in wanted]
        )
        if scheduler.observer is not None:
            for item, first in zip(wanted, num_before, strict=True):
                if blocks := item.sequence.block_table[first:]:
                    key = item.sequence.key
                    scheduler.observer.blocks_allocated(step.step_id, key, blocks, 0)
        return [
            replace(item, limit=limit)
            for item, limit in zip(wanted, limits, strict=True)
            if limit > 0
        ]


def make_speculator(config: EngineConfig, target: Executor) -> Speculator | None:
    """The speculator of a configuration; None without speculation.

    Args:
        config: of the engine.
        target: who runs its model.

    Raises:
        ConfigError: the method cannot draft for this model.
        EngineError: whatever loading a draft model raises.
    """
    speculative = config.speculative_config
    if speculative is None:
        return None
    return Speculator(speculative, _make_proposer(config, speculative, target))


def _make_proposer(
    config: EngineConfig, speculative: SpeculativeConfig, target: Executor
) -> Proposer:
    if speculative.method == "ngram":
        from preempt_engine.spec_decode.ngram import NgramProposer

        return NgramProposer(speculative)
    if speculative.method == "draft_model":
        from preempt_engine.spec_decode.draft_model import make_draft_model

        return make_draft_model(config, speculative, target)
    if not config.is_exact:
        raise ConfigError(
            f'speculative_config: method="scripted" with model={config.model!r}.',
            'Only the exact model\'s tokens are known beforehand; use method="ngram".',
        )
    from preempt_engine.spec_decode.scripted import ScriptedProposer

    return ScriptedProposer(speculative, target.vocab_size, config.tensor_parallel_size)
