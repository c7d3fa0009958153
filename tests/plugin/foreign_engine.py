"""A small engine of somebody else's: paged KV, its own scheduler, a toy model. No harness in here.

Continuous batching with chunked prefill, prefix caching and preemption by recompute. Attention is a
hash over the slots that are read through the block table, so a wrong slot changes the output. What
happens is told to a listener by name. `bug` plants one fault; all but one wait for a preemption.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 32
Listener = Callable[[str, dict[str, Any]], None]


class EngineFaultError(RuntimeError):
    """What the planted exception raises."""


@dataclass(eq=False)
class Sequence:
    """One request."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    arrival: int
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_prefill: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    finish_reason: str = ""

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class ToyModel:
    """Next-token logits from the KV slots read.

    Args:
        tie_at: with so many slots read, the two best tokens are exactly equal.
    """

    def __init__(self, tie_at: int | None = None) -> None:
        self._tie_at = tie_at

    def slot(self, previous: int, token_id: int, position: int) -> int:
        """What is stored for a token: it depends on the whole history."""
        return hash((previous, token_id, position))

    def logits(self, slots: list[int]) -> list[float]:
        """[VOCAB_SIZE], within [-8, 8)."""
        state = hash(tuple(slots))
        values = [hash((state, token)) / 2**60 for token in range(VOCAB_SIZE)]
        if len(slots) == self._tie_at:
            first, second = sorted(range(VOCAB_SIZE), key=values.__getitem__)[-2:]
            values[first] = values[second]
        return values

    def pick(self, logits: list[float], row_len: int) -> int:
        """The best token; of equal ones, kernels for one and for many rows prefer different."""
        highest = max(logits)
        best = [token for token, value in enumerate(logits) if value == highest]
        return best[0] if row_len == 1 else best[-1]

    def logprobs(self, token_ids: list[int], start: int) -> list[list[float]]:
        """Log probabilities of the tokens at `start` and after, each given those before it."""
        slots: list[int] = []
        rows = []
        for position, token_id in enumerate(token_ids):
            if position >= start:
                logits = self.logits(slots)
                norm = math.log(sum(map(math.exp, logits)))
                rows.append([value - norm for value in logits])
            slots.append(self.slot(slots[-1] if slots else 0, token_id, position))
        return rows


class ForeignEngine:
    """Runs requests, one step at a time."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        max_running: int,
        prefix_caching: bool,
        listener: Listener,
        bug: str = "",
        tie_at: int | None = None,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.token_budget, self.max_running = token_budget, max_running
        self.prefix_caching, self.bug = prefix_caching, bug
        self.model = ToyModel(tie_at)
        self.step_id = 0
        self.sequences: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free = list(range(num_blocks))
        self.cached: dict[int, None] = {}  # unreferenced, findable; least recently used first
        self.refs: collections.Counter[int] = collections.Counter()
        self.counters = dict.fromkeys(("num_preemptions", "num_steps", "num_computed_tokens"), 0)
        self._slots = [0] * (num_blocks * block_size)
        self._key_of: dict[int, tuple[int, ...]] = {}
        self._block_of: dict[tuple[int, ...], int] = {}
        self._forced: list[str] = []
        self._tell = listener

    # From outside -------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request; one that the pool can never hold ends at once."""
        fields = {"request": name, "prompt_token_ids": list(prompt), "max_tokens": max_tokens}
        self._tell("Arrived", fields)
        sequence = Sequence(name, list(prompt), len(prompt), max_tokens, len(self.sequences))
        self.sequences[name] = sequence
        if self._blocks_for(len(prompt) + max_tokens - 1) > self.num_blocks:
            self._end(sequence, "error")
        else:
            self.waiting.append(sequence)

    def preempt(self, name: str) -> None:
        """Preempt before the next step."""
        self._forced.append(name)

    def step(self) -> None:
        """Schedule, compute, deliver."""
        before = self.counters["num_preemptions"]
        for sequence in [item for item in self.running if item.name in self._forced]:
            self._preempt(sequence, "forced")
        self._forced.clear()
        rows = self._schedule_running()
        if self.counters["num_preemptions"] == before:
            rows += self._schedule_waiting(self.token_budget - sum(end - s for _, s, end in rows))
        if rows:
            self.counters["num_steps"] += 1
            self._tell("StepLaunched", {})
            logits = self._forward(rows)
            self._tell("StepDone", {})
            for row, values in zip(rows, logits, strict=True):
                self._update(*row, values)
        self._tell("PoolCounts", self.pool_counts())
        self.step_id += 1

    def pool_counts(self) -> dict[str, int]:
        """Sizes of the pool's parts."""
        sizes = {"free": len(self.free), "cached": len(self.cached), "used": len(self.refs)}
        return {"num_blocks": self.num_blocks, **sizes}

    def pool_state(self) -> dict[str, Any]:
        """The raw content of pool and queues."""
        return {
            "num_blocks": self.num_blocks,
            "free": list(self.free),
            "cached": list(self.cached),
            "held": [],
            "fenced": [],
            "ref_counts": [self.refs.get(block, 0) for block in range(self.num_blocks)],
            "tables": {f"{item.name}.0": list(item.block_table) for item in self.running},
            "waiting": [item.name for item in self.waiting],
            "running": [item.name for item in self.running],
        }

    # Scheduling ---------------------------------------------------------------------------------

    def _schedule_running(self) -> list[tuple[Sequence, int, int]]:
        rows: list[tuple[Sequence, int, int]] = []
        budget = self.token_budget
        for sequence in list(self.running):
            if sequence not in self.running or not budget:
                continue
            end = min(len(sequence.token_ids), sequence.num_computed + budget)
            while self._missing(sequence, end) > len(self.free) + len(self.cached):
                victim = self.running[-1]
                self._preempt(victim, "out_of_blocks")
                if victim is sequence:
                    return rows
            self._grow(sequence, end, [])
            rows.append(self._scheduled(sequence, end))
            budget -= end - sequence.num_computed
        return rows

    def _schedule_waiting(self, budget: int) -> list[tuple[Sequence, int, int]]:
        rows = []
        while self.waiting and budget and len(self.running) < self.max_running:
            sequence = min(self.waiting, key=lambda item: item.arrival)
            if self.bug == "idle" and sequence.num_preemptions:
                break
            hits = self._find_prefix(sequence)
            needed = self._missing(sequence, len(sequence.token_ids)) - len(hits)
            revived = sum(block in self.cached for block in hits)
            if needed + revived > len(self.free) + len(self.cached):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.num_prefill = len(sequence.token_ids)
            sequence.num_computed = len(hits) * self.block_size
            sequence.num_chunks = sequence.num_steps = 0
            if sequence.num_preemptions:
                fields = {"request": sequence.name, "num_cached_tokens": sequence.num_computed}
                self._tell("Resumed", fields)
            self._grow(sequence, len(sequence.token_ids), hits)
            end = min(len(sequence.token_ids), sequence.num_computed + budget)
            rows.append(self._scheduled(sequence, end))
            budget -= end - sequence.num_computed
        return rows

    def _scheduled(self, sequence: Sequence, end: int) -> tuple[Sequence, int, int]:
        start = sequence.num_computed
        self._tell("Scheduled", {"seq": f"{sequence.name}.0", "start": start, "end": end})
        self.counters["num_computed_tokens"] += end - start
        return sequence, start, end

    def _preempt(self, victim: Sequence, reason: str) -> None:
        fields = {"request": victim.name, "mode": "recompute", "reason": reason}
        counts = {"num_computed_tokens": victim.num_computed, "num_tokens": len(victim.token_ids)}
        self._tell("Preempted", {**fields, **counts, "phase": self._phase(victim)})
        self._release(victim)
        self.running.remove(victim)
        self.waiting.append(victim)
        victim.num_preemptions += 1
        self.counters["num_preemptions"] += 2 if self.bug == "counter" else 1

    def _phase(self, sequence: Sequence) -> str:
        if sequence.num_preemptions and sequence.num_steps <= 1:
            return "just_resumed"
        remaining = sequence.num_prefill - sequence.num_computed
        if remaining > self.token_budget:
            return "prefill_first" if sequence.num_chunks <= 1 else "prefill_middle"
        if remaining > 0:
            return "prefill_last"
        return "first_decode" if len(sequence.output) == 1 else "decode"

    # Blocks -------------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        return self._blocks_for(num_tokens) - len(sequence.block_table)

    def _key(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        """A full block's content: its tokens and all tokens before it."""
        first = index * self.block_size if self.bug == "prefix_without_parent" else 0
        return tuple(sequence.token_ids[first : (index + 1) * self.block_size])

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        hits: list[int] = []
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            block = self._block_of.get(self._key(sequence, index))
            if block is None or not self.prefix_caching:
                break
            hits.append(block)
        return hits

    def _grow(self, sequence: Sequence, num_tokens: int, hits: list[int]) -> None:
        for block in hits:
            self.cached.pop(block, None)
            self.refs[block] += 1
        sequence.block_table += hits
        fresh = [self._take() for _ in range(self._missing(sequence, num_tokens))]
        sequence.block_table += fresh
        if hits or fresh:
            fields = {"seq": f"{sequence.name}.0", "blocks": hits + fresh, "num_cached": len(hits)}
            self._tell("BlocksAllocated", fields)

    def _take(self) -> int:
        if self.free:
            block = self.free.pop(0)
        else:
            block = next(iter(self.cached))
            del self.cached[block], self._block_of[self._key_of.pop(block)]
        self.refs[block] = 1
        return block

    def _release(self, sequence: Sequence) -> None:
        blocks, sequence.block_table = sequence.block_table, []
        self._tell("BlocksFreed", {"seq": f"{sequence.name}.0", "blocks": blocks})
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                self.cached.update({block: None} if block in self._key_of else {})
                self.free.extend([block] if block not in self._key_of else [])
        sequence.num_computed = 0

    def _make_findable(self, sequence: Sequence) -> None:
        for index in range(sequence.num_computed // self.block_size if self.prefix_caching else 0):
            block, key = sequence.block_table[index], self._key(sequence, index)
            if block not in self._key_of and key not in self._block_of:
                self._key_of[block], self._block_of[key] = key, block

    # Computing ----------------------------------------------------------------------------------

    def _forward(self, rows: list[tuple[Sequence, int, int]]) -> list[list[float]]:
        """All rows write, then all read; logits of each row's last token."""
        given = [self._row(*row) for row in rows]
        for (sequence, start, _), (token_ids, table) in zip(rows, given, strict=True):
            slots = self._slots_of(table, start + len(token_ids))
            for position, token_id in enumerate(token_ids, start):
                previous = self._slots[slots[position - 1]] if position else 0
                self._slots[slots[position]] = self.model.slot(previous, token_id, position)
            names = ("seq", "start", "token_ids", "written_slots", "block_table", "read_len")
            values = (f"{sequence.name}.0", start, token_ids, slots[start:], table, len(slots))
            self._tell("Computed", dict(zip(names, values, strict=True)))
        logits = []
        for (sequence, start, _), (token_ids, table) in zip(rows, given, strict=True):
            slots = self._slots_of(table, start + len(token_ids))
            logits.append(self.model.logits([self._slots[slot] for slot in slots]))
            if self.bug == "corrupt_slot" and self._comes_back(sequence, start):
                self._slots[slots[0]] += 1  # behind the logits of this row
        return logits

    def _row(self, sequence: Sequence, start: int, end: int) -> tuple[list[int], list[int]]:
        """Token ids and block table as the worker gets them."""
        token_ids, table = sequence.token_ids[start:end], list(sequence.block_table)
        if self._comes_back(sequence, start):
            crash(self.bug)
            if self.bug == "dropped_tail_token":
                token_ids = token_ids[:-1]
        if self.bug == "swapped_blocks" and sequence.num_preemptions and len(table) > 1:
            table[:2] = table[1::-1]
        return token_ids, table

    def _comes_back(self, sequence: Sequence, start: int) -> bool:
        """True in the step that has recomputed what a preemption took."""
        return bool(sequence.num_preemptions) and start < sequence.num_prefill

    def _slots_of(self, table: list[int], end: int) -> list[int]:
        size = self.block_size
        return [table[position // size] * size + position % size for position in range(end)]

    def _update(self, sequence: Sequence, start: int, end: int, logits: list[float]) -> None:
        came_back = self._comes_back(sequence, start)
        sequence.num_computed = end
        sequence.num_steps += 1
        sequence.num_chunks += start < sequence.num_prefill
        self._make_findable(sequence)
        if end < len(sequence.token_ids):
            return
        sequence.token_ids.append(self.model.pick(logits, end - start))
        repeated = self.bug == "repeated_delta" and came_back
        delta = sequence.token_ids[-2:] if repeated else sequence.token_ids[-1:]
        self._tell("TokensDelivered", {"seq": f"{sequence.name}.0", "token_ids": delta})
        if len(sequence.output) == sequence.max_tokens:
            self.running.remove(sequence)
            self._release(sequence)
            self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self._tell("Finished", {"request": sequence.name, "reason": reason})


def crash(bug: str) -> None:
    """The ways an engine dies."""
    if bug == "exception":
        raise EngineFaultError("CUDA error: an illegal memory access was encountered")
    if bug == "segfault":
        ctypes.string_at(0)
    if bug == "exit":
        os._exit(3)
    if bug == "stall":
        threading.Event().wait()
    if bug == "c_loop":
        collections.deque(itertools.repeat(0), maxlen=0)  # a loop in C that looks at no signal
