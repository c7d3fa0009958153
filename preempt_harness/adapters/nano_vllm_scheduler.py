"""Adapter "nano-vllm-scheduler": nano-vllm's own decisions and messages, exact workers behind them.

The engine's scheduler, block manager and sequences run as they are; its own serialisation carries
sequences to the ranks above 0, each a process of its own in the engine and a copy of its modules
here; its own preparation makes a step's inputs from them. The model is the exact KV model.
"""

from __future__ import annotations

import inspect
import pickle
import platform
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from preempt_harness import record
from preempt_harness.adapters import protocol
from preempt_harness.adapters.nano_vllm_issues import ISSUES, VERSION
from preempt_harness.adapters.nano_vllm_source import (
    PACKAGE,
    PATH_VARIABLE,
    NanoVllm,
    find_source,
)
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue, SessionInfo
from preempt_harness.adapters.scheduler_loop import (
    END_TOKEN_ID,
    VOCAB_SIZE,
    ExactWorkers,
    Log,
    Row,
    Sink,
)
from preempt_harness.admission import AdmissionModel
from preempt_harness.record import AnyEvent, RequestResult, Score
from preempt_harness.workload import RequestSpec

# The engine itself has blocks of 256 and their multiples only. A message holds whole block tables,
# which smaller blocks lengthen beyond all proportion, so its size is shown from there on.
_REAL_BLOCK_SIZE = 256
_OBSERVED = (
    "Arrived",
    "Scheduled",
    "BlocksAllocated",
    "BlocksFreed",
    "Preempted",
    "Resumed",
    "Finished",
    "Aborted",  # which nobody can be
    "PoolCounts",
    "PoolState",
    "StepLaunched",
    "StepDone",
    "Computed",
    "TokensDelivered",
)


class NanoVllmSchedulerAdapter:
    """Adapter "nano-vllm-scheduler"."""

    name = "nano-vllm-scheduler"
    models: tuple[str, ...] = ("exact",)
    block_sizes: tuple[int, ...] = (4, 8, 16, 32, 256)
    isolation = "process"

    @property
    def known_issues(self) -> tuple[KnownIssue, ...]:
        """Of the released package; of a checkout nothing is known."""
        source = find_source()
        return ISSUES if source is not None and source[1] == VERSION else ()

    @property
    def capabilities(self) -> frozenset[str]:
        """Chunked prefill came with a commit of April 2026."""
        able = {
            protocol.STEPPED,
            protocol.PREEMPT,
            protocol.HOLD_BLOCKS,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.TENSOR_PARALLEL,
        }
        if _chunks():
            able.add(protocol.CHUNKED_PREFILL)
        return frozenset(able)

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted when the pool holds all its known tokens.

        The engine's `max_num_seqs` bounds the requests of a step, not those that hold blocks.
        """
        return AdmissionModel(
            policy="full_prompt",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefix_caching=True,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """Of the exact model."""
        return VOCAB_SIZE

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """The exact model has no use for text."""
        return None

    def missing(self) -> str | None:
        """The package, a checkout, or what its block manager imports."""
        if find_source() is None:
            return f"pip install --no-deps {PACKAGE}, or let {PATH_VARIABLE} name a checkout"
        lacking = [name for name in ("numpy", "xxhash") if not _can_import(name)]
        return f"pip install {' '.join(lacking)}" if lacking else None

    def open(self, settings: EngineSettings) -> NanoVllmSession:
        """A fresh scheduler for every session.

        Raises:
            NanoVllmSourceError: what is installed cannot be loaded.
        """
        return NanoVllmSession(settings)


class NanoVllmSession:
    """One scheduler of nano-vllm, one step a poll.

    Args:
        settings: options are "worker_block_size": the block size that the ranks above 0 know; by
            default that of the scheduler. "default" leaves the engine's own default, as its spawned
            processes do.
    """

    def __init__(self, settings: EngineSettings) -> None:
        source = find_source()
        assert source is not None, "the adapter says that the engine is missing"
        folder, version = source
        ranks = range(settings.tensor_parallel_size)
        self._copies = [_load(folder, rank) for rank in ranks]
        self._block_size = settings.block_size
        for rank, copy in enumerate(self._copies):
            if rank and settings.options.get("worker_block_size") == "default":
                copy.sequence_class.block_size = _default_block_size(folder)
            else:
                copy.sequence_class.block_size = settings.block_size
        self._scheduler: Any = self._copies[0].scheduler_class(
            SimpleNamespace(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                eos=END_TOKEN_ID,
                num_kvcache_blocks=settings.num_blocks,
                kvcache_block_size=settings.block_size,
            )
        )
        self._pool: Any = self._scheduler.block_manager
        self._workers = ExactWorkers(settings.num_blocks, settings.block_size, len(ranks))
        self._shows_messages = len(ranks) > 1 and settings.block_size >= _REAL_BLOCK_SIZE
        self._log = Log(settings.max_num_batched_tokens, settings.block_size)
        self._sequences: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # the engine's sequence id -> request
        self._held: list[int] = []
        self._forced: list[Any] = []
        self._reason = "out_of_blocks"
        self._deciding = ""  # the request that the engine's method at work is about
        self._listen()
        self.info = SessionInfo(
            config={
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "max_num_seqs": settings.max_num_seqs,
                "enable_prefix_caching": True,  # there is no switch
                **settings.options,
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=VOCAB_SIZE,
            num_ranks=len(ranks),
            versions={"python": platform.python_version(), "nano-vllm": version},
            observed=[*_OBSERVED, *(["StepSent"] if self._shows_messages else [])],
            batch_invariant=True,
        )

    # What every session has ---------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        """Queue a request."""
        params = self._copies[0].sampling_params_class(
            max_tokens=request.sampling.max_tokens, ignore_eos=request.sampling.ignore_eos
        )
        sequence = self._copies[0].sequence_class(list(request.prompt_token_ids), params)
        self._sequences[request.id] = sequence
        self._names[sequence.seq_id] = request.id
        self._log.arrived(request)
        self._scheduler.add(sequence)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step, or let one pass in which there is nothing to run."""
        if not self._scheduler.is_finished():
            self._step()
        self._record_pool()
        self._log.step += 1
        return self._log.take()

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return self._log.unfinished()

    def results(self) -> dict[str, RequestResult]:
        """The engine's own outputs."""
        return self._log.results(lambda name: list(self._sequences[name].completion_token_ids))

    def close(self) -> Sequence[AnyEvent]:
        """What was recorded since the last poll, and the final state of the pool."""
        self._log.pool_changed = True
        self._record_pool()
        return self._log.take()

    def stream_to(self, sink: Sink) -> None:
        """Hand events over before each step is launched."""
        self._log.sink = sink

    # What the capabilities promise --------------------------------------------------------------

    def preempt(self, request: str, mode: str) -> None:
        """Preempt a request that holds blocks before the next step, by the engine's own method."""
        self._forced.append(self._sequences[request])

    def hold_blocks(self, num_blocks: int) -> int:
        """Take free blocks as a sequence would, or give them back."""
        while len(self._held) < num_blocks and self._pool.free_block_ids:
            block = self._pool.free_block_ids[0]
            takes_id = bool(inspect.signature(self._pool._allocate_block).parameters)
            self._pool._allocate_block(*([block] if takes_id else []))
            self._held.append(block)
        while len(self._held) > num_blocks:
            block = self._held.pop()
            self._pool.blocks[block].ref_count = 0
            self._pool._deallocate_block(block)
        self._log.pool_changed = True
        return len(self._held)

    def abort(self, request: str) -> None:
        """Not among the capabilities, so never called; the same holds for the rest."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> None:
        raise NotImplementedError

    def reset_running_requests(self) -> None:
        raise NotImplementedError

    def set_priority(self, request: str, priority: int) -> None:
        raise NotImplementedError

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        raise NotImplementedError

    # A step -------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._force()
        try:
            sequences, is_prefill = self._scheduler.schedule()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            if self._held and place.line == "assert scheduled_seqs":
                return  # of the engine's blocks none ever vanish, so it expects something to run
            self._explain_decision(error, place)
            raise
        for sequence in sequences:
            start, end = _range(sequence, is_prefill)
            if start < end:  # a prompt that is cached whole computes nothing
                self._log.scheduled(self._name(sequence), start, end, sequence.num_tokens)
        received = [sequences, *self._send(sequences, is_prefill)]
        self._log.launched()
        rows = [
            self._rows(rank, given, sequences, is_prefill) for rank, given in enumerate(received)
        ]
        given = [[row for row in of_rank if row.token_ids] for of_rank in rows]
        chosen = self._workers.compute(self._log.step, given, self._log)
        self._log.add(record.StepDone(self._log.step))
        tokens = _last_tokens(rows[0], [row_tokens[0] for row_tokens in chosen])
        takes_phase = len(inspect.signature(self._scheduler.postprocess).parameters) > 2
        self._scheduler.postprocess(sequences, tokens, *([is_prefill] if takes_phase else []))
        for sequence in sequences:
            self._deliver(sequence)

    def _force(self) -> None:
        """Preempt those that were asked for; the last admitted first, as the engine does."""
        self._reason = "forced"
        for queue in (self._scheduler.waiting, self._scheduler.running):
            for sequence in reversed([item for item in queue if item in self._forced]):
                if sequence.block_table:
                    queue.remove(sequence)
                    self._scheduler.preempt(sequence)
        self._forced.clear()
        self._reason = "out_of_blocks"

    def _send(self, sequences: Sequence[Any], is_prefill: bool) -> list[list[Any]]:
        """The sequences as the ranks above 0 receive them: pickled by the engine's own methods."""
        if len(self._copies) == 1:
            return []
        with self._copies[0].registered():
            message = pickle.dumps(["run", list(sequences), is_prefill])
        received = []
        for rank, copy in enumerate(self._copies[1:], start=1):
            if self._shows_messages:
                self._log.add(record.StepSent(self._log.step, rank=rank, num_bytes=len(message)))
            with copy.registered():
                received.append(pickle.loads(message)[1])
        return received

    def _rows(
        self, rank: int, given: Sequence[Any], sent: Sequence[Any], is_prefill: bool
    ) -> list[Row]:
        """What a rank's attention backend is handed."""
        copy = self._copies[rank]
        try:
            prepared = copy.prepare(given, is_prefill, self._block_size)
        except Exception as error:
            self._explain_preparation(error, rank, given, sent, is_prefill)
            raise
        context = prepared.context
        if len(context.slot_mapping) != len(prepared.input_ids):
            raise AssertionError(
                f"rank {rank} is given {len(context.slot_mapping)} slots for "
                f"{len(prepared.input_ids)} tokens"
            )
        rows = []
        for index, sequence in enumerate(given):
            part = slice(index, index + 1)
            read_len = context.context_lens[index] if not is_prefill else 0
            if is_prefill:
                part = slice(*context.cu_seqlens_q[index : index + 2])
                first, last = context.cu_seqlens_k[index : index + 2]
                read_len = last - first
            table = sequence.block_table
            if context.block_tables is not None:
                table = [block for block in context.block_tables[index] if block != -1]
            rows.append(
                Row(
                    seq=f"{self._name(sent[index])}.0",
                    start=(prepared.positions[part] or [read_len])[0],
                    token_ids=prepared.input_ids[part],
                    slots=context.slot_mapping[part],
                    table=list(table),
                    read_len=read_len,
                )
            )
        return rows

    def _explain_decision(self, error: Exception, place: traceback.FrameSummary) -> None:
        """Name where the engine's scheduler failed, on whom, and with what left."""
        on = f" of {self._deciding}" if self._deciding else ""
        queues = {
            name: ", ".join(map(self._name, getattr(self._scheduler, name))) or "nobody"
            for name in ("waiting", "running")
        }
        error.args = (
            f"{error}: at `{place.line}` in {place.name}{on}; waiting: {queues['waiting']}; "
            f"running: {queues['running']}; free blocks: {len(self._pool.free_block_ids)} of "
            f"{len(self._pool.blocks)}",
        )

    def _explain_preparation(
        self,
        error: Exception,
        rank: int,
        given: Sequence[Any],
        sent: Sequence[Any],
        is_prefill: bool,
    ) -> None:
        """Name the request whose state a rank cannot work with, and what its copy lacks."""
        for sequence, original in zip(given, sent, strict=True):
            try:
                self._copies[rank].prepare([sequence], is_prefill, self._block_size)
            except type(error):
                lost = sorted(vars(original).keys() - vars(sequence).keys())
                named = [name for name in lost if f"'{name}'" in str(error)] or lost
                error.args = (
                    f"{error}: rank {rank} cannot prepare {self._name(original)} in step "
                    f"{self._log.step}, which comes to it for "
                    f"{'prefill' if is_prefill else 'decode'} with {original.num_tokens} tokens, "
                    f"{original.num_completion_tokens} of them outputs; what the scheduler knows "
                    f"of it and the message to rank {rank} left out: {', '.join(named) or '-'}",
                )
                return

    def _deliver(self, sequence: Any) -> None:
        """New tokens, and the end; called as soon as the engine has both."""
        name = self._name(sequence)
        track = self._log.tracks[name]
        if track.finish_reason:
            return
        self._log.delivered(name, sequence.completion_token_ids[track.num_delivered :])
        if sequence.is_finished:
            full = sequence.num_completion_tokens >= sequence.max_tokens
            self._log.finished(name, "length" if full else "stop")

    # Watching -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Put a listener around each of the engine's methods that changes tables."""
        log, pool = self._log, self._pool

        def preempt(original: Callable[..., Any], sequence: Any) -> None:
            decodes = sequence.status is self._copies[0].status.RUNNING
            end = sequence.num_tokens - 1 if decodes else sequence.num_cached_tokens
            log.preempted(self._name(sequence), self._reason, end, sequence.num_tokens)
            original(sequence)

        def allocate(original: Callable[..., Any], sequence: Any, *rest: Any) -> None:
            original(sequence, *rest)
            cached = sequence.num_cached_tokens // self._block_size
            log.holds(self._name(sequence), sequence.block_table, cached)

        def may_append(original: Callable[..., Any], sequence: Any) -> None:
            original(sequence)
            log.holds(self._name(sequence), sequence.block_table)

        def deallocate(original: Callable[..., Any], sequence: Any) -> None:
            if sequence.is_finished:
                self._deliver(sequence)
            blocks = list(reversed(sequence.block_table))
            original(sequence)
            log.freed(self._name(sequence), blocks)

        self._wrap(self._scheduler, "preempt", preempt)
        self._wrap(pool, "allocate", allocate)
        self._wrap(pool, "may_append", may_append)
        self._wrap(pool, "deallocate", deallocate)

    def _wrap(self, owner: Any, name: str, listener: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def wrapped(sequence: Any, *rest: Any) -> None:
            self._deciding = self._name(sequence)
            listener(original, sequence, *rest)
            self._deciding = ""

        setattr(owner, name, wrapped)

    def _record_pool(self) -> None:
        """Sizes every step; everything when somebody lost blocks or ended, and now and then."""
        pool, log = self._pool, self._log
        findable = {
            block
            for block in pool.free_block_ids
            if pool.blocks[block].hash != -1
            and pool.hash_to_block_id.get(pool.blocks[block].hash) == block
        }
        log.add(
            record.PoolCounts(
                step=log.step,
                num_blocks=len(pool.blocks),
                free=len(pool.free_block_ids) - len(findable),
                cached=len(findable),
                used=len(pool.used_block_ids) - len(self._held),
                held=len(self._held),
            )
        )
        if not log.pool_is_due:
            return
        held = set(self._held)
        log.pool(
            num_blocks=len(pool.blocks),
            free=[block for block in pool.free_block_ids if block not in findable],
            cached=sorted(findable),
            held=list(self._held),
            ref_counts={
                block.block_id: block.ref_count
                for block in pool.blocks
                if block.ref_count and block.block_id not in held
            },
            tables={name: sequence.block_table for name, sequence in self._sequences.items()},
            waiting=[self._name(sequence) for sequence in self._scheduler.waiting],
            running=[self._name(sequence) for sequence in self._scheduler.running],
        )

    def _name(self, sequence: Any) -> str:
        return self._names[sequence.seq_id]


def _last_tokens(rows: Sequence[Row], tokens: list[int]) -> list[int]:
    """A token per sequence, from the logits that the engine takes for it.

    They are those of the last of all tokens up to the sequence's end, which is another sequence's
    where it has none of its own; before the first stands the last, by Python's index -1.
    """
    if not tokens:
        cached = ", ".join(row.seq.removesuffix(".0") for row in rows)
        raise IndexError(
            f"the step computes no token, and there are no logits to take: the prefix cache holds "
            f"all tokens of {cached}"
        )
    chosen, index = [], -1
    for row in rows:
        index += bool(row.token_ids)
        chosen.append(tokens[index])
    return chosen


def _range(sequence: Any, is_prefill: bool) -> tuple[int, int]:
    """Positions [start, end) that a scheduled sequence computes."""
    total = sequence.num_tokens
    if not is_prefill:
        return total - 1, total
    start = sequence.num_cached_tokens
    return start, start + getattr(sequence, "num_scheduled_tokens", total - start)


@lru_cache(maxsize=32)
def _load(folder: Path, rank: int) -> NanoVllm:
    """One copy of the modules for each rank, as each of the engine's processes has one."""
    return NanoVllm(folder)


@lru_cache(maxsize=8)
def _default_block_size(folder: Path) -> int:
    return int(NanoVllm(folder).sequence_class.block_size)


def _chunks() -> bool:
    """Whether the engine computes a long prompt in several steps."""
    source = find_source()
    if source is None:
        return False
    scheduler = source[0] / "engine" / "scheduler.py"
    return scheduler.is_file() and "num_scheduled_tokens" in scheduler.read_text()


def _can_import(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
