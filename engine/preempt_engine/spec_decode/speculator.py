"""Has tokens drafted after each step, and hands them to the sequences.

Owns the choice of the proposer and of who is drafted for. Verification is no business of its own:
a step computes drafts like known tokens, and every position's token is sampled as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from preempt_engine.config import EngineConfig
from preempt_engine.errors import ConfigError
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sequence import Request
from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_engine.spec_decode.proposer import DraftRequest, Proposer
from preempt_engine.step import SchedulerOutput


class Speculator:
    """Drafts for one engine.

    Args:
        config: of the drafts.
        proposer: who drafts.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer) -> None:
        self.config = config
        self._proposer = proposer

    def draft(self, step: SchedulerOutput, requests: Seq[Request | None]) -> None:
        """After the step: draft for its sequences that go on.

        Args:
            step: whose tokens are applied.
            requests: whose each scheduled sequence is, None where it ended before.
        """
        self._proposer.follow(step)
        wanted = list(self._wanted(step, requests))
        if not wanted:
            return
        for item, drafts in zip(wanted, self._proposer.propose(wanted), strict=True):
            assert len(drafts) <= item.limit
            item.sequence.draft_token_ids = drafts

    def close(self) -> None:
        """Release what the proposer holds."""
        self._proposer.close()

    def _wanted(
        self, step: SchedulerOutput, requests: Seq[Request | None]
    ) -> Iterable[DraftRequest]:
        most = self.config.num_speculative_tokens
        for item, request in zip(step.scheduled, requests, strict=True):
            if request is None or not isinstance(request.params, SamplingParams):
                continue
            sequence = request.sequences.get(item.key.branch)
            if sequence is None or not sequence.known_to_workers:
                continue  # it has ended
            if sequence.num_computed_tokens != sequence.num_tokens - 1:
                continue
            # The token after the last draft is sampled too.
            limit = min(most, request.max_output_tokens - sequence.num_output_tokens - 1)
            if sequence.num_output_tokens and limit > 0:
                yield DraftRequest(sequence, request.params, request.seed, limit)


def make_speculator(config: EngineConfig, vocab_size: int) -> Speculator | None:
    """The speculator of a configuration; None without speculation.

    Args:
        config: of the engine.
        vocab_size: of the target.

    Raises:
        ConfigError: the method cannot draft for this model.
    """
    speculative = config.speculative_config
    if speculative is None:
        return None
    return Speculator(speculative, _make_proposer(config, speculative, vocab_size))


def _make_proposer(
    config: EngineConfig, speculative: SpeculativeConfig, vocab_size: int
) -> Proposer:
    if speculative.method == "ngram":
        from preempt_engine.spec_decode.ngram import NgramProposer

        return NgramProposer(speculative)
    if not config.is_exact:
        raise ConfigError(
            f'speculative_config: method="scripted" with model={config.model!r}.',
            'Only the exact model\'s tokens are known beforehand; use method="ngram".',
        )
    from preempt_engine.spec_decode.scripted import ScriptedProposer

    return ScriptedProposer(speculative, vocab_size, config.tensor_parallel_size)
