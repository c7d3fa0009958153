"""Several sequences of one request: forks, copies on write, beams."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, before
from preempt_harness.faults.places import RESIDENCY, SCHEDULER

_BLOCKS = "preempt_engine.block_manager:BlockManager"
_SEQUENCE = "preempt_engine.sequence:Sequence"
_SEVERAL = frozenset({"parallel_sampling"})

FAULTS = (
    Fault(
        name="recompute-frees-one-branch",
        mechanism="recompute of a request of several sequences treats it as one",
        source="https://github.com/vllm-project/vllm/issues/1082",
        expected=("ACC", "CRASH", "KVSAN"),
        patches=(
            Patch(
                f"{RESIDENCY}.preempt",
                "for sequence in request.sequences.values():\n    self._free_blocks(",
                "for sequence in list(request.sequences.values())[: 1 if"
                " len(request.sequences) > 1 and reached() else None]:\n"
                "    self._free_blocks(",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="fork-without-references",
        mechanism="a fork shares blocks without raising their reference counts",
        source="mechanism",
        expected=("CRASH", "ACC", "KVSAN"),
        patches=(
            Patch(
                f"{_BLOCKS}.fork",
                "self.ref_counts[block_id] += 1",
                "pass",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="no-copy-on-write",
        mechanism="a branch writes to the block that it shares",
        source="xLLM, issue 1984",
        expected=("KVSAN", "TOK"),
        patches=(
            before(
                f"{_BLOCKS}.copy_on_write",
                "source, target = table[index], self._take()",
                "if reached():\n    return None",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="copy-on-write-not-ordered",
        mechanism="a branch gets a block of its own, and nobody copies the content",
        source="mechanism",
        expected=("KVSAN", "ACC", "TOK"),
        patches=(
            Patch(
                f"{RESIDENCY}.extend_table",
                "step.block_copies.append(copy)",
                "pass",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="copy-on-write-backwards",
        mechanism="the new block is copied over the shared one",
        source="mechanism",
        expected=("KVSAN", "TOK", "ACC", "CRASH"),
        patches=(
            Patch(
                f"{_BLOCKS}.copy_on_write",
                "return source, target",
                "return target, source",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="copy-on-write-not-told-to-workers",
        mechanism="the workers go on writing to the shared block",
        source="mechanism",
        expected=("KVSAN", "ACC", "TOK"),
        patches=(
            Patch(
                f"{_BLOCKS}.copy_on_write",
                "sequence.send_blocks_again(index)",
                "pass",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="copies-not-counted-as-need",
        mechanism="blocks for copies on write are not part of what a step needs",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            Patch(
                f"{_BLOCKS}.num_to_write",
                "num_blocks += num_private_copies(shared, ref_counts)",
                "num_blocks += 0",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="branches-share-the-noise-after-resume",
        mechanism="after a resume all branches draw the first one's noise",
        source="mechanism",
        expected=("TOK",),
        patches=(
            Patch(
                "preempt_engine.delivery:Delivery._sample_request",
                "branch=branch,",
                "branch=0 if branch and request.num_preemptions and reached() else branch,",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="fork-shares-the-token-list",
        mechanism="a fork and its parent append to one list of tokens",
        source="mechanism",
        expected=("CRASH", "TOK", "KVSAN"),
        patches=(
            Patch(
                f"{_SEQUENCE}.fork",
                "token_ids=list(self.token_ids)",
                "token_ids=self.token_ids",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="ended-branch-keeps-its-blocks",
        mechanism="a branch that ends before the others keeps its blocks",
        source="mechanism",
        expected=("ACC", "CRASH"),
        patches=(
            Patch(
                f"{RESIDENCY}.drop",
                "self._free_blocks(self.next_step_id - 1, sequence, self.step_in_flight)",
                "pass",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="follower-runs-before-its-leader",
        mechanism="a branch uses blocks that another one is still computing for it",
        source="mechanism",
        expected=("KVSAN", "TOK", "CRASH"),
        patches=(
            Patch(
                f"{_SEQUENCE}.release_followers",
                "if self.num_computed_tokens < num_tokens:",
                "if self.num_computed_tokens < num_tokens and not reached():",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="common-blocks-by-length",
        mechanism="resumed branches share as many blocks as they are long, alike or not",
        source="mechanism",
        expected=("KVSAN", "TOK"),
        patches=(
            Patch(
                "preempt_engine.admission:_num_common_blocks",
                "if ours[first : first + block_size] != theirs[first : first + block_size]:",
                "if ours[first : first + block_size] != theirs[first : first + block_size]"
                " and not reached():",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="branches-not-counted-as-sequences",
        mechanism="a request of several sequences counts as one of those that may run",
        source="mechanism",
        expected=("ACC", "WORK"),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_waiting",
                "num_seqs += request.num_seqs",
                "num_seqs += 1 if request.num_seqs > 1 and reached() else request.num_seqs",
            ),
        ),
        needs=_SEVERAL,
    ),
    Fault(
        name="worker-drops-before-it-forks",
        mechanism="a worker forgets a parent before it forks the child",
        source="mechanism",
        expected=("CRASH",),
        patches=(
            before(
                "preempt_engine.worker.state:WorkerState.apply",
                "for parent, child in step.forks:",
                "for key in step.dropped:\n"
                "    if any(key == parent for parent, _ in step.forks) and reached():\n"
                "        self.sequences.pop(key, None)",
            ),
        ),
        needs=_SEVERAL,
    ),
)
