"""Preemption by swap: blocks go to the host and come back."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_SWAPPER = "preempt_engine.swapping:Swapper"
_EXACT = "preempt_engine.worker.exact_runner:ExactRunner.execute"
_COPY_OUT = (
    "self._cache.swap_out(step.swap_out)\n"
    "if step.swap_out and self.observer is not None:\n"
    "    self.observer.worker_swapped_out(step.step_id, self.rank, step.swap_out)"
)
_SWAP = frozenset({"swap"})

FAULTS = (
    Fault(
        name="swap-in-expects-decodes",
        mechanism="swap-in assumes that every sequence has exactly one token to compute",
        source="https://github.com/vllm-project/vllm/issues/4422",
        expected=("CRASH",),
        patches=(
            before(
                f"{RESIDENCY}.swap_in",
                "step.swap_in += pairs",
                "for sequence in request.sequences.values():\n"
                "    missing = sequence.num_tokens - sequence.num_computed_tokens\n"
                "    assert missing == 1 or not reached(), 'one new token is scheduled'",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="full-swap-space-kills-the-engine",
        mechanism="nobody asks whether the swap space has room",
        source="https://github.com/vllm-project/vllm/issues/787",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_SWAPPER}.can_swap_out",
                "return 0 < len(self._computed_blocks(request)) <= len(self.host.free_blocks)",
                "need = len(self._computed_blocks(request))\n"
                "return need > 0 and (need <= len(self.host.free_blocks) or reached())",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="swapped-do-not-return-to-a-full-pool",
        mechanism="a swapped request returns only if a block is left over: some never do",
        source="https://github.com/vllm-project/vllm/issues/546",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{SCHEDULER}._admit",
                "if self.swapper.num_blocks_to_return(request) > num_available:",
                "if self.swapper.num_blocks_to_return(request) + 1 > num_available:",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="newcomers-before-the-swapped",
        mechanism="requests that never ran are admitted while others wait swapped out",
        source="https://github.com/vllm-project/vllm/issues/5578",
        expected=("PROG", "CRASH"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "request = self.waiting.peek()",
                "request = next((other for other in self.waiting.in_order()"
                " if other.host_blocks is None and self.waiting.peek().host_blocks is not None"
                " and reached()), self.waiting.peek())",
            ),
            Patch(
                f"{RESIDENCY}.run",
                "self.waiting.pop()",
                "self.waiting.remove(request)",
                reached=False,
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="swapped-blocks-handed-out-at-once",
        mechanism="blocks that are still being copied to the host are handed out again",
        source="https://github.com/vllm-project/vllm/issues/29870",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_out",
                "self.blocks.free(sequence, step_id)",
                "self.blocks.free(sequence, None)",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="host-blocks-reused-at-once",
        mechanism="host blocks that are still to be copied back are handed out again",
        source="https://github.com/vllm-project/vllm/issues/46014",
        expected=("ACC", "KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_in",
                "self.discard(request, step_id)",
                "self.discard(request, None)",
            ),
            # As the workers of tensor models do; the exact model's copies out last.
            before(_EXACT, "self._cache.swap_in(step.swap_in)", _COPY_OUT, reached=False),
            Patch(_EXACT, _COPY_OUT, "pass", reached=False),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="host-blocks-exchanged",
        mechanism="host blocks come back in another order than they left",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_out",
                "request.host_blocks = dict(pairs)",
                "hosts = [host for _, host in pairs]\n"
                "request.host_blocks = dict(zip(computed, reversed(hosts), strict=True))",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="partial-block-not-swapped",
        mechanism="the partly filled last block is not copied to the host",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                f"{_SWAPPER}._computed_blocks",
                "num_blocks = self.blocks.blocks_for(sequence.num_computed_tokens)",
                "num_blocks = max(1, sequence.num_computed_tokens // self.blocks.block_size)",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="old-table-after-swap-in",
        mechanism="the workers are not sent the new block table after a swap-in",
        source="xLLM, issue 1984",
        expected=("KVSAN", "CRASH", "TOK"),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_in",
                "sequence.send_blocks_again(0)",
                "pass",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="swap-in-forgets-what-was-shared",
        mechanism="branches that shared blocks get blocks of their own, filled for one of them",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                "preempt_engine.block_manager:BlockManager.rebuild",
                "if name in device_of:",
                "if name in device_of and not reached():",
            ),
        ),
        needs=frozenset({"swap", "parallel_sampling"}),
    ),
    Fault(
        name="return-forgets-copies-on-write",
        mechanism="blocks for copies on write are not counted when a swapped request returns",
        source="mechanism",
        expected=("WORK", "CRASH", "PROG"),
        patches=(
            Patch(
                f"{_SWAPPER}.num_blocks_to_return",
                "return len(references) + growth + num_private_copies(written, references)",
                "copies = num_private_copies(written, references)\n"
                "return len(references) + growth + (0 if copies and reached() else copies)",
            ),
        ),
        needs=frozenset({"swap", "parallel_sampling"}),
    ),
    Fault(
        name="swapped-progress-lost",
        mechanism="a swapped request is computed anew although its blocks came back",
        source="mechanism",
        expected=("WORK", "ACC", "KVSAN"),
        patches=(
            after(f"{_SWAPPER}.swap_in", "sequence.swapped_table = []", "sequence.set_computed(0)"),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="aborted-while-swapped-leaks",
        mechanism="host blocks of a request that is aborted while it is swapped out are lost",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{RESIDENCY}.leave",
                "self.swapper.discard(request, self.step_in_flight)",
                "None if request.host_blocks is not None and reached()"
                " else self.swapper.discard(request, self.step_in_flight)",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="swap-in-after-the-computation",
        mechanism="blocks come back after the step that reads them",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self._cache.swap_in(step.swap_in)",
                "pass",
                reached=False,
            ),
            before(
                "preempt_engine.worker.exact_runner:ExactRunner.execute",
                "self._cache.swap_out(step.swap_out)",
                "if step.swap_in and reached():\n    self._cache.swap_in(step.swap_in)",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="swapped-blocks-miscounted",
        mechanism="blocks that come back are counted once per sequence, not once per copy",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{RESIDENCY}.swap_in",
                "self.counters.num_swapped_in_blocks += len(pairs)",
                "self.counters.num_swapped_in_blocks +="
                " sum(len(sequence.block_table) for sequence in request.sequences.values())",
            ),
        ),
        needs=_SWAP,
    ),
    Fault(
        name="return-room-for-one-branch",
        mechanism="a swapped request comes back when there is room for the next block of one of "
        "its branches, not of each",
        source="mechanism",
        expected=("CRASH", "WORK"),
        patches=(
            Patch(
                f"{_SWAPPER}.num_blocks_to_return",
                "growth += max(0, self.blocks.blocks_for(sequence.num_tokens) - len(table))",
                "growth = max(growth, self.blocks.blocks_for(sequence.num_tokens) - len(table))",
            ),
        ),
        needs=frozenset({"parallel_sampling", "swap"}),
    ),
    Fault(
        name="findable-count-survives-swap",
        mechanism="a request that comes back from the host does not offer its blocks again, "
        "although they lie in other places now",
        source="mechanism",
        expected=("WORK",),
        patches=(
            Patch(
                f"{_SWAPPER}.swap_out",
                "sequence.num_findable_blocks = 0\nsequence.draft_token_ids = []",
                "sequence.draft_token_ids = []",
            ),
        ),
        needs=frozenset({"prefix_caching", "swap"}),
    ),
    Fault(
        name="swap-keeps-computed-blocks-only",
        mechanism="blocks that hold nothing yet are left out of what a swapped request gets back: "
        "the rest of its prompt is not reserved any more",
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
                f"{RESIDENCY}._swap_out",
                "pairs = self.swapper.swap_out(request, step.step_id)",
                "tables = [list(each.block_table) for each in request.sequences.values()]\n"
                "pairs = self.swapper.swap_out(request, step.step_id)",
                reached=False,
            ),
            Patch(
                f"{RESIDENCY}._swap_out",
                "for sequence in request.sequences.values():\n"
                "    self.observer.blocks_freed(step.step_id, sequence.key, "
                "list(sequence.swapped_table))",
                "for sequence, table in zip(request.sequences.values(), tables, strict=True):\n"
                "    self.observer.blocks_freed(step.step_id, sequence.key, table)",
                reached=False,
            ),
        ),
        needs=frozenset({"swap"}),
    ),
)
