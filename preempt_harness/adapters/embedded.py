"""The embedded engine behind the session protocol: stepped, and everything can be seen."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.embedded_arguments import engine_params, llm_arguments
from preempt_harness.adapters.embedded_pool import EnginePool
from preempt_harness.adapters.embedded_streams import Streams
from preempt_harness.adapters.protocol import EngineSettings, KnownIssue, SessionInfo
from preempt_harness.admission import AdmissionModel
from preempt_harness.record import (
    AnyEvent,
    EngineError,
    RequestResult,
    Score,
    SequenceOutput,
    StreamedOutput,
)
from preempt_harness.workload import RequestSpec, SamplingSpec

if TYPE_CHECKING:
    from preempt_engine import LLM, RequestOutput
    from preempt_engine.tokenizer import ExactTokenizer, HFTokenizer

_NEEDS_ENGINE = 'pip install "preempt-harness[engine]"'


class EmbeddedAdapter:
    """Adapter "embedded"."""

    name = "embedded"
    capabilities = protocol.CAPABILITIES - {protocol.QUEUE_ORDER}  # victims keep their places
    models: tuple[str, ...] = (
        "exact",
        "tiny-llama",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-mistral",
        "tiny-opt",
        "smollm2",
    )
    block_sizes: tuple[int, ...] = ()
    isolation = "none"
    known_issues: tuple[KnownIssue, ...] = ()

    def admission_model(self, settings: EngineSettings) -> AdmissionModel:
        """The engine reserves blocks for all known tokens at admission."""
        num_drafts = (settings.speculative_config or {}).get("num_speculative_tokens", 0)
        return AdmissionModel(
            policy="full_prompt",
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            watermark=settings.watermark,
            max_model_len=settings.max_model_len,
            prefix_caching=settings.enable_prefix_caching,
            draft_tokens=num_drafts,
            predicts=(
                settings.options.get("preemption_mode", "recompute") == "recompute"
                and not num_drafts
                and not settings.async_scheduling
            ),
        )

    def refusal(self, settings: EngineSettings) -> str | None:
        """Steps decided ahead go with neither a draft model nor priorities."""
        if not settings.async_scheduling:
            return None
        if (settings.speculative_config or {}).get("method") == "draft_model":
            return "steps ahead together with a draft model"
        if settings.scheduling_policy == "priority":
            return "steps ahead together with priorities"
        return None

    def vocab_size(self, settings: EngineSettings) -> int:
        """From the model's configuration file; the exact model's is an option."""
        if settings.model == "exact":
            return int(settings.options.get("exact_vocab_size", 64))
        config = json.loads((_model_path(settings) / "config.json").read_text())
        return int(config["vocab_size"])

    def encode(self, settings: EngineSettings, text: str) -> list[int] | None:
        """Ids by the model's tokenizer; None for models with random weights."""
        if settings.model == "exact" or settings.model.startswith("tiny-"):
            return None
        return _tokenizer(_model_path(settings)).encode(text)

    def decode(self, settings: EngineSettings, token_ids: Sequence[int]) -> str | None:
        """By the model's tokenizer, whole; None for ids that are none of its, or without text."""
        if settings.options.get("skip_tokenizer_init") or "tokenizer" in settings.options:
            return None
        decoder = self._decoders.get(settings.model)
        if settings.model == "exact":
            tokenizer = _exact_tokenizer(self.vocab_size(settings))
            decoder = tokenizer.decode, tokenizer.vocab_size
        elif decoder is None:  # to find and read its files takes long
            decoder = _whole_decoder(_tokenizer(_model_path(settings))), self.vocab_size(settings)
            self._decoders[settings.model] = decoder
        decode, vocab_size = decoder
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            return None
        return decode(token_ids)

    def branch_sampling(self, sampling: SamplingSpec, branch: int) -> SamplingSpec | None:
        """A branch has a seed of its own, derived from the request's."""
        from preempt_engine.sampling.noise import branch_seed

        seed = None if sampling.seed is None else branch_seed(sampling.seed, branch)
        return msgspec.structs.replace(sampling, n=1, seed=seed)

    def missing(self) -> str | None:
        """The exact model needs nothing more; torch is asked for when a checkpoint is opened."""
        return None

    def __init__(self) -> None:
        self._pool = EnginePool()
        self._decoders: dict[str, tuple[Callable[[Sequence[int]], str | None], int]] = {}
        if importlib.util.find_spec("xgrammar") is None:
            self.capabilities = self.capabilities - {protocol.STRUCTURED_OUTPUTS}

    def greedy_output(
        self, settings: EngineSettings, prompt_token_ids: Sequence[int], max_tokens: int
    ) -> list[int] | None:
        """The exact model's, which has a closed form."""
        if settings.model != "exact":
            return None
        from preempt_engine.exact import reference_generate

        return reference_generate(
            prompt_token_ids,
            max_tokens,
            self.vocab_size(settings),
            num_ranks=settings.tensor_parallel_size,
        )

    def kept_process_ids(self) -> frozenset[int]:
        """Of tensor-parallel engines that wait for the next session."""
        return self._pool.process_ids()

    def close_kept(self) -> None:
        """Close engines that wait for the next session."""
        self._pool.close()

    def open(self, settings: EngineSettings) -> EmbeddedSession:
        """Build the engine, or take a kept one.

        Raises:
            preempt_engine.errors.EngineError: the settings cannot be honoured.
        """
        if "call" not in settings.options:
            return EmbeddedSession(settings, self._pool)
        from preempt_harness.adapters.embedded_calls import CalledSession

        return CalledSession(settings, self._pool)


class EmbeddedSession:
    """One embedded engine, one step a poll.

    Args:
        settings: what the trial asks for; `options` are arguments of `LLM`, and
            "record_pool_every": a full `PoolState` every so many steps (16).
        pool: where the engine comes from and goes.
    """

    def __init__(self, settings: EngineSettings, pool: EnginePool) -> None:
        from preempt_harness.adapters.embedded_observer import RecordingObserver

        options = dict(settings.options)
        options.pop("call", None)
        pool_every = options.pop("record_pool_every", 16)
        config = llm_arguments(settings, options)
        self._pool = pool
        self.llm: LLM = pool.take(config)
        self._observer = RecordingObserver(pool_every=pool_every)
        self.llm.set_observer(self._observer)
        self._outputs: dict[str, RequestOutput] = {}
        self._streams = Streams()
        self._unfinished: set[str] = set()
        self.info = SessionInfo(
            config={
                **config,
                **_placement(self.llm),
                "num_speculative_tokens": self.llm.config.num_speculative_tokens,
            },
            block_size=self.llm.config.block_size,
            num_blocks=self.llm.num_kv_blocks,
            vocab_size=self.llm.vocab_size,
            eos_token_ids=sorted(self.llm.eos_token_ids),
            num_ranks=self.llm.config.tensor_parallel_size,
            versions=_versions(exact=self.llm.config.is_exact),
            observed=_observed(self._observer.event_names, self.llm.config.tensor_parallel_size),
            batch_invariant=self.llm.config.is_exact or self.llm.config.deterministic,
            max_total_tokens=self.llm.max_total_tokens,
        )

    def submit(self, request: RequestSpec) -> None:
        """Queue the request."""
        self.llm.add_request(
            request.prompt_token_ids,
            engine_params(request.sampling),
            request_id=request.id,
            priority=request.priority,
        )
        self._unfinished.add(request.id)

    def abort(self, request: str) -> None:
        """Abort now; its output so far is its result."""
        output = self.llm.abort_request(request)
        if output is not None:
            self._take(output)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step; the time limit is the watchdog's business here."""
        outputs = self._step()
        for output in outputs:
            self._take(output)
        self._streams.compare(self._observer.take_given(), outputs)
        return self._observer.take_events()

    def stream_to(self, sink: Callable[[Sequence[AnyEvent]], None]) -> None:
        """Hand events over before each step is launched."""
        self._observer.sink = sink

    def unfinished(self) -> bool:
        """True while a request has not ended, as far as the engine knows: so a user's loop ends."""
        return bool(self._unfinished) and self.llm.has_unfinished_requests()

    def results(self) -> dict[str, RequestResult]:
        """Results of all requests that gave anything."""
        return {
            request: _result(output, self._streams.of(request))
            for request, output in self._outputs.items()
        }

    def close(self) -> Sequence[AnyEvent]:
        """Let the engine go; the last event is the final state of the pool.

        Behind it comes an error if all requests have ended and something is left of them.
        """
        step = self.llm.scheduler.next_step_id
        self._observer.record_pool(step, self.llm.scheduler)
        self.llm.set_observer(None)
        error = self._pool.give_back(self.llm)
        events = list(self._observer.take_events())
        if error is not None and not self._unfinished:
            what = f"the engine is not as new when all has ended: {error}"
            events.append(EngineError(step=step, kind=type(error).__name__, message=what))
        return events

    def preempt(self, request: str, mode: str) -> None:
        """Force a preemption before the next step.

        Raises:
            ValueError: the mode is not one of this engine's.
        """
        if mode not in ("recompute", "swap"):
            raise ValueError(f"mode {mode!r}: the embedded engine recomputes or swaps")
        self.llm.preempt_request(request, cast("Literal['recompute', 'swap']", mode))

    def hold_blocks(self, num_blocks: int) -> int:
        """Withhold free blocks."""
        return self.llm.hold_blocks(num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forget cached content."""
        self.llm.reset_prefix_cache()
        self._observer.cache_reset(self.llm.scheduler.next_step_id, running=False)

    def reset_running_requests(self) -> None:
        """Preempt all that run, then forget cached content."""
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self._observer.cache_reset(self.llm.scheduler.next_step_id, running=True)

    def set_priority(self, request: str, priority: int) -> None:
        """Give an unfinished request another priority."""
        self.llm.set_priority(request, priority)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Teacher-forced scores; their events are not part of the trial."""
        self.llm.set_observer(None)
        try:
            scores = self.llm.score(list(prompt), list(continuation))
        finally:
            self.llm.set_observer(self._observer)
        return [Score(**asdict(score)) for score in scores]

    def _step(self) -> list[RequestOutput]:
        return self.llm.step()

    def _take(self, output: RequestOutput) -> None:
        self._outputs[output.request_id] = output
        self._streams.read(output)
        if output.finished:
            self._unfinished.discard(output.request_id)


def _observed(event_names: Sequence[str], num_ranks: int) -> list[str]:
    """Names of the events that are seen; a single rank is sent no message."""
    return [*event_names, *(["StepSent"] if num_ranks > 1 else [])]


def _placement(llm: LLM) -> dict[str, str]:
    """What "auto" became: the tolerance for near ties depends on it."""
    if llm.config.is_exact:
        return {}
    from preempt_engine.models.config import ModelConfig
    from preempt_engine.worker.model_runner import choose_device, choose_dtype

    device = choose_device(llm.config.device)
    model = ModelConfig.from_directory(Path(llm.config.model))
    dtype = str(choose_dtype(llm.config.dtype, model, device)).removeprefix("torch.")
    return {"dtype": dtype, "device": device.type}


def _model_path(settings: EngineSettings) -> Path:
    from preempt_engine.models.config import resolve_model
    from preempt_harness.checkpoints import resolve_model_name

    return resolve_model(str(resolve_model_name(settings.model)))


@lru_cache(maxsize=4)
def _tokenizer(directory: Path) -> HFTokenizer:
    from preempt_engine.tokenizer import HFTokenizer

    return HFTokenizer(directory)


@lru_cache(maxsize=4)
def _exact_tokenizer(vocab_size: int) -> ExactTokenizer:
    from preempt_engine.tokenizer import ExactTokenizer

    return ExactTokenizer(vocab_size)


def _whole_decoder(tokenizer: HFTokenizer) -> Callable[[Sequence[int]], str | None]:
    """Decodes by the library's own object; nothing where a run of byte tokens is decoded as one."""
    own = tokenizer.transformers_tokenizer
    backend = getattr(own, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return lambda token_ids: None

    def decode(token_ids: Sequence[int]) -> str:
        text: str = own.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def _result(output: RequestOutput, streamed: Mapping[int, StreamedOutput]) -> RequestResult:
    return RequestResult(
        outputs=[
            SequenceOutput(
                token_ids=list(branch.token_ids),
                text=branch.text,
                logprobs=branch.logprobs,
                finish_reason=branch.finish_reason,
                stop_reason=branch.stop_reason,
                cumulative_logprob=branch.cumulative_logprob,
                score=branch.score,
                streamed=streamed.get(branch.index),
            )
            for branch in output.outputs
        ],
        finished=output.finished,
        error=str(output.error or ""),
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
        prompt_logprobs=output.prompt_logprobs,
    )


def _versions(*, exact: bool) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    names = ["preempt-harness"] if exact else ["preempt-harness", "torch", "transformers"]
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree on PYTHONPATH
            found[name] = "source tree"
    return found
