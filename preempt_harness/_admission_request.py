"""A request on its way through the admission simulator. Knows no pool and no policy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from preempt_harness.workload import RequestSpec


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request on its way. `tokens` holds prompt ids, then output ids or stand-ins for them."""

    spec: RequestSpec
    arrival: int
    tokens: list[Hashable]
    num_outputs_wanted: int
    truncated: bool
    outputs: Sequence[int]
    stand_in: Hashable
    num_sequences: int = 1
    num_computed: int = 0
    high_water: int = 0
    table: list[int] = field(default_factory=list)
    num_findable: int = 0
    num_resets: int = 0  # of the pool when its content was begun
    contents: list[Hashable] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.spec.num_prompt_tokens

    def work(self, start: int, end: int) -> int:
        """Tokens to compute for positions [start, end): those of the prompt once for all sequences,
        which are equally far."""
        num_own = max(0, end - max(start, self.spec.num_prompt_tokens))
        return end - start + (self.num_sequences - 1) * num_own

    def reach(self, start: int, budget: int) -> int:
        """One past the last position that so many tokens, from `start` on, bring it to."""
        known, prompt = len(self.tokens), self.spec.num_prompt_tokens
        end = min(known, start + budget)
        if self.num_sequences == 1 or end <= prompt:
            return end
        begin = max(start, prompt)
        rest = budget - (begin - start)
        # With less than a token for each sequence they take turns, which is not played.
        return min(known, max(begin + rest // self.num_sequences, start + 1))

    def num_findable_tokens(self, num_tokens: int) -> int:
        """Of its first tokens those that all sequences share, which others can find."""
        prompt = self.spec.num_prompt_tokens
        return num_tokens if self.num_sequences == 1 else min(num_tokens, prompt)

    def append_output(self) -> None:
        index = self.num_outputs
        token = self.outputs[index] if index < len(self.outputs) else (self.stand_in, index)
        self.tokens.append(token)


def stand_in_of(spec: RequestSpec) -> Hashable:
    """Names the text that a request will produce: equal where equal outputs are certain."""
    sampling = spec.sampling
    if sampling.temperature > 0 and sampling.seed is None:
        return spec.id
    noise = None if sampling.temperature == 0 else sampling.seed
    same = msgspec.structs.replace(sampling, max_tokens=0, logprobs=None, seed=noise)
    return (tuple(spec.prompt_token_ids), same)
