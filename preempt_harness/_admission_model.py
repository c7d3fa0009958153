"""An engine's rules of admission, growth and preemption, as data an adapter declares. No engine."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from preempt_harness.errors import HarnessError
from preempt_harness.workload import RequestSpec

AdmissionPolicy = Literal["full_prompt", "full_fit", "chunk", "output_reserved", "greedy"]


class AdmissionModelError(HarnessError, ValueError):
    """An adapter declares an admission model that no engine can have."""


class AdmissionModel(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's rules of admission, growth and preemption.

    Common to all policies: running requests go first, in order of admission; when blocks lack, the
    request admitted last is preempted and nothing is admitted in that step; a preempted request
    returns to its place in arrival order; the head of the queue blocks those behind it. The
    beams of a request share the full blocks of its prompt, and come and go together; so do several
    outputs, unless they are `outputs_apart`.

    Attributes:
        policy: what admission asks of the pool.
            "full_prompt": blocks for all tokens known, taken at once.
            "full_fit": blocks for all tokens known must be free; a chunk takes its own.
            "chunk": blocks for the first chunk; later chunks may run out of blocks.
            "output_reserved": blocks for prompt and longest output, taken at once; such an engine
            never preempts.
            "greedy": one free block is enough; a chunk is cut to what the free blocks hold.
        block_size: tokens per block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most sequences that run at once; a request of more cannot run.
        watermark: share of the pool, in [0, 1), that admission leaves free while something runs.
        reserved_blocks: blocks of the pool that no request can have, such as a null block.
        lookahead_tokens: tokens beyond those scheduled for which a running request needs slots.
        draft_tokens: most drafts of a request that a step computes beyond its known tokens. A step
            then brings one token to so many and one more; drafts have what the known tokens of
            running requests leave of budget and blocks, and a request that is admitted beside
            others finds room for its first ones.
        drafts_first: a request's drafts take budget before the known tokens of those behind it, and
            admission leaves no room for drafts.
        last_token_needs_room: the pool must have room for a request's last token, which is never
            computed: such an engine checks its longest length against the pool.
        max_model_len: most tokens of a request, prompt and output; None is no limit.
        outputs_apart: each of several outputs is scheduled, evicted and brought back by itself, as
            if it were a request of its own.
        prefix_caching: full computed blocks are shared, and stay findable when they are freed.
        merges_equal_blocks: with prefix caching, a computed block is given up where an
            equal one is there.
        predicts: the engine does exactly what `simulate` plays, so that a trial without a plan
            can be held against it step by step.
    """

    policy: AdmissionPolicy = "full_prompt"
    block_size: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    watermark: float = 0.0
    reserved_blocks: int = 0
    lookahead_tokens: int = 0
    draft_tokens: int = 0
    drafts_first: bool = False
    last_token_needs_room: bool = False
    max_model_len: int | None = None
    outputs_apart: bool = False
    prefix_caching: bool = True
    merges_equal_blocks: bool = False
    predicts: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.policy in get_args(AdmissionPolicy), "policy", get_args(AdmissionPolicy)),
            (self.block_size >= 1, "block_size", "1 or more"),
            (self.max_num_batched_tokens >= 1, "max_num_batched_tokens", "1 or more"),
            (self.max_num_seqs >= 1, "max_num_seqs", "1 or more"),
            (0 <= self.watermark < 1, "watermark", "a share in [0, 1)"),
            (self.reserved_blocks >= 0, "reserved_blocks", "0 or more"),
            (self.lookahead_tokens >= 0, "lookahead_tokens", "0 or more"),
            (self.draft_tokens >= 0, "draft_tokens", "0 or more"),
            (self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "2 or more"),
        )
        for valid, name, expected in checks:
            if not valid:
                raise AdmissionModelError(
                    f"AdmissionModel({name}={getattr(self, name)!r}) is out of range.",
                    f"{name} must be {expected}.",
                )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_of(self, request: RequestSpec, num_tokens: int) -> int:
        """Blocks that a request holds whose every sequence has computed so many tokens, at most.

        Beyond the prompt every sequence has blocks of its own; beams may share some of those.
        """
        prompt, count = request.num_prompt_tokens, request.sampling.num_sequences
        if count == 1 or num_tokens <= prompt:
            return self.blocks_for(num_tokens)
        shared = prompt // self.block_size
        return shared + count * (self.blocks_for(num_tokens) - shared)

    def usable_blocks(self, num_blocks: int) -> int:
        """Blocks of the pool that requests can have."""
        return num_blocks - self.reserved_blocks

    def watermark_blocks(self, num_blocks: int) -> int:
        """Blocks that admission leaves free while something runs."""
        return math.floor(self.watermark * num_blocks)

    def with_lookahead(self, num_tokens: int) -> int:
        """Tokens for which a running request needs slots, to compute up to `num_tokens`."""
        total = num_tokens + self.lookahead_tokens
        return total if self.max_model_len is None else min(total, self.max_model_len)

    def output_limit(self, request: RequestSpec) -> int:
        """Most output tokens the request can have in a pool without end; 0 if it cannot run.

        One that asks for none counts as one that asks for one: either ends with its prompt.
        """
        if request.sampling.num_sequences > self.max_num_seqs:
            return 0
        limit = max(1, request.sampling.max_tokens)
        if self.max_model_len is None:
            return limit
        return max(0, min(limit, self.max_model_len - request.num_prompt_tokens))


def may_stop_early(request: RequestSpec) -> bool:
    """Whether something other than a length can end the request."""
    sampling = request.sampling
    return not sampling.ignore_eos or bool(sampling.stop) or bool(sampling.stop_token_ids)
