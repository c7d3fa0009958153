"""Limits that a preemption shifts: of the queue, of no token or one, of a block's last slot."""

from __future__ import annotations

from preempt_harness.faults.fault import Fault, Patch, after, before
from preempt_harness.faults.places import (
    APPEND,
    BUILDER,
    BUILDER_APPEND,
    DELIVERY,
    INTAKE,
    PREEMPT,
    PUSH,
    RESIDENCY,
    SCHEDULER,
)

_LLM = "preempt_engine.llm:LLM"
_WAITING = "len(self.scheduler.waiting)"
_QUEUE = frozenset({"queue_limit"})

FAULTS = (
    Fault(
        name="victim-refused-by-the-queue-limit",
        mechanism="a preempted request that finds the queue full is refused",
        source="https://github.com/sgl-project/sglang/issues/37260",
        expected=("PROG", "DEL", "TOK"),
        patches=(
            before(
                PREEMPT,
                PUSH,
                "limit = self.config.max_waiting_requests\n"
                "if limit is not None and len(self.waiting) >= limit and reached():\n"
                "    self.__dict__.setdefault('_refused', []).append(request.request_id)",
            ),
            after(
                f"{_LLM}.schedule",
                "step = self.scheduler.schedule()",
                "from preempt_engine.errors import QueueFullError\n"
                "for name in self.scheduler.residency.__dict__.pop('_refused', ()):\n"
                "    request = self.scheduler.requests[name]\n"
                "    builders = self._delivery._builders[name]\n"
                "    for builder in builders:\n"
                "        builder.fail(QueueFullError('The queue is full.', 'Try again.'))\n"
                "    self._outbox.put(builders[0].output)\n"
                "    self._delivery._searches.pop(name, None)\n"
                "    self._delivery._finish(request, 'error')",
                reached=False,
            ),
        ),
        needs=_QUEUE,
    ),
    Fault(
        name="victims-fill-the-queue-twice",
        mechanism="a waiting request that was preempted counts twice in the queue",
        source="mechanism",
        expected=("PROG",),
        patches=(
            Patch(
                f"{INTAKE}.queue_is_full",
                f"return limit is not None and {_WAITING} >= limit",
                "victims = sum(other.num_preemptions > 0"
                " for other in self.scheduler.waiting.in_order())\n"
                "return limit is not None and"
                f" {_WAITING} + (victims if victims and reached() else 0) >= limit",
            ),
        ),
        needs=_QUEUE,
    ),
    Fault(
        name="no-token-becomes-one-after-resume",
        mechanism="a request of its prompt only is given a token when it was preempted",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            Patch(
                f"{DELIVERY}.deliver",
                "if rows and request.params.max_tokens == 0:",
                "if rows and request.params.max_tokens == 0"
                " and not (request.num_preemptions and reached()):",
            ),
        ),
        needs=frozenset({"prompt_only"}),
    ),
    Fault(
        name="no-token-is-waited-for-after-resume",
        mechanism="nobody tells the end of a request of its prompt only that was preempted",
        source="mechanism",
        expected=("PROG", "CRASH"),
        patches=(
            Patch(
                f"{DELIVERY}._end_prompt",
                'self._finish(request, "length")',
                "if not (request.num_preemptions and reached()):\n"
                '    self._finish(request, "length")',
            ),
        ),
        needs=frozenset({"prompt_only"}),
    ),
    Fault(
        name="one-token-becomes-two-after-resume",
        mechanism="the token after a resumed prefill does not count as the last of one",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"if {BUILDER}.max_output_tokens == 1 and request.num_preemptions and reached():\n"
                f"    {BUILDER}.max_output_tokens = 2",
            ),
        ),
    ),
    Fault(
        name="end-of-sequence-missed-after-resume",
        mechanism="end-of-sequence is a token like others to a request that was preempted",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"if token.token_id in {BUILDER}.eos_token_ids and request.num_preemptions"
                " and reached():\n"
                f"    {BUILDER}.stop_ids = frozenset({BUILDER}.params.stop_token_ids)",
            ),
        ),
        needs=frozenset({"eos"}),
    ),
    Fault(
        name="end-of-sequence-never-looked-for",
        mechanism="no request ends by itself, preempted or not",
        source="mechanism",
        expected=("DEL",),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"if token.token_id in {BUILDER}.eos_token_ids and reached():\n"
                f"    {BUILDER}.stop_ids = frozenset({BUILDER}.params.stop_token_ids)",
            ),
        ),
        needs=frozenset({"eos"}),
    ),
    Fault(
        name="stop-at-a-boundary-missed-after-resume",
        mechanism="a stop token that fills a block does not end a request that was preempted",
        source="mechanism",
        expected=("TOK", "DEL"),
        patches=(
            before(
                APPEND,
                BUILDER_APPEND,
                f"{BUILDER}.stop_ids = {BUILDER}.eos_token_ids"
                f" | frozenset({BUILDER}.params.stop_token_ids)\n"
                f"if token.token_id in {BUILDER}.stop_ids and request.num_preemptions"
                " and sequence.num_tokens % self.scheduler.config.block_size == 0 and reached():\n"
                f"    {BUILDER}.stop_ids = frozenset()",
            ),
        ),
        needs=frozenset({"stop_tokens"}),
    ),
    Fault(
        name="block-that-a-stop-fills-leaks",
        mechanism="the block that a preempted request's stop token fills is not given back",
        source="mechanism",
        expected=("ACC", "KVSAN", "CRASH"),
        patches=(
            before(
                f"{SCHEDULER}.finish",
                "self.residency.leave(request)",
                "if reason == 'stop' and request.num_preemptions and request.sequence.block_table"
                " and request.sequence.num_tokens % self.config.block_size == 0 and reached():\n"
                "    request.sequence.block_table.pop()",
            ),
        ),
        needs=frozenset({"stop_tokens"}),
    ),
    Fault(
        name="drafts-free-of-charge",
        mechanism="drafts are not taken off the token budget, since they were cut to fit it: who "
        "is let in behind them gets their share too",
        source="mechanism",
        expected=("ACC",),
        patches=(
            Patch(
                f"{SCHEDULER}._schedule_work",
                "num_tokens += end - sequence.num_computed_tokens",
                "num_tokens += min(end, sequence.num_tokens) - sequence.num_computed_tokens",
            ),
        ),
        needs=frozenset({"speculation"}),
    ),
    Fault(
        name="waiting-count-misses-aborts",
        mechanism="the length of the queue is kept as a number, which an abort of a waiting "
        "request does not lower: later ones are refused though there is room",
        source="mechanism",
        expected=("DEL", "PROG"),
        patches=(
            after(
                f"{RESIDENCY}.__init__",
                "self.waiting = WaitingQueue()",
                "self.num_waiting = 0",
                reached=False,
            ),
            after(
                f"{RESIDENCY}.arrive",
                "self.waiting.push(request)",
                "self.num_waiting += 1",
                reached=False,
            ),
            after(f"{RESIDENCY}.run", "self.waiting.pop()", "self.num_waiting -= 1", reached=False),
            after(
                f"{RESIDENCY}.preempt",
                "self.waiting.push(request)",
                "self.num_waiting += 1",
                reached=False,
            ),
            Patch(
                f"{INTAKE}.queue_is_full",
                "return limit is not None and len(self.scheduler.waiting) >= limit",
                "return limit is not None and self.scheduler.residency.num_waiting >= limit",
                reached=False,
            ),
            after(f"{RESIDENCY}.leave", "self.waiting.remove(request)", "reached()"),
        ),
        needs=frozenset({"abort", "queue_limit"}),
    ),
    Fault(
        name="branches-denied-the-shared-prompt",
        mechanism="the most that several branches can grow to is worked out as if each had a "
        "prompt of its own: outputs end although there is room",
        source="mechanism",
        expected=("DEL", "TOK"),
        patches=(
            Patch(
                f"{INTAKE}.max_total_tokens",
                "num_own = (self.scheduler.blocks.num_blocks - num_shared) // num_sequences\n"
                "pool_tokens = (num_shared + num_own) * self.config.block_size + 1",
                "num_own = self.scheduler.blocks.num_blocks // num_sequences\n"
                "pool_tokens = num_own * self.config.block_size + 1",
            ),
        ),
        needs=frozenset({"parallel_sampling"}),
    ),
    Fault(
        name="each-branch-may-fill-the-pool",
        mechanism="what several branches have beside the shared prompt is not divided among them: "
        "none of them ends, and they starve together",
        source="mechanism",
        expected=("CRASH", "PROG"),
        patches=(
            Patch(
                f"{INTAKE}.max_total_tokens",
                "num_own = (self.scheduler.blocks.num_blocks - num_shared) // num_sequences",
                "num_own = self.scheduler.blocks.num_blocks - num_shared\n"
                "num_sequences > 1 and reached()",
            ),
        ),
        needs=frozenset({"parallel_sampling", "pool_limit"}),
    ),
)
