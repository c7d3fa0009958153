"""Drafts the exact model's own next tokens, some of them changed on purpose. For tests.

The exact model's logits are a closed form of the history, so what the target will choose is known;
which drafts are right is drawn per position, and a test says how many. Logits processors are left
out: where one changes the choice, the draft is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from preempt_engine.exact import ExactLogits, ReferenceSequence
from preempt_engine.sampling.sampler import SampledToken, SampleRequest, sample
from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_engine.spec_decode.proposer import DraftRequest, changed, is_kept
from preempt_engine.step import SchedulerOutput, SequenceKey


class ScriptedProposer:
    """Knows the exact model.

    Args:
        config: share of right drafts.
        vocab_size: of the exact model.
        num_ranks: tensor parallel size, of which the model depends.
    """

    needs_blocks = False

    def __init__(self, config: SpeculativeConfig, vocab_size: int, num_ranks: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._num_ranks = num_ranks
        self._histories: dict[SequenceKey, tuple[int, ReferenceSequence]] = {}

    def propose(self, step: SchedulerOutput, wanted: Seq[DraftRequest]) -> list[list[int]]:
        """See `Proposer.propose`. A history that the workers forget is forgotten here too."""
        for key in step.dropped:
            self._histories.pop(key, None)
        return [self._propose(item) for item in wanted]

    def known_keys(self) -> Iterable[SequenceKey]:
        """See `Proposer.known_keys`."""
        return self._histories

    def reset(self) -> None:
        """Forget all histories."""
        self._histories.clear()

    def close(self) -> None:
        """Nothing is held but histories."""
        self.reset()

    def _propose(self, item: DraftRequest) -> list[int]:
        sequence, config = item.sequence, self._config
        history = self._history(sequence.key, sequence.token_ids).copy()
        drafts: list[int] = []
        for index in range(item.limit):
            position = sequence.num_tokens + index
            token_id = self._choice(item, history.digest, position)
            if not is_kept(config.acceptance_rate, config.seed, sequence.key, position):
                token_id = changed(token_id, self._vocab_size)
            drafts.append(token_id)
            history.append(token_id)
        return drafts

    def _history(self, key: SequenceKey, token_ids: list[int]) -> ReferenceSequence:
        num_known, history = self._histories.get(key, (0, None))
        if history is None:
            history = ReferenceSequence(num_ranks=self._num_ranks)
        for token_id in token_ids[num_known:]:
            history.append(token_id)
        self._histories[key] = len(token_ids), history
        return history

    def _choice(self, item: DraftRequest, digest: int, position: int) -> int:
        """What the target chooses at the position."""
        request = SampleRequest(
            row=0,
            params=item.params,
            seed=item.seed,
            branch=item.sequence.key.branch,
            position=position,
            num_output_tokens=position - item.sequence.num_prompt_tokens,
            stop_ids=frozenset(),
        )
        (token,) = sample(ExactLogits([digest], self._vocab_size), [request])
        assert isinstance(token, SampledToken)  # nothing is forbidden here
        return token.token_id
