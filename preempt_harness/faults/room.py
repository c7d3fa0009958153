"""Room: blocks, places and swap space that are there and are not used, or are taken for nothing."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_SWAPPER = "preempt_engine.swapping:Swapper"
_PLACE = "preempt_engine.admission:place"
_HITS = "hits = blocks.find_prefix(sequence, max_tokens=sequence.first_wanted_logits)"
_SEVERAL = frozenset({"parallel_sampling"})
_VICTIMS = "preempt_engine.victims"
_BRANCHES = "preempt_engine.branches:Branches"

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
                "fits = num_wanted + sum(now[:survivors]) <= num_free",
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
    Fault(
        name="seats-of-ended-branches-lost",
        mechanism="the number of running sequences is kept rather than added up, and a branch that "
        "ends before the others is never taken off",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            after(
                f"{RESIDENCY}.__init__",
                "self.running: list[Request] = []",
                "self.num_running_seqs = 0",
                reached=False,
            ),
            after(
                f"{RESIDENCY}.run",
                "insort(self.running, request, key=_precedence)",
                "self.num_running_seqs += request.num_seqs",
                reached=False,
            ),
            after(
                f"{RESIDENCY}.preempt",
                "self.running.remove(request)",
                "self.num_running_seqs -= request.num_seqs",
                reached=False,
            ),
            after(
                f"{RESIDENCY}.leave",
                "self.running.remove(request)",
                "self.num_running_seqs -= request.num_seqs",
                reached=False,
            ),
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "num_seqs = sum(request.num_seqs for request in self.running)",
                "num_seqs = self.residency.num_running_seqs",
                reached=False,
            ),
            after(f"{_BRANCHES}.end", "request.num_seqs -= 1", "reached()"),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="seats-for-ended-branches",
        mechanism="a request that comes back is let in when there are places for all branches it "
        "was asked for, those that have ended included",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "num_seqs += request.num_seqs",
                "num_seqs += request.params.num_sequences",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="evictions-count-shared-twice",
        mechanism="what evictions would give up is added up table by table, shared blocks several "
        "times: requests are evicted in vain",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_VICTIMS}:evictions_suffice",
                "freed = _FreedBlocks(blocks)",
                "num_freed = 0",
                reached=False,
            ),
            Patch(
                f"{_VICTIMS}:evictions_suffice",
                "freed.add(other)",
                "num_freed += sum(len(each.block_table) for each in other.sequences.values())",
            ),
            Patch(
                f"{_VICTIMS}:evictions_suffice",
                "return num_blocks <= freed.num_available_blocks",
                "return num_blocks <= blocks.num_available_blocks + num_freed",
                reached=False,
            ),
        ),
        needs=frozenset({"parallel_sampling", "prefix_caching"}),
    ),
    Fault(
        name="refused-until-more-blocks",
        mechanism="a head of the queue that could not be let in is looked at again only when more "
        "blocks are available, although what it needs may have become less",
        source="mechanism",
        expected=("PROG", "WORK", "CRASH"),
        patches=(
            after(
                f"{SCHEDULER}.__init__",
                "self.controller = controller",
                "self._refused = None",
                reached=False,
            ),
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "if num_seqs > self.config.max_num_seqs or not self._admit(step, request):\n"
                "    return",
                "if num_seqs > self.config.max_num_seqs:\n"
                "    return\n"
                "num_available = self.blocks.num_available_blocks\n"
                "if self._refused is not None and self._refused[0] is request:\n"
                "    if num_available <= self._refused[1] and reached():\n"
                "        return  # nothing has come free since\n"
                "if not self._admit(step, request):\n"
                "    self._refused = request, num_available\n"
                "    return\n"
                "self._refused = None",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="watermark-beside-the-waiting",
        mechanism="the watermark is left free whenever there is another request, even if none "
        "runs: the head of the queue may never fit",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{SCHEDULER}._admit",
                "num_spare = num_blocks_beside(self.residency, request) if self.running else 0",
                "is_alone = len(self.requests) == 1\n"
                "num_spare = 0 if is_alone else num_blocks_beside(self.residency, request)",
            ),
        ),
        needs=frozenset({"watermark"}),
    ),
    Fault(
        name="lookahead-behind-the-end",
        mechanism="a request is let in only if there is room for drafts behind its last token",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                "preempt_engine.spec_decode.allowance:num_lookahead_blocks",
                "end = min(sequence.num_tokens + num_speculative_tokens, most)",
                "end = sequence.num_tokens + num_speculative_tokens",
            ),
        ),
    ),
    Fault(
        name="draft-model-blocks-before-known-work",
        mechanism="a draft model's drafts are granted blocks that running requests need next",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                "preempt_engine.spec_decode.allowance:grant_blocks",
                "num_spare = _num_spare_blocks("
                "[_known_work(request) for request in running], blocks)",
                "num_spare = blocks.num_available_blocks",
            ),
        ),
    ),
)
