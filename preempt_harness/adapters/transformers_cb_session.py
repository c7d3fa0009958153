"""A session on transformers' continuous batching, whole: model, scheduler, cache, offloading.

The batch processor is stepped in one thread, so that a trial repeats exactly. It uses private parts
of transformers; docs/adapters/transformers-cb.md says which versions fit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from preempt_harness.adapters.limited_session import LimitedSession
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.adapters.transformers_cb_model import (
    load_model,
    swap_space_gib,
    unpinned_if_on_cpu,
)
from preempt_harness.adapters.transformers_cb_names import engine_ids, finish_reason, stop_ids
from preempt_harness.adapters.transformers_cb_observer import EVENT_NAMES, BatchObserver
from preempt_harness.errors import UnsupportedTrialError
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput
from preempt_harness.workload import RequestSpec

_STAND_IN = "preempt_harness stand-in"


class TransformersSession(LimitedSession):
    """One batch processor, one step a poll.

    Args:
        settings: what the trial asks for; `options` are fields of `ContinuousBatchingConfig`,
            "device", "preemption_mode" ("recompute" or "swap") and "swap_space_blocks" (as many as
            the pool has).
    """

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        options = dict(settings.options)
        self.model = load_model(settings.model, settings.dtype, options.pop("device", "auto"))
        self._mode: str = options.pop("preemption_mode", "recompute")
        num_host_blocks: int = options.pop("swap_space_blocks", settings.num_blocks)
        config = {
            "page_size": settings.block_size,
            "num_blocks": settings.num_blocks,
            "max_batch_tokens": settings.max_num_batched_tokens,
            "max_requests_per_batch": settings.max_num_seqs,
            "allow_block_sharing": settings.enable_prefix_caching,
            "safety_margin": settings.watermark,
            "seed": settings.seed,
            "auto_switch_to_flash": False,
            "use_async_batching": False,
            "return_logprobs": True,
            "cpu_offload_space": swap_space_gib(self.model, settings.block_size, num_host_blocks),
            **options,
        }
        self._manager: Any = self.model.init_continuous_batching(  # type: ignore[operator]
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(**config),
        )
        with unpinned_if_on_cpu(self.model):
            self._processor: Any = self._manager._create_batch_processor()
        self._manager.batch_processor = self._processor
        _require_one_cache(self._processor)
        self._observer = BatchObserver(self._processor, self.model)
        self._outputs: dict[str, Any] = {}  # by the engine's names
        self._offloading = self._processor.offloading_manager
        self._host_pool = self._offloading._cpu_pool
        offload = self._offloading.offload_requests
        self._offloading.offload_requests = lambda: self._offload_in(self._mode, offload)
        self.info = self._describe(settings, config)

    def _describe(self, settings: EngineSettings, config: dict[str, Any]) -> SessionInfo:
        model_config: Any = self.model.config
        parameter = next(self.model.parameters())
        return SessionInfo(
            config={
                **config,
                "max_num_batched_tokens": self._processor.max_batch_tokens,
                "max_num_seqs": settings.max_num_seqs,
                "enable_prefix_caching": settings.enable_prefix_caching,
                "branches_one_by_one": True,
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "device": parameter.device.type,
            },
            block_size=settings.block_size,
            num_blocks=self._processor.cache.num_blocks,
            vocab_size=model_config.vocab_size,
            versions={
                "python": platform.python_version(),
                "torch": version("torch"),
                "transformers": version("transformers"),
            },
            observed=list(EVENT_NAMES),
            batch_invariant=False,
        )

    def submit(self, request: RequestSpec) -> None:
        """Put the request into the manager's queue."""
        sampling = request.sampling
        self._observer.log.enter(request)
        self._manager.num_return_sequences = sampling.n
        self._manager.add_request(
            request.prompt_token_ids,
            request_id=request.id,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=stop_ids(request) or -1,
        )

    def abort(self, request: str) -> None:
        """Cancel all outputs of the request; the engine does so at its next step."""
        for name in engine_ids(request, self._observer.log.requests[request].sampling.n):
            self._manager.cancel_request(name)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """What the manager's thread does once, in this thread."""
        if self._processor.prepare_next_batch():
            self._processor._generation_step(self.model)
            self._processor.update_batch()
        self._observer.end_step()
        self._drain()
        return self._observer.log.take_events()

    def stream_to(self, sink: Callable[[Sequence[AnyEvent]], None]) -> None:
        """Hand events over before each forward pass."""
        self._observer.log.sink = sink

    def unfinished(self) -> bool:
        """True while an output of a request has neither ended nor been cancelled."""
        return any(not self._has_ended(name) for name in self._observer.log.requests)

    def results(self) -> dict[str, RequestResult]:
        """From the engine's last output of each sequence, or its state when it was cancelled."""
        return {name: self._result(name) for name in self._observer.log.requests}

    def close(self) -> Sequence[AnyEvent]:
        """Let go of the manager; the model stays for the next session."""
        self._observer.pool.record()
        self._observer.detach()
        self._drain()
        return self._observer.log.take_events()

    def preempt(self, request: str, mode: str) -> None:
        """Have the engine offload a request as if it starved.

        The engine never offloads the last active request, and admits nobody after an offload until
        one of those that stayed has finished. A request that stands in for others lets the last
        one go; when nobody has stayed, the engine is told that nobody need be waited for.
        """
        scheduler, cache = self._processor.scheduler, self._processor.cache
        names = engine_ids(request, self._observer.log.requests[request].sampling.n)
        active = scheduler.active_requests
        scheduler.starved_requests = [(active[name], 1) for name in names if name in active]
        count_storable = cache.count_storable_requests
        cache.count_storable_requests = lambda _: -1  # no number of offloads is enough
        active[_STAND_IN] = None
        self._observer.stays.forcing = True
        natural, self._mode = self._mode, mode
        try:
            self._offloading.offload_requests()
        finally:
            self._mode = natural
            self._observer.stays.forcing = False
            del active[_STAND_IN]
            cache.count_storable_requests = count_storable
        if not active:
            scheduler.block_new_requests = False

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Teacher-forced scores by a plain forward pass without a cache."""
        import torch

        ids = torch.tensor([[*prompt, *continuation]], device=next(self.model.parameters()).device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        top = logprobs.topk(2)
        return [
            Score(
                token_id=token_id,
                logprob=float(logprobs[index, token_id]),
                top_token_id=int(top.indices[index, 0]),
                top_logprob=float(top.values[index, 0]),
                second_logprob=float(top.values[index, 1]),
            )
            for index, token_id in enumerate(continuation)
        ]

    # Inside -------------------------------------------------------------------------------------

    def _offload_in(self, mode: str, offload: Callable[[], bool]) -> bool:
        """The engine swaps whatever fits in its swap space: to recompute, it must not see any."""
        self._offloading._cpu_pool = self._host_pool if mode == "swap" else None
        try:
            return offload()
        finally:
            self._offloading._cpu_pool = self._host_pool

    def _drain(self) -> None:
        queue = self._manager.output_router.output_queue
        while not queue.empty():
            self._keep(queue.get_nowait())

    def _keep(self, output: Any) -> None:
        self._outputs[output.request_id] = output

    def _has_ended(self, request: str) -> bool:
        names = engine_ids(request, self._observer.log.requests[request].sampling.n)
        return request in self._observer.log.aborted or all(
            name in self._outputs and self._outputs[name].is_finished() for name in names
        )

    def _result(self, request: str) -> RequestResult:
        spec = self._observer.log.requests[request]
        aborted = {
            output.request_id: output for output in self._observer.log.aborted.get(request, ())
        }
        names = engine_ids(request, spec.sampling.n)
        found = [aborted.get(name) or self._outputs.get(name) for name in names]
        errors = [output.error for output in found if output is not None and output.error]
        return RequestResult(
            outputs=[
                _sequence_output(
                    output, spec, self._observer.delivery.logprobs_of(output, spec), bool(aborted)
                )
                for output in found
                if output is not None
            ],
            finished=self._has_ended(request),
            error=errors[0] if errors else "",
        )


def _sequence_output(
    output: Any, spec: RequestSpec, logprobs: list[dict[int, float]] | None, is_aborted: bool
) -> SequenceOutput:
    ended = output.is_finished()
    reason = finish_reason(output, spec) if ended else "abort" if is_aborted else None
    return SequenceOutput(
        token_ids=list(output.generated_tokens),
        logprobs=logprobs,
        finish_reason=reason,
    )


def _require_one_cache(processor: Any) -> None:
    names = list(processor.cache.cache_allocators)
    if names != ["full_attention"]:
        raise UnsupportedTrialError(
            f"The model's layers are of {', '.join(names)}; tables of full attention can be read.",
            "Choose a model whose layers all have full attention.",
        )
