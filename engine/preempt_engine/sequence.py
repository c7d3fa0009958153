"""Requests and sequences: what the scheduler knows of the work. No pool, no policy.

    positions     0            num_prompt_tokens                      num_tokens
                  |--- prompt ---|------------- output ----------------|
                  |------ KV in cache -----|---- still to compute -----|
                  0              num_computed_tokens

A sequence is one branch of a request. Prefill, chunk, decode and re-prefill are one case: positions
[num_computed_tokens, num_tokens) are still to compute, and a token is sampled when none is left.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from preempt_engine.sampling.params import SamplingParams
from preempt_engine.step import SequenceKey


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted request is WAITING again, with its tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One branch of a request.

    Attributes:
        key: (request id, branch).
        token_ids: prompt and output.
        num_prompt_tokens: the first so many are the prompt.
        num_computed_tokens: positions whose KV is in the cache.
        block_table: block ids, in order of position.
        block_digests: content digests of full blocks, filled in as needed by the block manager.
        num_findable_blocks: leading blocks that were offered to the prefix cache.
        num_sent_tokens, num_sent_blocks: what the workers already have.
        known_to_workers: False before the first step and after a preemption.
        max_computed_tokens: highest `num_computed_tokens` so far; below it is recomputation.
    """

    key: SequenceKey
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_findable_blocks: int = 0
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0
    known_to_workers: bool = False
    max_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def set_computed(self, num_computed_tokens: int) -> None:
        """The one place where progress changes."""
        assert 0 <= num_computed_tokens <= self.num_tokens, (
            f"sequence {self.key}: 0 <= {num_computed_tokens} <= {self.num_tokens} does not hold"
        )
        self.num_computed_tokens = num_computed_tokens
        self.max_computed_tokens = max(self.max_computed_tokens, num_computed_tokens)

    def forget_cache(self) -> None:
        """KV and everything that refers to it is gone; tokens stay."""
        self.block_table = []
        self.num_findable_blocks = 0
        self.num_sent_tokens = 0
        self.num_sent_blocks = 0
        self.known_to_workers = False
        self.set_computed(0)


@dataclass(slots=True, eq=False)
class Request:
    """What the user submitted; the unit of admission and preemption.

    Attributes:
        request_id: unique among unfinished requests.
        arrival_index: counts every request of the engine; the order of the queue.
        params: how to sample, and until when.
        seed: of the request's noise.
        sequences: its branches.
        score_from: for scoring, the first position whose logits are wanted; None generates.
        full_logits: choosing or scoring its tokens takes whole rows of logits.
        num_preemptions: times it lost its blocks.
        num_cached_tokens: prefix hits at the first admission; None before it.
        num_steps_since_admission: since the last admission.
        num_prefill_tokens: tokens known at the last admission, all of them to be (re)computed.
        num_chunks: steps that computed a part of those since the last admission.
    """

    request_id: str
    arrival_index: int
    params: SamplingParams
    seed: int
    sequences: list[Sequence]
    score_from: int | None = None
    full_logits: bool = True
    num_scored: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    num_steps_since_admission: int = 0
    num_prefill_tokens: int = 0
    num_chunks: int = 0

    @classmethod
    def create(
        cls,
        *,
        request_id: str,
        arrival_index: int,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        seed: int,
        score_from: int | None = None,
    ) -> Request:
        """A new request with one sequence."""
        sequence = Sequence(
            key=SequenceKey(request_id),
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
        )
        return cls(
            request_id=request_id,
            arrival_index=arrival_index,
            params=params,
            seed=seed,
            sequences=[sequence],
            score_from=score_from,
            full_logits=score_from is not None or not params.argmax_suffices,
        )

    @property
    def sequence(self) -> Sequence:
        """The first branch."""
        return self.sequences[0]

    @property
    def first_wanted_logits(self) -> int:
        """Position of the first logits that nobody has seen yet."""
        if self.score_from is not None:
            return self.score_from + self.num_scored
        return self.sequence.num_tokens - 1
