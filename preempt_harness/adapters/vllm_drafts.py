"""Drafts on the worker that stands behind vLLM's scheduler: how many, and who proposes them.

A trial's `speculative_config` says so in the embedded engine's terms. The worker always proposes as
many drafts as were agreed, as vLLM's model runner V2 does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from preempt_engine.exact import ReferenceSequence
from preempt_engine.spec_decode.config import SpeculativeConfig
from preempt_harness.adapters.exact_workers import VOCAB_SIZE
from preempt_harness.adapters.vllm_runner import Proposer

METHODS = ("scripted", "ngram")


def num_drafts_of(config: Mapping[str, Any] | None) -> int:
    """Drafts per request and step; 0 without speculation."""
    return 0 if config is None else int(config["num_speculative_tokens"])


def make_proposer(config: Mapping[str, Any] | None, seed: int) -> Proposer:
    """Who drafts.

    Args:
        config: `EngineSettings.speculative_config`, of one of `METHODS`.
        seed: of the engine.

    Raises:
        preempt_engine.errors.ConfigError: a key is unknown, or a value is out of range.
    """
    if config is None:
        return lambda name, token_ids: []
    parsed = SpeculativeConfig.from_mapping(config)
    if parsed.method == "ngram":
        return _Lookup(parsed).propose
    return _Script(parsed, seed).propose


class _Script:
    """Drafts that are right with some probability; a function of seeds, request and position."""

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        self._config = config
        self._seed = f"{seed}/{config.seed}"

    def propose(self, name: str, token_ids: Sequence[int]) -> list[int]:
        source = random.Random(f"{self._seed}/{name}/{len(token_ids)}")
        reference = ReferenceSequence(token_ids)
        drafts = []
        for _ in range(self._config.num_speculative_tokens):
            token = reference.digest % VOCAB_SIZE
            is_right = source.random() < self._config.acceptance_rate
            drafts.append(token if is_right else (token + 1) % VOCAB_SIZE)
            reference.append(drafts[-1])
        return drafts


class _Lookup:
    """What followed the longest end of the text that occurs earlier, of several places the latest.

    Where that is too little, or nothing, the last token is repeated: a guess like any other.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._count = config.num_speculative_tokens
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)

    def propose(self, name: str, token_ids: Sequence[int]) -> list[int]:
        found = self._continuation(list(token_ids))
        return found + [token_ids[-1]] * (self._count - len(found))

    def _continuation(self, token_ids: list[int]) -> list[int]:
        for size in self._sizes:
            wanted = token_ids[-size:]
            for end in range(len(token_ids) - 1, size - 1, -1):
                if token_ids[end - size : end] == wanted:
                    return token_ids[end : end + self._count]
        return []
