"""Faults that show when two things meet: a fence and a hit, a hold and a full cache, a swap and a
branch that waits, drafts and somebody who comes back."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, before
from preempt_harness.faults.places import DELIVERY, RESIDENCY, SCHEDULER

_BLOCKS = "preempt_engine.block_manager:BlockManager"
_ASYNC = "preempt_engine.async_scheduler:AsyncScheduler"
_SWAPPER = "preempt_engine.swapping:Swapper"
_SEVERAL = frozenset({"parallel_sampling"})
_SPECULATION = frozenset({"speculation"})
_ADMISSION = "preempt_engine.admission"

FAULTS = (
    Fault(
        name="fenced-hit-stays-fenced",
        mechanism="a block that is found while its fence stands is released when the step is done",
        source="mechanism",
        expected=("ACC", "CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_BLOCKS}.share",
                "self.fenced_blocks.pop(block_id, None)",
                "if block_id in self.fenced_blocks:\n    reached()",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="held-block-stays-findable",
        mechanism="a cached block that is withheld from requests can still be found",
        source="mechanism",
        expected=("KVSAN", "TOK", "ACC", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.hold_blocks",
                "self.held_blocks.append(self._take())",
                "if not len(self.free_blocks) and reached():\n"
                "    self.held_blocks.append(self.cached_blocks.popitem(last=False)[0])\n"
                "else:\n"
                "    self.held_blocks.append(self._take())",
            ),
        ),
        needs=frozenset({"prefix_caching", "hold_blocks"}),
    ),
    Fault(
        name="reset-skipped-when-nothing-is-cached",
        mechanism="a cache reset does nothing while all that can be found is in use",
        source="mechanism",
        expected=("ACC",),
        patches=(
            before(
                f"{_BLOCKS}.reset_prefix_cache",
                "self._num_resets += 1",
                "if not self.cached_blocks and self._block_of_digest and reached():\n    return",
            ),
        ),
        needs=frozenset({"prefix_caching", "reset_prefix_cache"}),
    ),
    Fault(
        name="fork-shares-the-digest-list",
        mechanism="a branch and its parent append to one list of block digests",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.sequence:Sequence.fork",
                "block_digests=list(self.block_digests)",
                "block_digests=self.block_digests",
            ),
        ),
        needs=_SEVERAL | {"prefix_caching"},
    ),
    Fault(
        name="second-follower-replaces-the-first",
        mechanism="a leader knows the last of the branches that wait for it, and no other",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{RESIDENCY}._build_table",
                "leader.followers = (*leader.followers, (sequence, num_tokens))",
                "leader.followers = ((sequence, num_tokens),) if leader.followers and reached()"
                " else (*leader.followers, (sequence, num_tokens))",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="revived-counted-per-branch",
        mechanism="cached blocks that several branches find are counted once for each",
        source="mechanism",
        expected=("CRASH", "WORK", "ACC", "PROG"),
        patches=(
            Patch(
                "preempt_engine.admission:num_blocks_to_admit",
                "return num_new + len(revived)",
                "found = [block for one in placements for block in one.hits]\n"
                "again = sum(found.count(block) - 1 for block in revived)\n"
                "return num_new + len(revived) + (again if again and reached() else 0)",
            ),
        ),
        needs=_SEVERAL | {"prefix_caching"},
    ),
    Fault(
        name="admitted-in-order-of-arrival",
        mechanism="who is let in stands among those that run by arrival, whatever its priority",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            Patch(
                f"{RESIDENCY}.run",
                "insort(self.running, request, key=_precedence)",
                "if any(other.priority != request.priority for other in self.running):\n"
                "    reached()\n"
                "insort(self.running, request, key=lambda other: other.arrival_index)",
            ),
        ),
        needs=frozenset({"priority"}),
    ),
    Fault(
        name="fenced-host-blocks-counted-as-room",
        mechanism="host blocks that are still read count as room for a victim",
        source="mechanism",
        expected=("CRASH", "ACC"),
        patches=(
            Patch(
                f"{_SWAPPER}.can_swap_out",
                "return 0 < len(self._computed_blocks(request)) <= len(self.host.free_blocks)",
                "fenced = len(self.host.fenced_blocks)\n"
                "room = len(self.host.free_blocks) + (fenced if fenced and reached() else 0)\n"
                "return 0 < len(self._computed_blocks(request)) <= room",
            ),
        ),
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="followers-forgotten-by-a-swap",
        mechanism="branches that wait for another one are forgotten when both are swapped out",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            before(
                f"{_SWAPPER}.swap_out",
                "sequence.draft_token_ids = []",
                "if sequence.followers and reached():\n    sequence.followers = ()",
            ),
        ),
        needs=_SEVERAL | {"swap", "chunked_prefill"},
    ),
    Fault(
        name="drafts-before-who-comes-back",
        mechanism="drafts leave room for a new request at the head of the queue, for no other",
        source="mechanism",
        expected=("WORK",),
        patches=(
            before(
                "preempt_engine.headroom:_claim_of_head",
                "num_seqs = sum(request.num_seqs for request in residency.running)",
                "if head.num_preemptions and reached():\n    return None",
            ),
        ),
        needs=_SPECULATION,
    ),
    Fault(
        name="spare-block-promised-to-two",
        mechanism="a block that is spare for one request's drafts is spare for the next one's too",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                "preempt_engine.spec_decode.allowance:cut_drafts",
                "num_spare -= max(0, blocks.blocks_for(end + keep) - num_held)",
                "if blocks.blocks_for(end + keep) > num_held:\n    reached()",
            ),
        ),
        needs=_SPECULATION,
    ),
    Fault(
        name="evicts-though-fenced-blocks-come",
        mechanism="a victim is chosen although blocks that are being copied out come free in time",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{SCHEDULER}._make_room",
                "if num_blocks <= self.blocks.num_available_blocks + "
                "len(self.blocks.fenced_blocks):",
                "come = self.blocks.num_available_blocks + len(self.blocks.fenced_blocks)\n"
                "if num_blocks <= come and not reached():",
            ),
        ),
        needs=frozenset({"swap"}),
    ),
    Fault(
        name="swapped-spared-by-a-reset",
        mechanism="a cache reset that preempts leaves the swapped-out what they had computed",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{SCHEDULER}.preempt_all",
                "for request in [*reversed(self.running), *swapped]:",
                "if swapped and reached():\n    swapped = []\n"
                "for request in [*reversed(self.running), *swapped]:",
            ),
        ),
        needs=frozenset({"swap", "reset_running_requests"}),
    ),
    Fault(
        name="aborted-search-is-kept",
        mechanism="the beams of an aborted search are kept for ever",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{DELIVERY}.abort",
                "self._searches.pop(request_id, None)",
                "if request_id in self._searches:\n    reached()",
            ),
        ),
        needs=frozenset({"beam_search", "abort"}),
    ),
    Fault(
        name="growth-until-the-copies-are-done-ignored",
        mechanism="victims are chosen as if those who stay took no block while theirs are copied",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                "preempt_engine.victims:victims_for",
                "growth = _growth_meanwhile(growth, later, num_free)",
                "meanwhile = _growth_meanwhile(growth, later, num_free)\n"
                "if sum(meanwhile) > sum(growth) and not reached():\n"
                "    growth = meanwhile",
            ),
        ),
        needs=frozenset({"swap", "priority"}),
    ),
    Fault(
        name="hits-behind-evicted-ones-counted",
        mechanism="victims are copied for a request that counts on cached blocks in use, though the"
        " blocks before them may be evicted meanwhile",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                "preempt_engine.victims:victims_for",
                "num_wanted += freed.num_in_use_of(blocks.hits_at_risk(prefixes, sum(growth)))",
                "at_risk = freed.num_in_use_of(blocks.hits_at_risk(prefixes, sum(growth)))\n"
                "num_wanted += 0 if at_risk and reached() else at_risk",
            ),
        ),
        needs=frozenset({"swap", "priority", "prefix_caching"}),
    ),
    Fault(
        name="copy-counted-behind-a-full-block",
        mechanism="a shared block that is full counts as one to copy when the next token begins"
        " another",
        source="mechanism",
        expected=("WORK", "PROG", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.num_to_write",
                "index = sequence.num_computed_tokens // size",
                "index = sequence.num_computed_tokens // size\n"
                "is_full = sequence.num_computed_tokens == index * size > 0\n"
                "if is_full and ref_counts[table[index - 1]] > 1 and reached():\n"
                "    index -= 1",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="fence-passes-in-block-order",
        mechanism="blocks that waited for a step reach the cache by number, not as they were "
        "given up: beginnings of prefixes are evicted before their ends",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_BLOCKS}.pass_fence",
                "passed = [block for block, step in self.fenced_blocks.items() if step <= step_id]",
                "passed = sorted(\n"
                "    block for block, step in self.fenced_blocks.items() if step <= step_id\n"
                ")",
            ),
        ),
        needs=frozenset({"prefix_caching"}),
    ),
    Fault(
        name="fenced-blocks-not-found",
        mechanism="the prefix cache takes blocks that wait for a step under way for unusable, so "
        "who comes right after computes them anew",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_BLOCKS}.find_prefix",
                "if block_id is None:",
                "if block_id is None or block_id in self.fenced_blocks:",
            ),
        ),
        needs=frozenset({"async_scheduling", "prefix_caching"}),
    ),
    Fault(
        name="reset-overlooks-fenced-blocks",
        mechanism="a cache reset forgets block by block what is in use or cached, and leaves out "
        "blocks that wait for a step under way",
        source="mechanism",
        expected=("ACC", "KVSAN"),
        patches=(
            Patch(
                f"{_BLOCKS}.reset_prefix_cache",
                "self._block_of_digest.clear()\nself._digest_of = [None] * self.num_blocks",
                "for block_id in range(self.num_blocks):\n"
                "    if self.ref_counts[block_id] or block_id in self.cached_blocks:\n"
                "        self._forget_content(block_id)",
            ),
        ),
        needs=frozenset({"async_scheduling", "reset_prefix_cache"}),
    ),
    Fault(
        name="ended-branch-comes-back",
        mechanism="coming back from the host, a request wants a place for every host block it has, "
        "those of a branch that ended meanwhile included",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_in",
                "pairs = [\n"
                "    (host, device_of[name])\n"
                "    for name, host in request.host_blocks.items()\n"
                "    if name in device_of\n"
                "]",
                "pairs = [(host, device_of[name]) for name, host in request.host_blocks.items()]",
            ),
        ),
        needs=frozenset({"async_scheduling", "parallel_sampling", "swap"}),
    ),
    Fault(
        name="follower-shares-wanted-block",
        mechanism="a branch that comes back may share even its last block, whose logits it still "
        "wants: nobody computes them",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{_ADMISSION}:_num_common_blocks",
                "limit = min(sequence.first_wanted_logits, leader.num_tokens) // block_size",
                "limit = min(sequence.num_tokens, leader.num_tokens) // block_size",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="room-for-one-step-ahead",
        mechanism="drafts leave room behind them for one step that is decided already, not for "
        "as many as there may be",
        source="mechanism",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_ASYNC}._add_drafts",
                "ahead = item.end + self.config.async_scheduling",
                "ahead = item.end + 1  # the token that follows is decided",
            ),
        ),
        needs=frozenset({"async_scheduling", "speculation"}),
    ),
)
