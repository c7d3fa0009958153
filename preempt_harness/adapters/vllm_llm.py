"""A session on vLLM's `LLMEngine`: its arguments, its parameters, its outputs and its counter."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from preempt_harness.adapters.counted import CounterDelta, counted_preemptions
from preempt_harness.adapters.growing_outputs import OBSERVED, GrowingOutputs
from preempt_harness.adapters.limited_session import LimitedSession
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.adapters.vllm_drafts import num_drafts_of
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput
from preempt_harness.workload import RequestSpec, SamplingSpec

PREEMPTIONS = "vllm:num_preemptions"
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Set before vLLM is imported: the engine core steps in this process, one step a call."""

_SAMPLING_FIELDS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class VllmEngineSession(LimitedSession):
    """One `LLMEngine`, one step a poll.

    Args:
        settings: what the trial asks for; `options` are more arguments of vLLM's `EngineArgs`, and
            "batch_invariant": ask for logits that do not depend on the batch, where vLLM can.
    """

    def __init__(self, settings: EngineSettings) -> None:
        options = dict(settings.options)
        batch_invariant = bool(options.pop("batch_invariant", False))
        os.environ.update(ENVIRONMENT)
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(batch_invariant))
        import vllm

        arguments = {**engine_arguments(settings), **options}
        self._params: Any = vllm.SamplingParams
        self._refusals = _refusals()
        self._engine: Any = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        self._outputs = GrowingOutputs()
        self._preemptions = CounterDelta(self._count_preemptions)
        model: Any = self._engine.model_config
        self.info = SessionInfo(
            config={
                **arguments,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": "cuda",
                "async_scheduling": settings.async_scheduling,
                "num_speculative_tokens": num_drafts_of(settings.speculative_config),
                "reserved_blocks": 1,
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=model.get_vocab_size(),
            num_ranks=settings.tensor_parallel_size,
            versions={"python": platform.python_version(), "vllm": version("vllm")},
            observed=list(OBSERVED),
            batch_invariant=batch_invariant,
            max_total_tokens=arguments["max_model_len"],
        )

    def submit(self, request: RequestSpec) -> None:
        """Queue the request; what vLLM refuses ends with its words."""
        self._outputs.arrived(request)
        try:
            self._engine.add_request(
                request.id,
                {"prompt_token_ids": list(request.prompt_token_ids)},
                self._params(**sampling_arguments(request.sampling)),
                priority=request.priority,
            )
        except self._refusals as error:
            self._outputs.refused(request.id, str(error))

    def abort(self, request: str) -> None:
        """Give a request up."""
        if self._outputs.aborted(request):
            self._engine.abort_request([request])

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """Run one step, or let one pass in which there is nothing to run."""
        if self._engine.has_unfinished_requests():
            given = self._engine.step()
            self._see_preemptions()
            for output in given:
                self._take(output)
        self._outputs.step += 1
        return self._outputs.take()

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return self._outputs.unfinished()

    def results(self) -> dict[str, RequestResult]:
        """What each request has given."""
        return self._outputs.results()

    def close(self) -> Sequence[AnyEvent]:
        """End the engine, and with it its workers."""
        self._see_preemptions()
        self._engine.engine_core.shutdown()
        return self._outputs.take()

    def reset_prefix_cache(self) -> None:
        """Forget cached content; vLLM declines while blocks are in use."""
        self._engine.reset_prefix_cache()

    def reset_running_requests(self) -> None:
        """Preempt all that run, then forget cached content."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Teacher-forced scores: log probabilities of a prompt that has both parts.

        Raises:
            RuntimeError: the engine does not answer the request.
        """
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=2, detokenize=False)
        ids = [*prompt, *continuation]
        self._engine.add_request("score", {"prompt_token_ids": ids}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished and output.request_id == "score":
                    entries = output.prompt_logprobs[len(prompt) :]
                    return [
                        score_of(token_id, plain_logprobs(entry))
                        for token_id, entry in zip(continuation, entries, strict=True)
                    ]
        raise RuntimeError("vLLM has no requests left, and gave no scores")

    # Inside -------------------------------------------------------------------------------------

    def _take(self, output: Any) -> None:
        request = output.request_id
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            prompt_logprobs = [entry and plain_logprobs(entry) for entry in output.prompt_logprobs]
        self._outputs.seen_of_prompt(
            request, num_cached=output.num_cached_tokens, logprobs=prompt_logprobs
        )
        for branch in output.outputs:
            logprobs = branch.logprobs
            self._outputs.grown(
                request,
                branch.index,
                SequenceOutput(
                    token_ids=list(branch.token_ids),
                    logprobs=None if logprobs is None else [plain_logprobs(e) for e in logprobs],
                    finish_reason=branch.finish_reason,
                    stop_reason=branch.stop_reason,
                    cumulative_logprob=None if logprobs is None else branch.cumulative_logprob,
                ),
            )

    def _see_preemptions(self) -> None:
        self._outputs.add(*counted_preemptions(self._outputs.step, self._preemptions.take()))

    def _count_preemptions(self) -> int:
        """Of all engines that this process has had: the registry of counters is the process's."""
        return sum(
            metric.value for metric in self._engine.get_metrics() if metric.name == PREEMPTIONS
        )


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`."""
    from preempt_harness.checkpoints import resolve_model_name

    path = resolve_model_name(settings.model)
    # No request may outgrow the pool, of which vLLM keeps a block; it checks that at start.
    room = (settings.num_blocks - 1) * settings.block_size
    longest = min(room, _longest_of(Path(path)))
    arguments: dict[str, Any] = {
        "model": str(path),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "block_size": settings.block_size,
        "num_gpu_blocks_override": settings.num_blocks,
        "max_model_len": min(settings.max_model_len or longest, longest),
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": min(settings.max_num_seqs, settings.max_num_batched_tokens),
        "enable_prefix_caching": settings.enable_prefix_caching,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "scheduling_policy": settings.scheduling_policy,
        "watermark": settings.watermark,
        "async_scheduling": settings.async_scheduling > 0,
        "enforce_eager": True,
        "disable_log_stats": False,  # the counters are wanted
    }
    if settings.speculative_config is not None:
        drafts = dict(settings.speculative_config)
        if "model" in drafts:
            drafts["model"] = str(resolve_model_name(drafts["model"]))
        arguments["speculative_config"] = drafts
    return arguments


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request it does not take; earlier versions have no class of it."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return (ValueError, VLLMClientError)


def _longest_of(path: Path) -> int:
    """Most tokens that a checkpoint's model takes; of a hub id nothing is known yet."""
    config = path / "config.json"
    if not config.is_file():
        return sys.maxsize
    return int(json.loads(config.read_text())["max_position_embeddings"])


def sampling_arguments(sampling: SamplingSpec) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`."""
    return {
        **{name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": dict(sampling.logit_bias) or None,
        "detokenize": False,
    }


def plain_logprobs(entry: Mapping[int, Any]) -> dict[int, float]:
    """Token -> log probability, of vLLM's token -> `Logprob`."""
    return {token_id: float(item.logprob) for token_id, item in entry.items()}


def score_of(token_id: int, logprobs: Mapping[int, float]) -> Score:
    """A token beside the likeliest two of its position, of which it may be one."""
    (top, top_logprob), (_, second), *_ = sorted(logprobs.items(), key=lambda item: -item[1])
    return Score(token_id, logprobs[token_id], top, top_logprob, second)
