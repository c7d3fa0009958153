"""Requests and sequences: what the scheduler knows of the work. No pool, no policy.

    positions     0            num_prompt_tokens                      num_tokens
                  |--- prompt ---|------------- output ----------------|-- drafts --|
                  |------ KV in cache -----|---- still to compute -----|
                  0              num_computed_tokens

A sequence is one branch of a request. Prefill, chunk, decode and re-prefill are one case: positions
[num_computed_tokens, num_tokens) are still to compute, and a token is sampled when none is left.

Drafts are guesses at the tokens that follow. They are computed like any others, which may take
`num_computed_tokens` beyond `num_tokens`, until each position's own token is sampled: a draft that
is equal stays computed, the first that is not takes the count back to its position.

A request begins as one sequence. The others are forks: of the prompt, when the first token is
sampled (`n`), or of a beam that goes on in several ways (beam search).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from preempt_engine.sampling.params import BeamSearchParams, SamplingParams
from preempt_engine.step import SequenceKey

PLACEHOLDER = -1
"""In `draft_token_ids`: the token that a step under way will sample; no guess, and never wrong."""


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
        first_wanted_logits: position of the first logits that nobody has seen yet; with
            `num_tokens` none are wanted.
        full_logits: choosing or scoring its tokens takes whole rows of logits.
        num_computed_tokens: positions whose KV is in the cache, or in host blocks while the
            request is swapped out.
        block_table: block ids, in order of position.
        swapped_table: the block table as it was when the request was swapped out.
        block_digests: content digests of full blocks, filled in as needed by the block manager.
        num_findable_blocks: leading blocks that were offered to the prefix cache.
        cache_epoch: resets of the prefix cache before its content was begun.
        followers: (sequence, tokens): sequences of the same request whose first so many tokens
            this one computes for them, into blocks that they share.
        follows: waits for the sequence that it is a follower of.
        draft_token_ids: guesses at the tokens after `token_ids`; computed ones wait for their
            verification in the same step.
        drafts_in_flight: the same where steps are decided ahead: guesses that the step under way
            computes. None of `num_computed_tokens` are theirs before they are verified.
        newest_was_drafted: the newest token was a draft, so that its position is computed already.
        incarnation: counts the times it lost its blocks.
        num_sent_tokens, num_sent_blocks: what the workers already have.
        num_stale_tokens: rejected drafts that the workers have beyond `num_sent_tokens`, to be cut
            off.
        num_stale_blocks: entries that the workers have beyond `num_sent_blocks`, to be cut off.
        known_to_workers: False before the first step and after a preemption by recompute.
        max_computed_tokens: highest `num_computed_tokens` so far; below it is recomputation.
        num_prefill_tokens: tokens known when the present prefill began.
        num_chunks: steps that computed a part of those; a swap does not begin a new prefill.
        num_steps_since_admission: steps since the last admission, or swap-in.
    """

    # What every step touches comes first: then it lies together in memory.
    key: SequenceKey
    token_ids: list[int]
    num_prompt_tokens: int
    first_wanted_logits: int = 0
    full_logits: bool = True
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    follows: bool = False
    followers: tuple[tuple[Sequence, int], ...] = ()
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0
    num_stale_tokens: int = 0
    num_stale_blocks: int = 0
    known_to_workers: bool = False
    max_computed_tokens: int = 0
    num_findable_blocks: int = 0
    num_prefill_tokens: int = 0
    num_steps_since_admission: int = 0
    num_chunks: int = 0
    swapped_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    cache_epoch: int = 0
    incarnation: int = 0
    newest_was_drafted: bool = False
    drafts_in_flight: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_unverified_tokens(self) -> int:
        """Drafts that are computed and wait for the tokens of their positions."""
        if self.drafts_in_flight:
            return len(self.drafts_in_flight)
        if PLACEHOLDER in self.draft_token_ids:
            return 0
        return max(0, self.num_computed_tokens - len(self.token_ids))

    def append_token(self, token_id: int) -> None:
        """The sequence goes on with a token that was chosen from its last logits."""
        assert self.num_computed_tokens == len(self.token_ids)
        self.token_ids.append(token_id)
        self.newest_was_drafted = False

    def verify_draft(self, token_id: int) -> bool:
        """The sequence goes on with a token that was chosen for the position of its first draft.

        Returns:
            Whether it is the draft, so that its position is computed already.
        """
        assert self.num_computed_tokens > len(self.token_ids)
        self.token_ids.append(token_id)
        drafts = self.draft_token_ids
        if drafts[0] != token_id:  # what was computed for it and those behind it is of no use
            self.num_stale_tokens = len(drafts)
            self.draft_token_ids = []
            self.set_computed(self.num_tokens - 1)
            self.newest_was_drafted = False
            return False
        del drafts[0]
        self.newest_was_drafted = True
        self.num_sent_tokens += 1
        self.max_computed_tokens = max(self.max_computed_tokens, self.num_tokens)
        return True

    def accept_in_flight(self, token_id: int) -> None:
        """The sequence goes on with a token that is the first draft of the step under way."""
        assert self.drafts_in_flight[0] == token_id
        del self.drafts_in_flight[0]
        self.token_ids.append(token_id)
        self.newest_was_drafted = True
        self.num_computed_tokens += 1
        self.num_sent_tokens += 1
        self.max_computed_tokens = max(self.max_computed_tokens, self.num_tokens)

    def fill_placeholder(self, token_id: int) -> None:
        """The token has come for which a placeholder stood, in a step's message perhaps."""
        if self.num_computed_tokens > len(self.token_ids):
            self.num_sent_tokens += 1
        self.token_ids.append(token_id)
        self.newest_was_drafted = False
        del self.draft_token_ids[0]

    def plan_computed(self, num_computed_tokens: int) -> None:
        """A step is decided that will compute so many; it counts as computed for what follows."""
        assert num_computed_tokens <= len(self.token_ids) + len(self.draft_token_ids)
        self.num_computed_tokens = num_computed_tokens

    def set_computed(self, num_computed_tokens: int) -> None:
        """The one place where progress changes."""
        num_tokens = len(self.token_ids)
        assert 0 <= num_computed_tokens <= num_tokens + len(self.draft_token_ids), (
            f"sequence {self.key}: 0 <= {num_computed_tokens} <= {num_tokens} and "
            f"{len(self.draft_token_ids)} drafts does not hold"
        )
        self.num_computed_tokens = num_computed_tokens
        own = num_computed_tokens if num_computed_tokens < num_tokens else num_tokens
        if own > self.max_computed_tokens:
            self.max_computed_tokens = own

    def release_followers(self) -> None:
        """Let those go on whose tokens are computed by now."""
        waiting = []
        for follower, num_tokens in self.followers:
            if self.num_computed_tokens < num_tokens:
                waiting.append((follower, num_tokens))
            else:
                follower.set_computed(num_tokens)
                follower.follows = False
        self.followers = tuple(waiting)

    def fork(self, key: SequenceKey) -> Self:
        """A branch with the same history; its blocks are the block manager's business."""
        assert self.num_computed_tokens == self.num_tokens
        assert not self.draft_token_ids
        return type(self)(
            key=key,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            first_wanted_logits=self.first_wanted_logits,
            full_logits=self.full_logits,
            num_computed_tokens=self.num_computed_tokens,
            block_digests=list(self.block_digests),
            num_findable_blocks=self.num_findable_blocks,
            cache_epoch=self.cache_epoch,
            num_sent_tokens=self.num_sent_tokens,
            num_sent_blocks=self.num_sent_blocks,
            num_stale_tokens=self.num_stale_tokens,
            num_stale_blocks=self.num_stale_blocks,
            known_to_workers=self.known_to_workers,
            max_computed_tokens=self.max_computed_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_chunks=self.num_chunks,
            num_steps_since_admission=self.num_steps_since_admission,
        )

    def send_blocks_again(self, first: int) -> None:
        """Entries of the block table from `first` on are others than the workers have."""
        if first < self.num_sent_blocks:
            self.num_stale_blocks += self.num_sent_blocks - first
            self.num_sent_blocks = first

    def forget_cache(self) -> None:
        """KV and everything that refers to it is gone; tokens stay."""
        self.block_table = []
        self.swapped_table = []
        self.num_findable_blocks = 0
        self.followers = ()
        self.follows = False
        self.draft_token_ids = []
        self.newest_was_drafted = False
        self.drafts_in_flight = []
        self.incarnation += 1
        self.num_sent_tokens = 0
        self.num_sent_blocks = 0
        self.num_stale_tokens = 0
        self.num_stale_blocks = 0
        self.known_to_workers = False
        self.set_computed(0)


@dataclass(slots=True, eq=False)
class Request:
    """What the user submitted; the unit of admission and preemption.

    Attributes:
        request_id: unique among unfinished requests.
        arrival_index: counts every request of the engine.
        priority: the lower value is the more urgent.
        params: how to sample or search, and until when.
        seed: of the request's noise.
        sequences: its live branches by number; a branch that ended or was dropped is not there.
        sequence: the first of them; the last that there was when none is left.
        max_output_tokens: no branch gets more, by `max_tokens`, the model's length and the pool.
        num_seqs: sequences it counts for: `n` less the branches that ended, or the beam width.
        next_branch: number of the next fork; numbers are not used twice.
        score_from: the first position whose logits are wanted to score the token after it; None
            scores nothing.
        num_to_score: how many positions from there on.
        reads_prompt: rows of its prompt are wanted, or no token after it.
        host_blocks: while it is swapped out, block of a `swapped_table` -> host block with its
            content; None while it is not.
        num_preemptions: times it lost its blocks.
        num_cached_tokens: prefix hits at the first admission; None before it.
    """

    request_id: str
    arrival_index: int
    params: SamplingParams | BeamSearchParams
    seed: int
    sequences: dict[int, Sequence]
    sequence: Sequence
    max_output_tokens: int
    num_seqs: int
    priority: int = 0
    next_branch: int = 1
    score_from: int | None = None
    num_to_score: int = 0
    reads_prompt: bool = False
    host_blocks: dict[int, int] | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    @classmethod
    def create(
        cls,
        *,
        request_id: str,
        arrival_index: int,
        prompt_token_ids: Seq[int],
        params: SamplingParams | BeamSearchParams,
        seed: int,
        priority: int = 0,
        score_from: int | None = None,
        num_to_score: int = 0,
    ) -> Request:
        """A new request with one sequence."""
        num_prompt_tokens = len(prompt_token_ids)
        sequence = Sequence(
            key=SequenceKey(request_id),
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            first_wanted_logits=num_prompt_tokens - 1 if score_from is None else score_from,
            full_logits=score_from is not None or not params.argmax_suffices,
        )
        return cls(
            request_id=request_id,
            arrival_index=arrival_index,
            params=params,
            seed=seed,
            sequences={0: sequence},
            sequence=sequence,
            max_output_tokens=params.max_tokens,
            num_seqs=params.num_sequences,
            priority=priority,
            score_from=score_from,
            num_to_score=num_to_score,
            reads_prompt=score_from is not None or params.max_tokens == 0,
        )

    @property
    def last_position(self) -> int:
        """Of the longest output's last token, which is sampled and never computed."""
        return self.sequence.num_prompt_tokens + self.max_output_tokens - 1

    @property
    def precedence(self) -> tuple[int, int]:
        """The order in which requests are served, everywhere; no two have the same.

        A preemption does not change it: the request returns to its old place.
        """
        return self.priority, self.arrival_index
