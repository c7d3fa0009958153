"""Adapters "vllm-scheduler" and "vllm-scheduler-async": vLLM's own scheduler, exact workers.

`vllm.v1.core.sched` decides over a pool of as many blocks as the trial asks for, and gets back what
a model runner sends. Steps follow the engine core: one at a time, or with asynchronous scheduling a
queue in which one step is scheduled before the previous one's output is known.
"""

from __future__ import annotations

import json
import platform
import random
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from preempt_engine.exact import ReferenceSequence
from preempt_harness import record
from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue, SessionInfo
from preempt_harness.adapters.scheduler_loop import (
    END_TOKEN_ID,
    VOCAB_SIZE,
    ExactWorkers,
    Log,
    Sink,
)
from preempt_harness.adapters.vllm_runner import Launched, ModelRunner
from preempt_harness.admission import AdmissionModel
from preempt_harness.errors import HarnessError
from preempt_harness.record import AnyEvent, RequestResult, Score
from preempt_harness.workload import RequestSpec

TESTED = ("0.33.0",)
_OPTIONS = frozenset({"async_scheduling", "num_speculative_tokens", "draft_accuracy"})
_OBSERVED = (
    "Arrived",
    "Scheduled",
    "BlocksAllocated",
    "BlocksFreed",
    "Preempted",
    "Resumed",
    "Finished",
    "Aborted",
    "PoolCounts",
    "PoolState",
    "StepLaunched",
    "StepDone",
    "Computed",
    "TokensDelivered",
)


class VllmVersionError(HarnessError):
    """The installed vLLM is not one whose scheduler this adapter can drive."""


class VllmSchedulerAdapter:
    """Adapter "vllm-scheduler"."""

    name = "vllm-scheduler"
    async_scheduling = False
    capabilities = frozenset(
        {
            protocol.STEPPED,
            protocol.PREEMPT,
            protocol.HOLD_BLOCKS,
            protocol.ABORT,
            protocol.RESET_PREFIX_CACHE,
            protocol.RESET_RUNNING_REQUESTS,
            protocol.RECOMPUTE,
            protocol.PREFIX_CACHING,
            protocol.CHUNKED_PREFILL,
            protocol.MIXED_STEPS,
            protocol.BLOCK_SIZE,
            protocol.WATERMARK,
            protocol.MAX_MODEL_LEN,
            protocol.POOL_LIMIT,
            protocol.PRIORITY,
            protocol.STOP_TOKENS,
        }
    )
    models: tuple[str, ...] = ("exact",)
    block_sizes: tuple[int, ...] = ()
    isolation = "process"
    known_issues: tuple[KnownIssue, ...] = ()

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """A request is admitted when the pool holds all its known tokens; block 0 is nobody's.

        A step needs slots for its drafts; with asynchronous scheduling, for all that the step in
        flight may yet accept as well.
        """
        num_drafts = settings.options.get("num_speculative_tokens", 0)
        in_flight = num_drafts + 1 if self._is_async(settings) else 0
        return AdmissionModel(
            policy="full_prompt",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            watermark=settings.watermark,
            reserved_blocks=1,
            lookahead_tokens=num_drafts + in_flight,
            max_model_len=settings.max_model_len,
            prefix_caching=settings.enable_prefix_caching,
        )

    def vocab_size(self, settings: EngineSettings) -> int:
        """Of the exact model."""
        return VOCAB_SIZE

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """The exact model has no use for text."""
        return None

    def missing(self) -> str | None:
        """vLLM is looked for, not imported: that takes seconds."""
        try:
            version("vllm")
        except PackageNotFoundError:
            return f"pip install vllm=={TESTED[-1]} (its scheduler alone: docs/adapters)"
        return None

    def open(self, settings: EngineSettings) -> VllmSession:
        """A fresh scheduler for every session.

        Raises:
            VllmVersionError: the installed vLLM is not supported.
            ValueError: vLLM refuses the settings.
        """
        return VllmSession(
            settings, {**settings.options, "async_scheduling": self._is_async(settings)}
        )

    def _is_async(self, settings: EngineSettings) -> bool:
        return bool(settings.options.get("async_scheduling", self.async_scheduling))


class AsyncVllmSchedulerAdapter(VllmSchedulerAdapter):
    """Adapter "vllm-scheduler-async": a step is scheduled before the last one's output is known."""

    name = "vllm-scheduler-async"
    async_scheduling = True


class VllmSession:
    """One scheduler of vLLM, one step of the engine core a poll.

    Args:
        settings: what the trial asks for.
        options: "async_scheduling"; "num_speculative_tokens": drafts per request and step, 0 for no
            speculation; "draft_accuracy": share of drafts that are right (0.6).
    """

    def __init__(self, settings: EngineSettings, options: dict[str, Any]) -> None:
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such option; known: {sorted(_OPTIONS)}")
        self._settings = settings
        num_drafts = options.get("num_speculative_tokens", 0)
        # No request may outgrow the pool; its last token is never computed, and needs no slot.
        room = (settings.num_blocks - 1) * settings.block_size + 1
        self._max_model_len = min(settings.max_model_len or room, room)
        self._config = _config(settings, self._max_model_len, options)
        self._queue_size = self._config.max_concurrent_batches
        self._scheduler: Any = _scheduler(self._config, settings)
        self._kv: Any = self._scheduler.kv_cache_manager
        self._pool: Any = self._kv.block_pool
        self._hasher = _block_hasher(settings.block_size)
        drafter = _Drafter(settings.seed, num_drafts, options.get("draft_accuracy", 0.6))
        self._runner = ModelRunner(settings.block_size, num_drafts, drafter.propose)
        self._workers = ExactWorkers(settings.num_blocks, settings.block_size)
        limits = self._config.scheduler_config
        self._log = Log(limits.max_num_batched_tokens, settings.block_size)
        self._requests: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._in_flight: deque[tuple[int, Launched]] = deque()
        self._drafts_wait = num_drafts > 0 and not options["async_scheduling"]
        self._held: list[Any] = []
        self._forced: set[str] = set()
        self._counted_from: dict[str, int] = {}  # request -> step of its last preemption
        self._reason = "out_of_blocks"
        self._admits = True  # in the next step
        self._listen()
        self.info = SessionInfo(
            config={
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_num_seqs": limits.max_num_seqs,
                "max_model_len": self._max_model_len,
                "reserved_blocks": 1,
                "enable_prefix_caching": settings.enable_prefix_caching,
                "scheduling_policy": settings.scheduling_policy,
                "watermark": settings.watermark,
                **options,
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=VOCAB_SIZE,
            versions={"python": platform.python_version(), "vllm": version("vllm")},
            observed=list(_OBSERVED),
            batch_invariant=True,
            max_total_tokens=self._max_model_len,
        )

    # What every session has ---------------------------------------------------------------------

    def submit(self, request: RequestSpec) -> None:
        """Queue a request; one that the model's length does not allow is refused, as by vLLM."""
        self._log.arrived(request)
        if request.num_prompt_tokens >= self._max_model_len:
            self._refused[request.id] = (
                f"the prompt has {request.num_prompt_tokens} tokens, and with one output token at "
                f"least it is longer than max_model_len {self._max_model_len}"
            )
            self._log.finished(request.id, "error")
            return
        made = _request(request, len(self._requests), self._hasher)
        self._requests[request.id] = made
        self._scheduler.add_request(made)

    def abort(self, request: str) -> None:
        """Abort now; whoever has ended, or not arrived, is not concerned."""
        track = self._log.tracks.get(request)
        if track is None or track.finish_reason:
            return
        status = _vllm().RequestStatus.FINISHED_ABORTED
        self._log.aborted(request)
        self._scheduler.finish_requests(request, status)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """One step of the engine core."""
        self._force()
        if self._scheduler.has_requests():
            self._launch()
        executed = bool(self._in_flight) and bool(self._in_flight[-1][1].rows)
        more = executed or self._scheduler.has_requests()
        if self._in_flight and not (len(self._in_flight) < self._queue_size and more):
            self._finish(*self._in_flight.popleft())
        self._record_pool()
        self._log.step += 1
        return self._log.take()

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return self._log.unfinished()

    def results(self) -> dict[str, RequestResult]:
        """The engine's own outputs."""
        results = self._log.results(
            lambda name: (
                list(self._requests[name].output_token_ids) if name in self._requests else []
            )
        )
        for name, why in self._refused.items():
            results[name] = RequestResult(outputs=[], finished=True, error=why)
        return results

    def close(self) -> Sequence[AnyEvent]:
        """What was recorded since the last poll, and the final state of the pool."""
        self._log.pool_changed = True
        self._record_pool()
        self._scheduler.shutdown()
        return self._log.take()

    def stream_to(self, sink: Sink) -> None:
        """Hand events over before each step is launched."""
        self._log.sink = sink

    # What the capabilities promise --------------------------------------------------------------

    def preempt(self, request: str, mode: str) -> None:
        """Preempt before the next step, by the scheduler's own method."""
        self._forced.add(request)

    def hold_blocks(self, num_blocks: int) -> int:
        """Take free blocks from the pool, or give them back."""
        missing = min(num_blocks - len(self._held), self._pool.get_num_free_blocks())
        if missing > 0:
            self._held += self._pool.get_new_blocks(missing)
        else:
            self._pool.free_blocks(self._held[num_blocks:])
            del self._held[num_blocks:]
        self._log.pool_changed = True
        return len(self._held)

    def reset_prefix_cache(self) -> None:
        """Forget cached content; vLLM declines while blocks are in use."""
        self._scheduler.reset_prefix_cache()

    def reset_running_requests(self) -> None:
        """Preempt all that run, then forget cached content. Held blocks would forbid it."""
        held = len(self._held)
        self.hold_blocks(0)
        self._reason = "forced"
        self._scheduler.reset_prefix_cache(reset_running_requests=True)
        self._reason = "out_of_blocks"
        self.hold_blocks(held)

    def set_priority(self, request: str, priority: int) -> None:
        """Not among the capabilities, so never called; the same holds for the next."""
        raise NotImplementedError

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        raise NotImplementedError

    # A step -------------------------------------------------------------------------------------

    def _force(self) -> None:
        """Preempt those that were asked for, the last admitted first, as a reset does.

        The scheduler admits nobody in a step in which it preempts. Here that matters where output
        is in flight: until it is there the victim cannot come back, and others would overtake it.
        """
        self._reason = "forced"
        self._admits = True
        for request in reversed(list(self._scheduler.running)):
            if request.request_id in self._forced:
                self._scheduler.running.remove(request)
                self._scheduler._preempt_request(request, time.monotonic())
                self._admits = not request.num_stale_output_tokens and self._admits
        self._forced.clear()
        self._reason = "out_of_blocks"

    def _launch(self) -> None:
        """Schedule a step and compute it; what it gave stays in the queue."""
        step, log = self._log.step, self._log
        if not self._admits:
            self._scheduler.set_pause_state(_vllm().PauseState.PAUSED_NEW)
        output = self._scheduler.schedule()
        self._scheduler.set_pause_state(_vllm().PauseState.UNPAUSED)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            # The scheduler counts drafts in flight as accepted; the device knows better.
            start = starts[name] - self._late_rejections(name)
            log.scheduled(name, start, start + count, self._requests[name].num_tokens)
        launched = self._runner.launch(output)
        if launched.rows:
            log.launched()
            greedy = self._workers.compute(step, [launched.rows], log)
            self._runner.take_tokens(launched, greedy)
            log.add(record.StepDone(step))
        self._in_flight.append((step, launched))

    def _late_rejections(self, name: str) -> int:
        """Drafts of a request that were rejected, and the scheduler has not heard of it."""
        return sum(
            launched.rejected.get(name, 0)
            for step, launched in self._in_flight
            if step >= self._counted_from.get(name, 0)
        )

    def _finish(self, step: int, launched: Launched) -> None:
        """Give the oldest step's output to the scheduler, and its outputs to the user."""
        log = self._log
        now, log.step = log.step, step
        earlier = log.take()
        names = list(launched.sampled)
        outputs = self._scheduler.update_from_output(
            launched.output,
            _vllm().ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[launched.sampled[name] for name in names],
            ),
        )
        freed = log.take()
        for event in earlier:
            log.add(event)
        ends = []
        for group in outputs.values():
            for output in group.outputs:
                log.delivered(output.request_id, output.new_token_ids)
                if output.finish_reason is not None:
                    ends.append((output.request_id, str(output.finish_reason)))
        for event in freed:
            log.add(event)
        for name, reason in ends:
            log.finished(name, reason)
        log.step = now
        if self._drafts_wait and launched.rows:
            drafts = self._runner.drafts(launched)
            made = _vllm().DraftTokenIds(list(drafts), list(drafts.values()))
            self._scheduler.update_draft_token_ids(made)

    # Watching -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Put a listener around each of the engine's methods that changes tables."""
        log, kv = self._log, self._kv

        def preempt(original: Callable[..., Any], request: Any, *rest: Any, **named: Any) -> None:
            computed, total = request.num_computed_tokens, request.num_tokens
            log.preempted(request.request_id, self._reason, computed, total)
            self._counted_from[request.request_id] = log.step
            original(request, *rest, **named)

        def allocate(original: Callable[..., Any], request: Any, *rest: Any, **named: Any) -> Any:
            granted = original(request, *rest, **named)
            if granted is not None:
                hits = named.get("new_computed_blocks")
                num_cached = len(hits.blocks[0]) if hits is not None else 0
                log.holds(request.request_id, self._table(request.request_id), num_cached)
            return granted

        def free(original: Callable[..., Any], request: Any) -> None:
            blocks = self._table(request.request_id)
            original(request)
            log.freed(request.request_id, blocks[::-1])

        _wrap(self._scheduler, "_preempt_request", preempt)
        _wrap(kv, "allocate_slots", allocate)
        _wrap(kv, "free", free)

    def _table(self, name: str) -> list[int]:
        return list(self._kv.get_block_ids(name)[0])

    def _record_pool(self) -> None:
        """Sizes every step; everything when somebody lost blocks or ended, and now and then."""
        pool, log, scheduler = self._pool, self._log, self._scheduler
        free = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
        cached = [block.block_id for block in free if block.block_hash is not None]
        held = [pool.null_block.block_id, *(block.block_id for block in self._held)]
        log.add(
            record.PoolCounts(
                step=log.step,
                num_blocks=pool.num_gpu_blocks,
                free=pool.get_num_free_blocks() - len(cached),
                cached=len(cached),
                used=pool.num_gpu_blocks - len(free) - len(held),
                held=len(held),
            )
        )
        if not log.pool_is_due:
            return
        queued = pool.free_block_queue.get_all_free_blocks()
        log.pool(
            num_blocks=pool.num_gpu_blocks,
            free=[block.block_id for block in queued if block.block_hash is None],
            cached=[block.block_id for block in queued if block.block_hash is not None],
            held=held,
            ref_counts={
                block.block_id: block.ref_cnt
                for block in pool.blocks
                if block.ref_cnt and block.block_id not in held
            },
            tables={name: self._table(name) for name in scheduler.requests},
            waiting=[
                request.request_id
                for queue in (scheduler.waiting, scheduler.kv_holding_waiting)
                for request in queue
            ],
            running=[request.request_id for request in scheduler.running],
        )


class _Drafter:
    """Drafts that are right with some probability; a function of seed, request and position."""

    def __init__(self, seed: int, num_drafts: int, accuracy: float) -> None:
        self._seed = seed
        self._num_drafts = num_drafts
        self._accuracy = accuracy

    def propose(self, name: str, token_ids: Sequence[int]) -> list[int]:
        source = random.Random(f"{self._seed}/{name}/{len(token_ids)}")
        reference = ReferenceSequence(token_ids)
        drafts = []
        for _ in range(self._num_drafts):
            token = reference.digest % VOCAB_SIZE
            drafts.append(token if source.random() < self._accuracy else (token + 1) % VOCAB_SIZE)
            reference.append(drafts[-1])
        return drafts


def _wrap(owner: Any, name: str, listener: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *rest, **named: listener(original, *rest, **named))


# vLLM -------------------------------------------------------------------------------------------


class _Names:
    """What is used of vLLM; imported together, once, because it takes seconds."""

    def __init__(self) -> None:
        import torch
        from vllm import SamplingParams, config
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface, outputs, request
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
        from vllm.v1.structured_output import StructuredOutputManager

        lacking = [
            f"{owner.__name__}.{name}"
            for owner, name in (
                (NewRequestData, "prefill_token_ids"),
                (SchedulerOutput, "preempted_req_ids"),
            )
            if name not in owner.__dataclass_fields__
        ]
        if lacking:
            raise VllmVersionError(
                f"vLLM {version('vllm')} has no {', '.join(lacking)}.",
                f"This adapter drives schedulers of model runner V2; tested: {', '.join(TESTED)}.",
            )
        self.torch: Any = torch
        self.config: Any = config
        self.sha256: Any = sha256
        self.kv_cache_interface: Any = kv_cache_interface
        self.kv_cache_utils: Any = kv_cache_utils
        self.SamplingParams: Any = SamplingParams
        self.PauseState: Any = PauseState
        self.ModelRunnerOutput: Any = outputs.ModelRunnerOutput
        self.DraftTokenIds: Any = outputs.DraftTokenIds
        self.Request: Any = request.Request
        self.RequestStatus: Any = request.RequestStatus
        self.StructuredOutputManager: Any = StructuredOutputManager
        kv_cache_utils.init_none_hash(sha256)


@lru_cache(maxsize=1)
def _vllm() -> _Names:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries deprecate is not the user's to mend
        return _Names()


@lru_cache(maxsize=1)
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    """A configuration of the smallest Llama; the scheduler reads lengths of it, nothing else."""
    folder = tempfile.TemporaryDirectory(prefix="preempt-harness-vllm-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1 << 20,
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN_ID,
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    return folder


def _config(settings: EngineSettings, max_model_len: int, options: dict[str, Any]) -> Any:
    """The engine's own configuration objects."""
    config = _vllm().config
    model = config.ModelConfig(
        model=_model_folder().name,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_model_len,
        seed=settings.seed,
    )
    cache = config.CacheConfig(
        block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
    )
    cache.num_gpu_blocks = settings.num_blocks
    scheduler = config.SchedulerConfig(
        max_num_seqs=min(settings.max_num_seqs, settings.max_num_batched_tokens),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=settings.scheduling_policy,
        watermark=settings.watermark,
        async_scheduling=options["async_scheduling"],
    )
    parallel = config.ParallelConfig()
    speculative = None
    if options.get("num_speculative_tokens", 0):
        speculative = config.SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=options["num_speculative_tokens"],
            prompt_lookup_min=1,
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    return config.VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=parallel,
        speculative_config=speculative,
        device_config=config.DeviceConfig("cpu"),
    )


def _scheduler(config: Any, settings: EngineSettings) -> Any:
    """The scheduler class that the configuration asks for, over a pool of so many blocks."""
    names = _vllm()
    interface = names.kv_cache_interface
    spec = interface.FullAttentionSpec(
        block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=names.torch.float32
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=interface.KVCacheConfig(
            num_blocks=settings.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=names.StructuredOutputManager(config),
        block_size=settings.block_size,
    )
    if not scheduler.use_v2_model_runner:
        raise VllmVersionError(
            "vLLM chose its model runner V1, which this adapter does not stand in for.",
            "Unset VLLM_USE_V2_MODEL_RUNNER, or set it to 1.",
        )
    return scheduler


def _block_hasher(block_size: int) -> Any:
    return _vllm().kv_cache_utils.get_request_block_hasher(block_size, _vllm().sha256)


def _request(spec: RequestSpec, arrival: int, hasher: Any) -> Any:
    """The engine's request, as its front end makes it."""
    params = _vllm().SamplingParams(
        temperature=0.0,
        max_tokens=spec.sampling.max_tokens,
        ignore_eos=spec.sampling.ignore_eos,
        stop_token_ids=list(spec.sampling.stop_token_ids),
    )
    params.update_from_generation_config({}, END_TOKEN_ID)
    return _vllm().Request(
        request_id=spec.id,
        prompt_token_ids=list(spec.prompt_token_ids),
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(arrival),
        priority=spec.priority,
        block_hasher=hasher,
    )
