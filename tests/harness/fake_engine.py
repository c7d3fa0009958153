"""A small paged-KV engine in pure Python that emits trial records, with faults on request.

Scheduler and worker in one: continuous batching, chunked prefill, prefix caching, preemption by
recompute, block moves (allocate, copy, free), poison. The next token is a function of the
sequence's tokens, so outputs have a closed form. A fault changes what the engine does or says;
without one its records are clean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from preempt_harness.checks import Finding, run_checks
from preempt_harness.record import (
    Aborted,
    Arrived,
    Baseline,
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksPoisoned,
    Computed,
    Counters,
    Event,
    Finished,
    Header,
    PoolCounts,
    PoolState,
    Preempted,
    RequestResult,
    Resumed,
    Scheduled,
    SequenceOutput,
    StepDone,
    StepLaunched,
    StepSent,
    TokensDelivered,
    TrialRecord,
    WorkerCopied,
    event_names,
)
from preempt_harness.workload import RequestSpec, Workload

VOCAB_SIZE = 64


def next_token(token_ids: list[int]) -> int:
    """The model."""
    digest = hashlib.blake2b(bytes(token_ids), digest_size=2).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


@dataclass(kw_only=True)
class FakeConfig:
    """How the engine runs; `forced` maps a step to the requests preempted before it."""

    num_blocks: int = 12
    block_size: int = 4
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 8
    enable_prefix_caching: bool = True
    num_ranks: int = 1
    move_every: int = 0
    max_steps: int = 2000
    forced: dict[int, tuple[str, ...]] = field(default_factory=dict)
    faults: frozenset[str] = frozenset()


@dataclass(eq=False)
class Job:
    """One request with its one sequence."""

    spec: RequestSpec
    index: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    sent_table: list[int] = field(default_factory=list)
    computed: int = 0
    high_water: int = 0
    sent: bool = False
    num_steps: int = 0
    num_preemptions: int = 0
    num_cached: int | None = None

    @property
    def seq(self) -> str:
        return f"{self.spec.id}.0"

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.spec.num_prompt_tokens


class FakeEngine:
    """Runs a workload to its end and keeps the record."""

    def __init__(self, workload: Workload, config: FakeConfig) -> None:
        self.config = config
        self.workload = workload
        self.events: list[Event] = []
        self.results: dict[str, RequestResult] = {}
        self.step = 0
        self.arriving = [
            Job(s, i, list(s.prompt_token_ids)) for i, s in enumerate(workload.requests)
        ]
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.free = list(range(config.num_blocks))
        self.cached: dict[int, None] = {}
        self.refs: dict[int, int] = {}
        self.block_of: dict[object, int] = {}
        self.hash_of: dict[int, object] = {}
        self.to_poison: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.counters = dict.fromkeys(
            (
                "num_preemptions",
                "num_recomputed_tokens",
                "num_cached_tokens",
                "num_computed_tokens",
                "num_generated_tokens",
                "num_finished_requests",
                "num_steps",
            ),
            0,
        )

    def has(self, fault: str) -> bool:
        return fault in self.config.faults

    # Running ------------------------------------------------------------------------------------

    def run(self) -> TrialRecord:
        while (self.arriving or self.waiting or self.running) and self.step < self.config.max_steps:
            self._operations()
            self._one_step()
            self.step += 1
        self._pool_state()
        return TrialRecord(
            header=header_for(self.workload, self.config),
            events=list(self.events),  # type: ignore[arg-type]
            results=self.results,
            baseline=baseline_for(self.workload),
        )

    def _operations(self) -> None:
        for job in [job for job in self.arriving if job.spec.arrival_step <= self.step]:
            self.arriving.remove(job)
            self.waiting.append(job)
            spec = job.spec
            self._emit(Arrived(self.step, spec.id, spec.prompt_token_ids, spec.sampling.max_tokens))
        for operation in self.workload.operations:
            if operation.step == self.step and operation.kind == "abort":
                for job in [*self.waiting, *self.running]:
                    if job.spec.id == operation.request:
                        self._end(job, "abort")

    def _one_step(self) -> None:
        for job in [j for j in self.running if j.spec.id in self.config.forced.get(self.step, ())]:
            self._preempt(job, "forced")
        if self.running and self.config.move_every and self.step % self.config.move_every == 0:
            self.copies = self._move_last_block(self.running[0])
        preempted_before = len(self.waiting)
        rows = self._schedule_running()
        budget = self.config.max_num_batched_tokens - sum(end - job.computed for job, end in rows)
        may_admit = preempted_before == len(self.waiting) and not self.config.forced.get(self.step)
        if may_admit:
            rows += self._schedule_waiting(budget)
        if rows:
            self._execute(rows)
            self._update(rows)
        used = len(self.refs)
        self._emit(
            PoolCounts(self.step, self.config.num_blocks, len(self.free), len(self.cached), used)
        )
        self._pool_state()

    def _schedule_running(self) -> list[tuple[Job, int]]:
        rows: list[tuple[Job, int]] = []
        budget = self.config.max_num_batched_tokens
        for job in list(self.running):
            if job not in self.running or budget <= 0:
                continue
            end = min(len(job.tokens), job.computed + budget)
            while self._missing(job, end) > len(self.free) + len(self.cached):
                victim = self.running[-1]
                self._preempt(victim, "out_of_blocks")
                if victim is job:
                    return rows
            self._allocate(job, [self._take() for _ in range(self._missing(job, end))], 0)
            rows.append(self._scheduled(job, end))
            budget -= end - job.computed
        return rows

    def _schedule_waiting(self, budget: int) -> list[tuple[Job, int]]:
        rows: list[tuple[Job, int]] = []
        self.waiting.sort(key=lambda job: -job.index if self.has("reverse_order") else job.index)
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            job = self.waiting[0]
            if self.has("never_resume") and job.num_preemptions:
                break
            hits = self._hits(job)
            needed = self._missing(job, len(job.tokens)) - len(hits)
            revived = sum(block in self.cached for block in hits)
            if needed + revived > len(self.free) + len(self.cached):
                break
            self.waiting.pop(0)
            self._admit(job, hits, needed)
            end = min(len(job.tokens), job.computed + budget)
            rows.append(self._scheduled(job, end))
            budget -= end - job.computed
        return rows

    def _admit(self, job: Job, hits: list[int], needed: int) -> None:
        num_cached = len(hits) * self.config.block_size
        if job.num_cached is None:
            job.num_cached = num_cached
            self.counters["num_cached_tokens"] += num_cached
        else:
            self._emit(Resumed(self.step, job.spec.id, num_cached))
            self.counters["num_cached_tokens"] += num_cached * self.has("recompute_is_hit")
        for block in hits:
            self.cached.pop(block, None)
        for block in hits:
            self.refs[block] = self.refs.get(block, 0) + 1
        fresh = [self._take() for _ in range(needed)]
        if self.has("double_map") and self.running and fresh:
            self.free.append(fresh[0])
            fresh[0] = self.running[0].table[0]
        job.table = list(hits)
        shares_other = self.has("share_unfilled") and self.running and not hits
        if shares_other and self.running[0].table[-1] not in fresh:
            self.free.append(fresh[0])
            fresh[0] = self.running[0].table[-1]
        self._allocate(job, fresh, 0, hits=hits, num_shared=int(bool(shares_other)))
        if self.has("register_early"):
            job.computed = len(job.tokens)
            self._register(job)
        job.computed = num_cached + (self.has("skip_token") and job.num_preemptions > 0)
        job.sent, job.num_steps = False, 0
        self.running.append(job)

    def _scheduled(self, job: Job, end: int) -> tuple[Job, int]:
        self.counters["num_computed_tokens"] += end - job.computed
        self.counters["num_recomputed_tokens"] += max(0, min(end, job.high_water) - job.computed)
        self._emit(Scheduled(self.step, job.seq, job.computed, end))
        return job, end

    # Blocks -------------------------------------------------------------------------------------

    def _missing(self, job: Job, end: int) -> int:
        return -(-end // self.config.block_size) - len(job.table)

    def _take(self) -> int:
        if self.free:
            return self.free.pop(0)
        block = next(iter(self.cached))
        del self.cached[block]
        key = self.hash_of.pop(block)
        if not self.has("stale_hash"):
            del self.block_of[key]
        return block

    def _allocate(
        self, job: Job, fresh: list[int], _: int, *, hits: Iterable[int] = (), num_shared: int = 0
    ) -> None:
        for block in fresh:
            self.refs[block] = self.refs.get(block, 0) + 1
        job.table.extend(fresh)
        blocks = [*hits, *fresh]
        if blocks:
            num_cached = len(list(hits)) + num_shared
            self._emit(BlocksAllocated(self.step, job.seq, blocks, num_cached))

    def _release(self, job: Job) -> None:
        blocks, job.table = job.table, []
        if self.has("leak") and self.results.get(job.spec.id) is None and len(blocks) > 1:
            blocks = blocks[:-1]
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                self._set_free(block)
        if blocks:
            again = blocks[-1:] if self.has("double_free") else []
            self._emit(BlocksFreed(self.step, job.seq, blocks + again))

    def _set_free(self, block: int) -> None:
        if block in self.hash_of:
            self.cached[block] = None
        else:
            self.free.append(block)
            self.to_poison.append(block)

    def _key(self, job: Job, index: int) -> object:
        size = self.config.block_size
        first = index * size if self.has("no_parent") else 0
        return index if self.has("no_content") else tuple(job.tokens[first : (index + 1) * size])

    def _hits(self, job: Job) -> list[int]:
        hits: list[int] = []
        limit = (len(job.tokens) - 1) // self.config.block_size
        while self.config.enable_prefix_caching and len(hits) < limit:
            block = self.block_of.get(self._key(job, len(hits)))
            if block is None or block in hits or block in self.free:
                break
            hits.append(block)
        return hits

    def _register(self, job: Job) -> None:
        for index in range(job.computed // self.config.block_size):
            key, block = self._key(job, index), job.table[index]
            if key not in self.block_of and block not in self.hash_of:
                self.block_of[key] = block
                self.hash_of[block] = key

    def _move_last_block(self, job: Job) -> list[tuple[int, int]]:
        """Defragmentation: the last block, if it is the sequence's alone, moves elsewhere."""
        old = job.table[-1]
        if not self.free or self.refs[old] > 1 or old in self.hash_of:
            return []
        new = self.free.pop(0)
        del self.refs[old]
        self.refs[new] = 1
        job.table[-1] = new
        self._emit(BlocksAllocated(self.step, job.seq, [new]))
        self._emit(BlocksFreed(self.step, job.seq, [old]))
        self._set_free(old)
        return [(old, new)]

    def _preempt(self, job: Job, reason: str) -> None:
        self._emit(
            Preempted(
                self.step,
                job.spec.id,
                "recompute",
                self._phase(job),
                reason,
                job.computed,
                len(job.tokens),
            )
        )
        self._release(job)
        self.running.remove(job)
        self.waiting.insert(0, job)
        job.computed = 0
        job.num_preemptions += 1
        self.counters["num_preemptions"] += 1

    def _phase(self, job: Job) -> str:
        if job.num_preemptions and job.num_steps <= 1:
            return "just_resumed"
        remaining = len(job.tokens) - job.computed
        if remaining > self.config.max_num_batched_tokens:
            return "prefill_first" if job.num_steps <= 1 else "prefill_middle"
        if remaining > 1:
            return "prefill_last"
        return "first_decode" if job.num_outputs == 1 else "decode"

    # The worker -----------------------------------------------------------------------------------

    def _execute(self, rows: list[tuple[Job, int]]) -> None:
        copies, self.copies = self.copies, []
        sources = [source for source, _ in copies]  # copied after the poison: not poisoned yet
        poison = [b for b in self.to_poison if b in self.free and b not in sources]
        self.to_poison = [block for block in self.to_poison if block in sources]
        if self.has("poison_live") and rows[0][0].computed:
            poison.append(rows[0][0].table[0])
        if copies:
            self._emit(BlocksCopied(self.step, copies))
        for rank in range(self.config.num_ranks):
            self._emit(StepSent(self.step, rank, self._num_bytes(rows)))
        self._emit(StepLaunched(self.step))
        for rank in range(self.config.num_ranks):
            if poison:
                self._emit(BlocksPoisoned(self.step, rank, poison))
            if copies and not self.has("lost_copy"):
                self._emit(WorkerCopied(self.step, rank, copies))
        tables = {job.seq: self._worker_table(job) for job, _ in rows}
        for rank in range(self.config.num_ranks):
            for job, end in rows:
                self._emit(self._row(job, end, tables[job.seq], rank))
        for job, _ in rows:
            job.sent_table = tables[job.seq]
            job.sent = True
        self.counters["num_steps"] += 1
        self._emit(StepDone(self.step))

    def _worker_table(self, job: Job) -> list[int]:
        table = list(job.table)
        if self.has("swap_table") and job.num_preemptions and len(table) >= 2:
            table[0], table[1] = table[1], table[0]
        if self.has("old_table") and job.num_preemptions and self.free:
            table[0] = self.free[0]
        if self.has("block_twice") and len(table) >= 2:
            table[1] = table[0]
        if self.has("id_range"):
            table[-1] = self.config.num_blocks
        return table

    def _row(self, job: Job, end: int, table: list[int], rank: int) -> Computed:
        size = self.config.block_size
        tokens = job.tokens[job.computed : end]
        if self.has("stale_token") and job.num_preemptions and job.num_outputs:
            tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
        if self.has("rank_token") and rank == 1:
            tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
        slots = [table[p // size] * size + p % size for p in range(job.computed, end)]
        if self.has("wrong_slot") and job.num_outputs == 2:
            slots[-1] = slots[-1] ^ 1
        keep = 0
        while keep < min(len(job.sent_table), len(table)) and job.sent_table[keep] == table[keep]:
            keep += 1
        read_len = end + self.has("read_long") - self.has("read_short")
        return Computed(
            self.step, rank, job.seq, job.computed, tokens, slots, keep, table[keep:], read_len
        )

    def _num_bytes(self, rows: list[tuple[Job, int]]) -> int:
        num_ids = 0
        for job, _ in rows:
            all_ids = not job.sent or self.has("resend_ids")
            num_ids += len(job.tokens) + len(job.table) if all_ids else 1
        return 24 + 14 * len(rows) + 2 * num_ids

    # Applying -------------------------------------------------------------------------------------

    def _update(self, rows: list[tuple[Job, int]]) -> None:
        for job, end in rows:
            job.computed = end
            job.high_water = max(job.high_water, end)
            job.num_steps += 1
            self._register(job)
        for job, end in rows:
            if end < len(job.tokens):
                continue
            token = next_token(job.tokens)
            job.tokens.append(token)
            self.counters["num_generated_tokens"] += 1
            logprobs = None if job.spec.sampling.logprobs is None else [{token: -0.5}]
            self._emit(TokensDelivered(self.step, job.seq, [token], logprobs, f"<{token}>"))
            if job.num_outputs == job.spec.sampling.max_tokens:
                self._end(job, "length")

    def _end(self, job: Job, reason: str) -> None:
        self._release(job)
        (self.running if job in self.running else self.waiting).remove(job)
        output = output_of(job.spec, job.tokens[job.spec.num_prompt_tokens :], reason)
        self.results[job.spec.id] = RequestResult(
            outputs=[output],
            finished=reason != "abort",
            num_cached_tokens=job.num_cached or 0,
            num_preemptions=job.num_preemptions,
        )
        if reason == "abort":
            self._emit(Aborted(self.step, job.spec.id))
        else:
            self._emit(Finished(self.step, job.spec.id, reason))
            self.counters["num_finished_requests"] += 1

    def _pool_state(self) -> None:
        self._emit(
            PoolState(
                step=self.step,
                num_blocks=self.config.num_blocks,
                free=list(self.free),
                cached=list(self.cached),
                held=[],
                fenced=[],
                ref_counts=[self.refs.get(block, 0) for block in range(self.config.num_blocks)],
                tables={job.seq: list(job.table) for job in self.running},
                waiting=[job.spec.id for job in self.waiting],
                running=[job.spec.id for job in self.running],
            )
        )
        self._emit(Counters(self.step, dict(self.counters)))

    def _emit(self, event: Event) -> None:
        self.events.append(event)


def header_for(workload: Workload, config: FakeConfig) -> Header:
    """Header of the engine's records: everything is observed."""
    return Header(
        workload=workload.to_builtins(),
        engine="fake",
        model="closed form",
        config={
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "enable_prefix_caching": config.enable_prefix_caching,
        },
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        observed=sorted(event_names()),
        batch_invariant=True,
        vocab_size=VOCAB_SIZE,
        num_ranks=config.num_ranks,
    )


def output_of(spec: RequestSpec, token_ids: list[int], reason: str) -> SequenceOutput:
    """What the user got for these tokens."""
    return SequenceOutput(
        token_ids=token_ids,
        text="".join(f"<{token}>" for token in token_ids),
        logprobs=None if spec.sampling.logprobs is None else [{t: -0.5} for t in token_ids],
        finish_reason=reason,
    )


def baseline_for(workload: Workload) -> Baseline:
    """The closed form of every request's output."""
    results = {}
    for spec in workload.requests:
        tokens = list(spec.prompt_token_ids)
        for _ in range(spec.sampling.max_tokens):
            tokens.append(next_token(tokens))
        output = output_of(spec, tokens[spec.num_prompt_tokens :], "length")
        results[spec.id] = RequestResult(outputs=[output], finished=True)
    return Baseline(kind="closed-form", results=results)


def run_fake(workload: Workload, **config: object) -> TrialRecord:
    """The record of one run; keyword arguments are `FakeConfig`'s."""
    return FakeEngine(workload, FakeConfig(**config)).run()  # type: ignore[arg-type]


def work_findings(record: TrialRecord, part: str) -> list[Finding]:
    """What one part of check "work" finds in a record."""
    return [
        finding
        for result in run_checks(record, ["work"]).of("work")
        if result.part == part
        for finding in result.findings
    ]
