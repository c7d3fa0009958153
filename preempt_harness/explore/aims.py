"""Trials that aim at things which happen together. Each aim changes a drawn trial; no engine runs.

    followers    prompts that begin with another request's text, up to a block of its outputs; it
                 ends with a block, by its length or by a stop token
    limits       min_tokens, stop tokens and max_tokens close together within outputs, which drafts
                 run across
    ends         requests that end one by one, with a block or with the first token of one, while
                 steps are decided ahead and drafts take blocks
    want         one request or two, decided ahead, that get no block for long
    both ways    more and less urgent requests swapped out and in, with swap space for few blocks
    all out      everybody swapped out at once, for which there is swap space or not, and newcomers
    at once      some lose their blocks in one step, in different modes, when others need blocks
    urgent       urgent ones that come one by one while others grow, whose victims are swapped
    just enough  some begin a block in one step, after others came who hold a block each
    meanwhile    who stays begins a block while the victims of an urgent one are copied
    cut off      urgent ones with a text of which somebody has the end, and nobody the beginning
    own drafts   the target drafts for itself, while blocks are copied, swapped and computed anew
    under way    requests swapped out while drafts of theirs, or ends of outputs, are under way
    half back    requests that lose their blocks again before they have come back wholly
    old content  a cache reset while somebody with a text that others come with later runs or waits
    crowd        many requests that grow at once in a pool for some, of engines whose victims are
                 the last that were let in: by priority that may be anybody
    same text    prompts of one text, cut into chunks, whose readers lose their blocks on the way
    begun alike  more and less urgent ones of one beginning, or decided ahead, in little room
    alike below  urgent ones that come with the text of less urgent ones, beside equals
    calls        batches and streams whose requests lose their blocks, or are given up, on the way
    long         long outputs, each token of which depends on all before it, lost near their end
    sharers      several outputs that begin a block at once, beside one that shares their prompt

What an engine is not capable of is left out; an aim of which nothing would be left is not drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, KnowsOutputs
from preempt_harness.explore._aimed import Aimed
from preempt_harness.explore._aims_at_calls import calls
from preempt_harness.explore._aims_at_moments import at_once, cut_off, just_enough, meanwhile
from preempt_harness.explore._aims_at_moves import half_back, own_drafts, under_way
from preempt_harness.explore._aims_at_outputs import followers, limits, long_outputs
from preempt_harness.explore._aims_at_scarcity import (
    all_out,
    both_ways,
    crowd,
    ends,
    urgent,
    want,
)
from preempt_harness.explore._aims_at_texts import (
    alike_below,
    begun_alike,
    old_content,
    same_text,
    sharers,
)
from preempt_harness.plan import PreemptionPlan


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """One of them.

    Attributes:
        apply: changes a trial.
        needed: capabilities without which nothing would be left of it.
        at_outputs: whether outputs must be known beforehand.
        weight: how often it is drawn, in proportion to others; more if what it is for seldom
            happens in its trials.
    """

    apply: Callable[[random.Random, Aimed, EngineAdapter], Aimed]
    needed: frozenset[str]
    at_outputs: bool = False
    weight: int = 2

    def suits(self, adapter: EngineAdapter) -> bool:
        """Whether the engine is capable of it."""
        known = isinstance(adapter, KnowsOutputs) or not self.at_outputs
        return known and self.needed <= adapter.capabilities


def aim(
    source: random.Random, trial: Aimed, adapter: EngineAdapter, *, planned: bool = True
) -> Aimed:
    """Apply one of the aims that the engine is capable of, if there is any.

    Args:
        source: of the draws.
        trial: what was drawn so far.
        adapter: of the engine.
        planned: whether the trial may have a plan.
    """
    chosen = _chosen(str(source.random()), adapter)
    if chosen is None:
        return trial
    aimed = chosen.apply(source, trial, adapter)
    actions = tuple(
        action
        for action in aimed.actions
        if planned and PreemptionPlan([action]).capabilities <= adapter.capabilities
    )
    return msgspec.structs.replace(aimed, actions=actions)


def _chosen(seed: str, adapter: EngineAdapter) -> Aim | None:
    """One of the aims that the engine is capable of, in proportion to their weights.

    Each draws a time of its own, of which the earliest counts, so that another weight, or one aim
    more, changes no trial but those that it takes or leaves.
    """
    times = {
        name: random.Random(f"{seed}/{name}").expovariate(candidate.weight)
        for name, candidate in AIMS.items()
        if candidate.suits(adapter)
    }
    return AIMS[min(times, key=times.__getitem__)] if times else None


AIMS = {
    "followers": Aim(
        apply=followers,
        needed=frozenset({protocol.PREFIX_CACHING, protocol.STOP_TOKENS}),
        at_outputs=True,
        weight=3,
    ),
    "limits": Aim(
        apply=limits,
        needed=frozenset({protocol.STOP_TOKENS, protocol.MIN_TOKENS}),
        at_outputs=True,
    ),
    "ends": Aim(apply=ends, needed=frozenset({protocol.STEPPED})),
    "want": Aim(apply=want, needed=frozenset({protocol.STEPPED, protocol.HOLD_BLOCKS}), weight=4),
    "both ways": Aim(
        apply=both_ways,
        needed=frozenset({protocol.STEPPED, protocol.SWAP, protocol.PREEMPT}),
        weight=5,
    ),
    "all out": Aim(
        apply=all_out, needed=frozenset({protocol.STEPPED, protocol.SWAP, protocol.PREEMPT})
    ),
    "at once": Aim(apply=at_once, needed=frozenset({protocol.STEPPED, protocol.PREEMPT}), weight=8),
    "crowd": Aim(apply=crowd, needed=frozenset({protocol.STEPPED, protocol.QUEUE_ORDER}), weight=8),
    "urgent": Aim(apply=urgent, needed=frozenset({protocol.STEPPED, protocol.PRIORITY}), weight=4),
    "just enough": Aim(apply=just_enough, needed=frozenset({protocol.STEPPED}), weight=5),
    "meanwhile": Aim(
        apply=meanwhile,
        needed=frozenset({protocol.STEPPED, protocol.PRIORITY, protocol.SWAP}),
        weight=5,
    ),
    "cut off": Aim(
        apply=cut_off,
        needed=frozenset(
            {
                protocol.STEPPED,
                protocol.PREEMPT,
                protocol.SWAP,
                protocol.PREFIX_CACHING,
                protocol.PRIORITY,
            }
        ),
        weight=5,
    ),
    "own drafts": Aim(
        apply=own_drafts,
        needed=frozenset({protocol.STEPPED, protocol.SPECULATION, protocol.PREEMPT}),
        weight=1,
    ),
    "under way": Aim(
        apply=under_way,
        needed=frozenset({protocol.STEPPED, protocol.ASYNC_SCHEDULING, protocol.PREEMPT}),
        weight=7,
    ),
    "half back": Aim(
        apply=half_back,
        needed=frozenset({protocol.STEPPED, protocol.PREEMPT, protocol.CHUNKED_PREFILL}),
        weight=4,
    ),
    "old content": Aim(
        apply=old_content,
        needed=frozenset(
            {
                protocol.STEPPED,
                protocol.PREEMPT,
                protocol.PREFIX_CACHING,
                protocol.RESET_PREFIX_CACHE,
            }
        ),
    ),
    "same text": Aim(
        apply=same_text,
        needed=frozenset(
            {
                protocol.STEPPED,
                protocol.PREEMPT,
                protocol.PREFIX_CACHING,
                protocol.CHUNKED_PREFILL,
                protocol.RECOMPUTE,
            }
        ),
    ),
    "begun alike": Aim(
        apply=begun_alike,
        needed=frozenset({protocol.STEPPED, protocol.PREFIX_CACHING}),
        weight=5,
    ),
    "alike below": Aim(
        apply=alike_below,
        needed=frozenset({protocol.STEPPED, protocol.PREFIX_CACHING, protocol.PRIORITY}),
        weight=8,
    ),
    "sharers": Aim(
        apply=sharers,
        needed=frozenset(
            {
                protocol.STEPPED,
                protocol.PREFIX_CACHING,
                protocol.PARALLEL_SAMPLING,
                protocol.SAMPLING,
            }
        ),
        weight=6,
    ),
    "long": Aim(
        apply=long_outputs,
        needed=frozenset({protocol.STEPPED, protocol.PREEMPT, protocol.PENALTIES}),
        weight=1,
    ),
    "calls": Aim(
        apply=calls,
        needed=frozenset({protocol.STEPPED, protocol.PREEMPT, protocol.OWN_LOOP}),
        weight=6,
    ),
}
"""By name."""
