"""Room: blocks, places and swap space that are there and are not used, or are taken for nothing."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import SCHEDULER

_SWAPPER = "preempt_engine.swapping:Swapper"
_PLACE = "preempt_engine.admission:place"
_HITS = "hits = blocks.find_prefix(sequence, max_tokens=sequence.first_wanted_logits)"
_SEVERAL = frozenset({"parallel_sampling"})

FAULTS = (
    Fault(
        name="ended-branches-of-victims-keep-their-places",
        mechanism="a branch that ends after a preemption still counts for the limit of sequences",
        source="mechanism",
        expected=("WORK-IDLE", "WORK-PREDICTION"),
        patches=(
            Patch(
                "preempt_engine.branches:Branches.end",
                "request.num_seqs -= 1",
                "if not (request.num_preemptions and reached()):\n    request.num_seqs -= 1",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="spare-blocks-doubled-on-return",
        mechanism="a request that comes back must leave twice as many blocks free as a new one",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            before(
                f"{SCHEDULER}._admit",
                "num_available = self.blocks.num_available_blocks - num_spare",
                "if request.num_preemptions and num_spare and reached():\n    num_spare *= 2",
            ),
        ),
        needs=frozenset({"watermark"}),
    ),
    Fault(
        name="swap-space-counted-per-branch",
        mechanism="shared blocks count once for each branch when swap space is looked for",
        source="mechanism",
        expected=("WORK-RECOMPUTE",),
        patches=(
            Patch(
                f"{_SWAPPER}.can_swap_out",
                "return 0 < len(self._computed_blocks(request)) <= len(self.host.free_blocks)",
                "needed, free = len(self._computed_blocks(request)), len(self.host.free_blocks)\n"
                "counted = sum(\n"
                "    self.blocks.blocks_for(sequence.num_computed_tokens)\n"
                "    for sequence in request.sequences.values()\n"
                ")\n"
                "if needed <= free < counted and reached():\n"
                "    return False\n"
                "return 0 < needed <= free",
            ),
        ),
        needs=_SEVERAL | {"swap"},
    ),
    Fault(
        name="one-victim-too-many",
        mechanism="when the victims' blocks are exactly enough, one more is preempted",
        source="mechanism",
        expected=("WORK",),
        patches=(
            before(
                f"{SCHEDULER}._make_room",
                "return True",
                "if self.running[-1] is not request and (\n"
                "    num_blocks == self.blocks.num_available_blocks and reached()\n"
                "):\n"
                '    self._preempt(step, choose_victim(self.running), "out_of_blocks")',
            ),
        ),
    ),
    Fault(
        name="urgent-newcomer-spares-cached-blocks",
        mechanism="a more urgent request evicts others though cached blocks would do",
        source="mechanism",
        expected=("WORK",),
        patches=(
            after(
                "preempt_engine.victims:victims_for",
                "fits = num_wanted + sum(now[:survivors]) <= blocks.num_available_blocks",
                "if fits and not victims and running[-1].priority > newcomer.priority:\n"
                "    short = num_wanted + sum(now[:survivors]) > len(blocks.free_blocks)\n"
                "    fits = not (short and reached())",
            ),
        ),
        needs=frozenset({"priority", "prefix_caching"}),
    ),
    Fault(
        name="cache-evicts-the-newest",
        mechanism="the block that was freed last is the first that the prefix cache gives away",
        source="mechanism",
        expected=("WORK-PREDICTION",),
        patches=(
            after(
                "preempt_engine.block_manager:BlockManager._release",
                "self.cached_blocks[block_id] = None",
                "self.cached_blocks.move_to_end(block_id, last=False)",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="cache-loses-beginnings-first",
        mechanism="a table's first block is freed first, so that prefixes lose their beginnings",
        source="mechanism",
        expected=("WORK-PREDICTION",),
        patches=(
            Patch(
                "preempt_engine.block_manager:BlockManager.free",
                "for block_id in reversed(sequence.block_table):",
                "for block_id in sequence.block_table:",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="second-return-finds-nothing",
        mechanism="from its second return on, a request does not look into the prefix cache",
        source="mechanism",
        expected=("WORK-PREDICTION",),
        patches=(
            after(
                _PLACE,
                _HITS,
                "if request.num_preemptions >= 2 and hits and reached():\n    hits = []",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
)
