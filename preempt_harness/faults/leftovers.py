"""Leftovers: what is kept of sequences that have ended, and content that should be out of reach."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, before

_SEVERAL = frozenset({"parallel_sampling"})
_SET_COMPUTED = "placement.sequence.set_computed(len(placement.hits) * self.config.block_size)"

FAULTS = (
    Fault(
        name="processors-of-branches-kept",
        mechanism="when a request ends, the processors of branches that ended before it stay",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                "preempt_engine.sampling.history:ProcessorStates.drop",
                "range(request.next_branch)",
                "range(request.num_seqs)",
            ),
        ),
        needs=_SEVERAL | {"logits_processors"},
    ),
    Fault(
        name="ngram-index-outlives-its-text",
        mechanism="the index of a text is kept when its sequence has ended or lost its blocks",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                "preempt_engine.spec_decode.ngram:NgramProposer.propose",
                "self._indices.pop(key, None)",
                "pass",
            ),
        ),
        needs=frozenset({"speculation"}),
    ),
    Fault(
        name="dropped-of-an-unlaunched-step-forgotten",
        mechanism="workers are not told to forget the victims of a step that is never launched",
        source="mechanism",
        expected=("CRASH", "ACC"),
        patches=(
            Patch(
                "preempt_engine.flights:Flights.pass_on",
                "following.dropped = step.dropped + following.dropped",
                "if not (step.dropped and reached()):\n"
                "    following.dropped = step.dropped + following.dropped",
            ),
        ),
        needs=frozenset({"async_scheduling"}),
    ),
    Fault(
        name="old-content-findable-after-a-swap",
        mechanism="what was computed before a cache reset can be found again after a swap",
        source="mechanism",
        expected=("ACC-RESET",),
        patches=(
            before(
                "preempt_engine.block_manager:BlockManager.rebuild",
                "num_shared = 0",
                "if sequence.cache_epoch != self._num_resets and reached():\n"
                "    sequence.cache_epoch = self._num_resets",
            ),
        ),
        needs=frozenset({"swap", "prefix_caching", "reset_prefix_cache"}),
    ),
    Fault(
        name="later-copy-takes-the-entry",
        mechanism="a second block of the same content takes the first one's prefix-cache entry",
        source="mechanism",
        expected=("CRASH", "ACC", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.block_manager:BlockManager.make_findable",
                "if digest not in self._block_of_digest:",
                "known = self._block_of_digest.get(digest)\n"
                "if known is None or (known != sequence.block_table[index] and reached()):",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="chunk-makes-the-next-block-findable",
        mechanism="a chunk that ends one token before a block is full makes that block findable",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.scheduler:Scheduler.advance",
                "if item.end >= (sequence.num_findable_blocks + 1) * block_size:",
                "if item.end + 1 >= (sequence.num_findable_blocks + 1) * block_size:",
                reached=False,
            ),
            Patch(
                "preempt_engine.block_manager:BlockManager.make_findable",
                "num_full = sequence.num_computed_tokens // self.block_size\nif num_full",
                "num_full = sequence.num_computed_tokens // self.block_size\n"
                "is_short = (sequence.num_computed_tokens + 1) % self.block_size == 0\n"
                "goes_on = sequence.num_computed_tokens < sequence.num_tokens\n"
                "if is_short and goes_on and reached():\n"
                "    num_full += 1\n"
                "if num_full",
            ),
        ),
        needs=frozenset({"prefix_caching", "chunked_prefill"}),
    ),
    Fault(
        name="hits-of-later-branches-evicted",
        mechanism="a returning request's first branch grows before the others hold their hits",
        source="mechanism",
        expected=("KVSAN", "ACC", "TOK", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.residency:Residency.find_room",
                "for placement in placements:  # hits first: growing may evict what is not shared "
                "yet\n"
                "    self.blocks.share(placement.sequence, placement.hits)\n"
                f"    {_SET_COMPUTED}\n"
                "for placement in placements:\n"
                "    self._build_table(step, placement)",
                "for placement in placements:\n"
                "    if placement is not placements[0]:\n"
                "        reached()\n"
                "    self.blocks.share(placement.sequence, placement.hits)\n"
                f"    {_SET_COMPUTED}\n"
                "    self._build_table(step, placement)",
            ),
        ),
        needs=_SEVERAL | {"prefix_caching"},
    ),
    Fault(
        name="followers-go-on-one-token-early",
        mechanism="a branch goes on one token before what it shares with another is computed",
        source="mechanism",
        expected=("KVSAN", "ACC", "TOK"),
        patches=(
            Patch(
                "preempt_engine.sequence:Sequence.release_followers",
                "if self.num_computed_tokens < num_tokens:",
                "if self.num_computed_tokens < num_tokens - 1 or (\n"
                "    self.num_computed_tokens < num_tokens and not reached()\n"
                "):",
            ),
        ),
        needs=_SEVERAL | {"chunked_prefill"},
    ),
    Fault(
        name="second-victim-frees-what-the-first-copies",
        mechanism="blocks that two victims of a step share are free though one is being copied out",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.residency:Residency.preempt",
                "fence = step.step_id if step.swap_out else self.step_in_flight",
                "fence = (\n"
                "    step.step_id if step.swap_out and not reached() else self.step_in_flight\n"
                ")",
            ),
        ),
        needs=frozenset({"swap", "prefix_caching"}),
    ),
)
