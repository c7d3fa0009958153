"""Hold-out: mistakes of a scheduler, a block pool and a swapper, written without the checks."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after

_ADMISSION = "preempt_engine.admission"
_ALLOCATOR = "preempt_engine.block_manager:BlockManager"
_ASYNC = "preempt_engine.async_scheduler:AsyncScheduler"
_BRANCHES = "preempt_engine.branches:Branches"
_INTAKE = "preempt_engine.intake:Intake"
_RESIDENCY = "preempt_engine.residency:Residency"
_SCHEDULER = "preempt_engine.scheduler:Scheduler"
_SEQUENCE = "preempt_engine.sequence:Sequence"
_SWAPPER = "preempt_engine.swapping:Swapper"
_VICTIMS = "preempt_engine.victims"


FAULTS = (
    # The prefix cache ---------------------------------------------------------------------------
    Fault(
        name="fence-passes-in-block-order",
        mechanism="Blocks that waited for a step reach the cache by number, not as they were "
        "given up: beginnings of prefixes are evicted before their ends.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ALLOCATOR}.pass_fence",
                "passed = [block for block, step in self.fenced_blocks.items() if step <= step_id]",
                "passed = sorted(\n"
                "    block for block, step in self.fenced_blocks.items() if step <= step_id\n"
                ")",
            ),
        ),
    ),
    Fault(
        name="lookup-refreshes-front-first",
        mechanism="Looking a prefix up marks its cached blocks as used, the first one first, "
        "even when the request is not let in: the first is evicted first then.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ALLOCATOR}.find_prefix",
                "hits.append(block_id)",
                "if block_id in self.cached_blocks:  # about to be used again\n"
                "    self.cached_blocks.move_to_end(block_id)\n"
                "hits.append(block_id)",
            ),
        ),
    ),
    Fault(
        name="swap-in-renews-epoch",
        mechanism="A request that comes back from the host counts as begun after the latest cache "
        "reset, so content from before the reset is offered.",
        source="mechanism",
        expected=("ACC", "KVSAN"),
        patches=(
            Patch(
                f"{_ALLOCATOR}.rebuild",
                "return num_shared",
                "sequence.cache_epoch = self._num_resets  # its table is new\nreturn num_shared",
            ),
        ),
    ),
    Fault(
        name="reset-overlooks-fenced-blocks",
        mechanism="A cache reset forgets block by block what is in use or cached, and leaves out "
        "blocks that wait for a step under way.",
        source="mechanism",
        expected=("ACC", "KVSAN"),
        patches=(
            Patch(
                f"{_ALLOCATOR}.reset_prefix_cache",
                "self._block_of_digest.clear()\nself._digest_of = [None] * self.num_blocks",
                "for block_id in range(self.num_blocks):\n"
                "    if self.ref_counts[block_id] or block_id in self.cached_blocks:\n"
                "        self._forget_content(block_id)",
            ),
        ),
    ),
    Fault(
        name="no-hits-no-epoch",
        mechanism="An early return for requests that find nothing skips noting which cache reset "
        "they began after: after a reset nothing is ever offered again.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ALLOCATOR}.share",
                "assert not sequence.block_table",
                "assert not sequence.block_table\nif not hits:\n    return  # nothing to share",
            ),
        ),
    ),
    Fault(
        name="findable-count-survives-swap",
        mechanism="A request that comes back from the host does not offer its blocks again, "
        "although they lie in other places now.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_out",
                "sequence.num_findable_blocks = 0\nsequence.draft_token_ids = []",
                "sequence.draft_token_ids = []",
            ),
        ),
    ),
    Fault(
        name="fenced-blocks-not-found",
        mechanism="The prefix cache takes blocks that wait for a step under way for unusable, so "
        "who comes right after computes them anew.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ALLOCATOR}.find_prefix",
                "if block_id is None:",
                "if block_id is None or block_id in self.fenced_blocks:",
            ),
        ),
    ),
    Fault(
        name="findable-at-boundary-steps-only",
        mechanism="Blocks are offered only by a step that ends exactly at a block's end, not by "
        "one that ends behind it.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SCHEDULER}.advance",
                "if item.end >= (sequence.num_findable_blocks + 1) * block_size:",
                "if item.end % block_size == 0:  # a block is full",
            ),
        ),
    ),
    Fault(
        name="abort-forgets-shared-content",
        mechanism="What an aborted request computed is taken out of the prefix cache at once, "
        "blocks that others share with it included.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SCHEDULER}.abort",
                "self.residency.leave(request)",
                "for sequence in request.sequences.values():  # of no use to anybody\n"
                "    for block_id in sequence.block_table:\n"
                "        self.blocks._forget_content(block_id)\n"
                "self.residency.leave(request)",
            ),
        ),
    ),
    # Swapping -----------------------------------------------------------------------------------
    Fault(
        name="return-room-for-one-branch",
        mechanism="A swapped request comes back when there is room for the next block of one of "
        "its branches, not of each.",
        source="mechanism",
        expected=("CRASH", "WORK"),
        patches=(
            Patch(
                f"{_SWAPPER}.num_blocks_to_return",
                "growth += max(0, self.blocks.blocks_for(sequence.num_tokens) - len(table))",
                "growth = max(growth, self.blocks.blocks_for(sequence.num_tokens) - len(table))",
            ),
        ),
    ),
    Fault(
        name="swap-keeps-computed-blocks-only",
        mechanism="Blocks that hold nothing yet are left out of what a swapped request gets back: "
        "the rest of its prompt is not reserved any more.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_out",
                "sequence.swapped_table = sequence.block_table",
                "num_computed_blocks = self.blocks.blocks_for(sequence.num_computed_tokens)\n"
                "sequence.swapped_table = sequence.block_table[:num_computed_blocks]",
            ),
            Patch(
                f"{_RESIDENCY}._swap_out",
                "pairs = self.swapper.swap_out(request, step.step_id)",
                "tables = [list(each.block_table) for each in request.sequences.values()]\n"
                "pairs = self.swapper.swap_out(request, step.step_id)",
                reached=False,
            ),
            Patch(
                f"{_RESIDENCY}._swap_out",
                "for sequence in request.sequences.values():\n"
                "    self.observer.blocks_freed(step.step_id, sequence.key, "
                "list(sequence.swapped_table))",
                "for sequence, table in zip(request.sequences.values(), tables, strict=True):\n"
                "    self.observer.blocks_freed(step.step_id, sequence.key, table)",
                reached=False,
            ),
        ),
    ),
    Fault(
        name="ended-branch-comes-back",
        mechanism="Coming back from the host, a request wants a place for every host block it has, "
        "those of a branch that ended meanwhile included.",
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
    ),
    # Precedence ---------------------------------------------------------------------------------
    Fault(
        name="priority-of-swapped-kept",
        mechanism="A change of priority moves requests that wait to be computed, not those that "
        "wait to be copied back.",
        source="mechanism",
        expected=("PROG", "ACC"),
        patches=(
            Patch(
                f"{_RESIDENCY}.set_priority",
                "is_waiting = request.status is RequestStatus.WAITING",
                "is_waiting = (\n"
                "    request.status is RequestStatus.WAITING and request.host_blocks is None\n"
                ")",
            ),
        ),
    ),
    Fault(
        name="equals-evicted-by-arrival",
        mechanism="Urgent is whoever precedes, not whoever has the higher priority: a request that "
        "came back to its place evicts later ones of the same priority.",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_SCHEDULER}._admit_urgent",
                "if not is_owed and request.priority >= self.running[-1].priority:",
                "if not is_owed and request.precedence > self.running[-1].precedence:",
                reached=False,
            ),
            Patch(
                f"{_VICTIMS}:victims_for",
                "if not survivors or running[survivors - 1].priority <= newcomer.priority:",
                "if not survivors or running[survivors - 1].precedence <= newcomer.precedence:",
            ),
        ),
    ),
    Fault(
        name="victims-count-one-seat",
        mechanism="Each victim of a more urgent request is taken to give up one sequence's place, "
        "whatever its number of branches.",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_VICTIMS}:victims_for",
                "num_seqs -= victim.num_seqs",
                "num_seqs -= 1",
            ),
        ),
    ),
    Fault(
        name="urgent-forgets-hits-of-victims",
        mechanism="Blocks that a more urgent request shares with its victims are counted as shared "
        "and as freed: it evicts too few, and does not fit.",
        source="mechanism",
        expected=("WORK", "PROG"),
        patches=(
            Patch(
                f"{_VICTIMS}:victims_for",
                "num_wanted = num_blocks + freed.num_of(hits) + "
                "(num_watermark_blocks if survivors else 0)",
                "num_wanted = num_blocks + (num_watermark_blocks if survivors else 0)",
            ),
        ),
    ),
    # Places and limits --------------------------------------------------------------------------
    Fault(
        name="seats-of-ended-branches-lost",
        mechanism="The number of running sequences is kept rather than added up, and a branch that "
        "ends before the others is never taken off.",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            after(
                f"{_RESIDENCY}.__init__",
                "self.running: list[Request] = []",
                "self.num_running_seqs = 0",
                reached=False,
            ),
            after(
                f"{_RESIDENCY}.run",
                "insort(self.running, request, key=_precedence)",
                "self.num_running_seqs += request.num_seqs",
                reached=False,
            ),
            after(
                f"{_RESIDENCY}.preempt",
                "self.running.remove(request)",
                "self.num_running_seqs -= request.num_seqs",
                reached=False,
            ),
            after(
                f"{_RESIDENCY}.leave",
                "self.running.remove(request)",
                "self.num_running_seqs -= request.num_seqs",
                reached=False,
            ),
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
                "num_seqs = sum(request.num_seqs for request in self.running)",
                "num_seqs = self.residency.num_running_seqs",
                reached=False,
            ),
            after(f"{_BRANCHES}.end", "request.num_seqs -= 1", "reached()"),
        ),
    ),
    Fault(
        name="seats-for-ended-branches",
        mechanism="A request that comes back is let in when there are places for all branches it "
        "was asked for, those that have ended included.",
        source="mechanism",
        expected=("PROG", "WORK"),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
                "num_seqs += request.num_seqs",
                "num_seqs += request.params.num_sequences",
            ),
        ),
    ),
    Fault(
        name="drafts-free-of-charge",
        mechanism="Drafts are not taken off the token budget, since they were cut to fit it: who "
        "is let in behind them gets their share too.",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_SCHEDULER}._schedule_work",
                "num_tokens += end - sequence.num_computed_tokens",
                "num_tokens += min(end, sequence.num_tokens) - sequence.num_computed_tokens",
            ),
        ),
    ),
    Fault(
        name="evictions-count-shared-twice",
        mechanism="What evictions would give up is added up table by table, shared blocks several "
        "times: requests are evicted in vain.",
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
    ),
    Fault(
        name="refused-until-more-blocks",
        mechanism="A head of the queue that could not be let in is looked at again only when more "
        "blocks are available, although what it needs may have become less.",
        source="mechanism",
        expected=("PROG", "WORK", "CRASH"),
        patches=(
            after(
                f"{_SCHEDULER}.__init__",
                "self.controller = controller",
                "self._refused = None",
                reached=False,
            ),
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
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
    ),
    Fault(
        name="watermark-beside-the-waiting",
        mechanism="The watermark is left free whenever there is another request, even if none "
        "runs: the head of the queue may never fit.",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{_SCHEDULER}._admit",
                "num_spare = num_blocks_beside(self.residency, request) if self.running else 0",
                "is_alone = len(self.requests) == 1\n"
                "num_spare = 0 if is_alone else num_blocks_beside(self.residency, request)",
            ),
        ),
    ),
    Fault(
        name="waiting-count-misses-aborts",
        mechanism="The length of the queue is kept as a number, which an abort of a waiting "
        "request does not lower: later ones are refused though there is room.",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            after(
                f"{_RESIDENCY}.__init__",
                "self.waiting = WaitingQueue()",
                "self.num_waiting = 0",
                reached=False,
            ),
            after(
                f"{_RESIDENCY}.arrive",
                "self.waiting.push(request)",
                "self.num_waiting += 1",
                reached=False,
            ),
            after(
                f"{_RESIDENCY}.run", "self.waiting.pop()", "self.num_waiting -= 1", reached=False
            ),
            after(
                f"{_RESIDENCY}.preempt",
                "self.waiting.push(request)",
                "self.num_waiting += 1",
                reached=False,
            ),
            Patch(
                f"{_INTAKE}.queue_is_full",
                "return limit is not None and len(self.scheduler.waiting) >= limit",
                "return limit is not None and self.scheduler.residency.num_waiting >= limit",
                reached=False,
            ),
            after(f"{_RESIDENCY}.leave", "self.waiting.remove(request)", "reached()"),
        ),
    ),
    Fault(
        name="branches-denied-the-shared-prompt",
        mechanism="The most that several branches can grow to is worked out as if each had a "
        "prompt of its own: outputs end although there is room.",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            Patch(
                f"{_INTAKE}.max_total_tokens",
                "num_own = (self.scheduler.blocks.num_blocks - num_shared) // num_sequences\n"
                "pool_tokens = (num_shared + num_own) * self.config.block_size + 1",
                "num_own = self.scheduler.blocks.num_blocks // num_sequences\n"
                "pool_tokens = num_own * self.config.block_size + 1",
            ),
        ),
    ),
    # Numbers ------------------------------------------------------------------------------------
    Fault(
        name="cached-tokens-noted-at-first-look",
        mechanism="The prefix hits of a request are noted when it is looked at first, not when it "
        "is let in.",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_RESIDENCY}.find_room",
                "if num_blocks_to_admit(placements, self.blocks) > num_available:\n"
                "    return False\n"
                "num_cached_tokens = len(placements[0].hits) * self.config.block_size\n"
                "if request.num_cached_tokens is None:\n"
                "    request.num_cached_tokens = num_cached_tokens\n"
                "    self.counters.num_cached_tokens += num_cached_tokens",
                "num_cached_tokens = len(placements[0].hits) * self.config.block_size\n"
                "if request.num_cached_tokens is None:\n"
                "    request.num_cached_tokens = num_cached_tokens\n"
                "if num_blocks_to_admit(placements, self.blocks) > num_available:\n"
                "    return False\n"
                "if not request.num_preemptions:\n"
                "    self.counters.num_cached_tokens += request.num_cached_tokens",
            ),
        ),
    ),
    Fault(
        name="fork-forgets-high-water-mark",
        mechanism="A fork does not know how far its tokens have been computed, so what it computes "
        "again after an immediate preemption is not counted as such.",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_SEQUENCE}.fork",
                "max_computed_tokens=self.max_computed_tokens,\n",
                "",
            ),
        ),
    ),
    Fault(
        name="rejected-drafts-count-as-computed",
        mechanism="Where steps are decided ahead, drafts raise the mark below which computing is "
        "counted as computing again, even those that are rejected.",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{_ASYNC}._count",
                "sequence.max_computed_tokens = max(sequence.max_computed_tokens, "
                "item.end - num_drafts)",
                "sequence.max_computed_tokens = max(sequence.max_computed_tokens, item.end)",
            ),
        ),
    ),
    # Branches -----------------------------------------------------------------------------------
    Fault(
        name="leader-is-always-first",
        mechanism="Branches that come back share with the first one only, not with the one they "
        "have most in common with.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_ADMISSION}:place",
                "for other in placements:",
                "for other in placements[:1]:  # all begin with the prompt",
            ),
        ),
    ),
    Fault(
        name="follower-shares-wanted-block",
        mechanism="A branch that comes back may share even its last block, whose logits it still "
        "wants: nobody computes them.",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{_ADMISSION}:_num_common_blocks",
                "limit = min(sequence.first_wanted_logits, leader.num_tokens) // block_size",
                "limit = min(sequence.num_tokens, leader.num_tokens) // block_size",
            ),
        ),
    ),
    # Pace and coincidences ----------------------------------------------------------------------
    Fault(
        name="admission-pauses-after-preemption",
        mechanism="After a preemption nobody is let in for two steps, against thrashing, even "
        "where there is room again and nobody else.",
        source="mechanism",
        expected=("WORK", "PROG", "CRASH"),
        patches=(
            after(
                f"{_SCHEDULER}.__init__",
                "self.controller = controller",
                "self._num_pauses = 0",
                reached=False,
            ),
            after(
                f"{_SCHEDULER}._make_room",
                'self._preempt(step, victim, "out_of_blocks")',
                "self._num_pauses = 2",
                reached=False,
            ),
            Patch(
                f"{_SCHEDULER}._schedule_waiting",
                "num_seqs = sum(request.num_seqs for request in self.running)",
                "if self._num_pauses and self.running and reached():\n"
                "    self._num_pauses -= 1\n"
                "    return\n"
                "num_seqs = sum(request.num_seqs for request in self.running)",
            ),
        ),
    ),
    Fault(
        name="room-for-one-step-ahead",
        mechanism="Drafts leave room behind them for one step that is decided already, not for "
        "as many as there may be.",
        source="mechanism",
        expected=("CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{_ASYNC}._add_drafts",
                "ahead = item.end + self.config.async_scheduling",
                "ahead = item.end + 1  # the token that follows is decided",
            ),
        ),
    ),
    Fault(
        name="budget-kept-for-a-head-that-cannot-come",
        mechanism="Drafts leave the head of the queue its tokens of the budget even when there "
        "are no blocks for it.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                "preempt_engine.spec_decode.allowance:cut_drafts",
                "if head is not None and head.num_blocks <= num_spare:\n"
                "    budget -= head.num_tokens\n"
                "    num_spare -= head.num_blocks",
                "if head is not None:\n"
                "    budget -= head.num_tokens\n"
                "    if head.num_blocks <= num_spare:\n"
                "        num_spare -= head.num_blocks",
            ),
        ),
    ),
    Fault(
        name="budget-split-with-followers",
        mechanism="The branches of a request get equal shares of the token budget, those that "
        "wait for another's blocks included: it comes back at a fraction of the pace.",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SCHEDULER}._next_tokens",
                "work = []",
                "work = []\nshare = max(1, budget // len(request.sequences))",
                reached=False,
            ),
            Patch(
                f"{_SCHEDULER}._next_tokens",
                "end = min(num_tokens, start + budget)",
                "end = min(num_tokens, start + min(budget, share))",
            ),
        ),
    ),
    Fault(
        name="victim-freed-while-its-neighbour-is-copied",
        mechanism="A victim that is recomputed gives its blocks up at once, in a step that still "
        "copies what another victim shared with it.",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_RESIDENCY}.preempt",
                "fence = step.step_id if step.swap_out else self.step_in_flight",
                "fence = self.step_in_flight",
            ),
        ),
    ),
)
