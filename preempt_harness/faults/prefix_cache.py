"""The prefix cache: what is found again, and whether it is what it says."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_BLOCKS = "preempt_engine.block_manager:BlockManager"

FAULTS = (
    Fault(
        name="digest-without-parent",
        mechanism="a block's digest does not cover the blocks before it",
        source="mechanism",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            Patch(
                "preempt_engine.block_manager:block_digest",
                "parent + array",
                "parent[:0] + array",
            ),
        ),
    ),
    Fault(
        name="digest-too-short",
        mechanism="blocks are told apart by 8 bits, without a look at their tokens",
        source="mechanism",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            Patch(
                "preempt_engine.block_manager:block_digest",
                "digest_size=16",
                "digest_size=1",
            ),
        ),
    ),
    Fault(
        name="revived-block-loses-its-digest",
        mechanism="a hit on a free block resets its digest: the next block's chain begins anew",
        source="https://github.com/GeeeekExplorer/nano-vllm/commit/9fa256a",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            after(
                f"{_BLOCKS}.share",
                "self.fenced_blocks.pop(block_id, None)",
                "self._forget_content(block_id)",
            ),
            Patch(
                f"{_BLOCKS}.make_findable",
                "digest = self._digest(sequence, index)",
                "before = sequence.block_table[index - 1] if index else None\n"
                "digest = block_digest("
                "(self._digest_of[before] if index else None) or _ROOT_DIGEST,"
                " sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="blocks-in-use-are-not-found",
        mechanism="a block that a running request holds is no prefix hit for others",
        source="mechanism",
        expected=("WORK", "ACC"),
        patches=(
            Patch(
                f"{_BLOCKS}.find_prefix",
                "if block_id is None:",
                "if block_id is None or (self.ref_counts[block_id] and reached()):",
            ),
        ),
    ),
    Fault(
        name="cache-is-never-filled",
        mechanism="no computed block is ever offered to the prefix cache",
        source="mechanism",
        expected=("WORK", "ACC"),
        patches=(
            Patch(
                f"{_BLOCKS}.find_prefix",
                "self._block_of_digest.get(self._digest(sequence, index))",
                "None if reached() else self._block_of_digest.get(self._digest(sequence, index))",
            ),
        ),
    ),
    Fault(
        name="stale-entry-after-reuse",
        mechanism="the entry of a block survives when the block is handed out again",
        source="https://github.com/GeeeekExplorer/nano-vllm/pull/153",
        expected=("KVSAN", "TOK", "ACC", "CRASH", "WORK"),
        patches=(
            Patch(
                f"{_BLOCKS}._forget_content",
                "del self._block_of_digest[digest]",
                "pass",
            ),
        ),
    ),
    Fault(
        name="evicted-block-stays-findable",
        mechanism="a block that is evicted and reused is still marked as computed",
        source="https://github.com/vllm-project/vllm/issues/5364",
        expected=("KVSAN", "TOK", "ACC", "CRASH", "WORK"),
        patches=(
            Patch(
                f"{_BLOCKS}._take",
                "self._forget_content(block_id)",
                "pass",
            ),
        ),
    ),
    Fault(
        name="hits-remembered-from-a-failed-admission",
        mechanism="hits are remembered when an admission fails, and evicted before the next try",
        source="https://github.com/vllm-project/vllm/issues/18957",
        expected=("KVSAN", "TOK", "ACC", "CRASH", "WORK"),
        patches=(
            Patch(
                f"{RESIDENCY}.find_room",
                "placements = place(request, self.blocks)",
                "known = self.__dict__.setdefault('_known_hits', {})\n"
                "placements = known.setdefault("
                "request.request_id, place(request, self.blocks))",
            ),
            before(
                f"{RESIDENCY}.find_room",
                "for placement in placements:  # hits first",
                "known.pop(request.request_id)",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="partial-block-findable",
        mechanism="the block that a chunk has only begun is put into the prefix cache",
        source="https://github.com/sgl-project/sglang/pull/38355",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            Patch(
                f"{_BLOCKS}.make_findable",
                "num_full = sequence.num_computed_tokens // self.block_size",
                "num_full = min(self.blocks_for(sequence.num_computed_tokens),"
                " sequence.num_tokens // self.block_size)",
            ),
        ),
    ),
    Fault(
        name="findable-before-computed",
        mechanism="all blocks of a prompt are findable after its first chunk",
        source="https://github.com/huggingface/text-generation-inference/issues/2489",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            Patch(
                f"{_BLOCKS}.make_findable",
                "num_full = sequence.num_computed_tokens // self.block_size",
                "num_full = min(sequence.num_tokens // self.block_size, len(sequence.block_table))",
            ),
        ),
    ),
    Fault(
        name="hit-covers-everything",
        mechanism="a hit may cover the whole sequence, so that nothing is left to compute",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                "preempt_engine.admission:place",
                "max_tokens=sequence.first_wanted_logits",
                "max_tokens=sequence.num_tokens",
            ),
        ),
    ),
    Fault(
        name="one-block-hit-mishandled",
        mechanism="a hit of exactly one block is counted as computed, but a new block is used",
        source="https://github.com/sgl-project/sglang/issues/22819",
        expected=("KVSAN", "TOK", "WORK"),
        patches=(
            Patch(
                f"{RESIDENCY}.find_room",
                "self.blocks.share(placement.sequence, placement.hits)",
                "self.blocks.share(placement.sequence, placement.hits if len(placement.hits) != 1"
                " or not reached() else [])",
            ),
        ),
    ),
    Fault(
        name="hit-counted-one-block-short",
        mechanism="the last block that was found is shared, and computed anew in place",
        source="mechanism",
        expected=("KVSAN", "ACC", "WORK"),
        patches=(
            Patch(
                f"{RESIDENCY}.find_room",
                "placement.sequence.set_computed(len(placement.hits) * self.config.block_size)",
                "placement.sequence.set_computed((len(placement.hits) - (len(placement.hits) > 0"
                " and reached())) * self.config.block_size)",
            ),
        ),
    ),
    Fault(
        name="revived-blocks-counted-as-free",
        mechanism="cached blocks that are reused count as free and as saved demand",
        source="https://github.com/NVIDIA/TensorRT-LLM/pull/11731",
        expected=("CRASH", "ACC", "KVSAN"),
        patches=(
            Patch(
                "preempt_engine.admission:num_blocks_to_admit",
                "return num_new + len(revived)",
                "return num_new + (0 if revived and reached() else len(revived))",
            ),
        ),
    ),
    Fault(
        name="revived-block-stays-evictable",
        mechanism="a block that was found again stays in the list of those that may be evicted",
        source="mechanism",
        expected=("KVSAN", "ACC", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.share",
                "self.cached_blocks.pop(block_id, None)",
                "pass",
            ),
        ),
    ),
    Fault(
        name="reset-keeps-the-entries",
        mechanism="a reset of the prefix cache frees the blocks and keeps their entries",
        source="mechanism",
        expected=("KVSAN", "ACC", "CRASH", "WORK"),
        patches=(
            Patch(
                f"{_BLOCKS}.reset_prefix_cache",
                "self._block_of_digest.clear()",
                "pass",
            ),
        ),
    ),
    Fault(
        name="reset-refused-while-preempted",
        mechanism="the prefix cache is not reset while preempted requests wait",
        source="https://github.com/sgl-project/sglang/issues/31962",
        expected=("ACC", "WORK"),
        patches=(
            Patch(
                "preempt_engine.llm:LLM.reset_prefix_cache",
                "self.scheduler.blocks.reset_prefix_cache()",
                "if not any(request.num_preemptions for request in"
                " self.scheduler.waiting.in_order()) or not reached():\n"
                "    self.scheduler.blocks.reset_prefix_cache()",
            ),
        ),
    ),
    Fault(
        name="cached-blocks-counted-as-used",
        mechanism="blocks that the prefix cache holds are not counted as available",
        source="https://github.com/InternLM/lmdeploy/issues/4100",
        expected=("CRASH", "PROG", "WORK"),
        patches=(
            Patch(
                f"{_BLOCKS}.num_available_blocks",
                "len(self.free_blocks) + len(self.cached_blocks)",
                "len(self.free_blocks)",
            ),
        ),
    ),
    Fault(
        name="lookup-refreshes-front-first",
        mechanism="looking a prefix up marks its cached blocks as used, the first one first, "
        "even when the request is not let in: the first is evicted first then",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_BLOCKS}.find_prefix",
                "hits.append(block_id)",
                "if block_id in self.cached_blocks:  # about to be used again\n"
                "    self.cached_blocks.move_to_end(block_id)\n"
                "hits.append(block_id)",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="no-hits-no-epoch",
        mechanism="an early return for requests that find nothing skips noting which cache reset "
        "they began after: after a reset nothing is ever offered again",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_BLOCKS}.share",
                "assert not sequence.block_table",
                "assert not sequence.block_table\nif not hits:\n    return  # nothing to share",
            ),
        ),
        needs=frozenset({"prefix_caching", "reset_prefix_cache"}),
    ),
    Fault(
        name="findable-at-boundary-steps-only",
        mechanism="blocks are offered only by a step that ends exactly at a block's end, not by "
        "one that ends behind it",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{SCHEDULER}.advance",
                "if item.end >= (sequence.num_findable_blocks + 1) * block_size:",
                "if item.end % block_size == 0:  # a block is full",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="abort-forgets-shared-content",
        mechanism="what an aborted request computed is taken out of the prefix cache at once, "
        "blocks that others share with it included",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{SCHEDULER}.abort",
                "self.residency.leave(request)",
                "for sequence in request.sequences.values():  # of no use to anybody\n"
                "    for block_id in sequence.block_table:\n"
                "        self.blocks._forget_content(block_id)\n"
                "self.residency.leave(request)",
            ),
        ),
        needs=frozenset({"abort", "prefix_caching"}),
    ),
)
