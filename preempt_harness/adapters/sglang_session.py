"""A session on `sglang.Engine`: its arguments, its switches, its answers.

Every request is a task of the engine's own event loop, which turns while a poll waits.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from preempt_harness.adapters.counted import CounterFellError, counted_preemptions
from preempt_harness.adapters.growing_outputs import OBSERVED, GrowingOutputs
from preempt_harness.adapters.limited_session import LimitedSession
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.record import AnyEvent, RequestResult, Score, SequenceOutput
from preempt_harness.workload import RequestSpec, SamplingSpec

SWITCHES = {
    "test_retract": "SGLANG_TEST_RETRACT",
    "test_retract_interval": "SGLANG_TEST_RETRACT_INTERVAL",
    "test_retract_no_prefill_bs": "SGLANG_TEST_RETRACT_NO_PREFILL_BS",
}
"""Option of a trial -> variable that SGLang reads when it is imported, in its scheduler's process
as well: retract every so many steps, and admit nobody beyond so many running requests."""

RETRACTIONS = "num_retractions"


class SglangSession(LimitedSession):
    """One engine; a poll gives whatever has arrived.

    Args:
        settings: what the trial asks for; `options` are those of `SWITCHES`, and more arguments of
            `sglang.Engine`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        options = dict(settings.options)
        switches = {name: options.pop(name, None) for name in SWITCHES}
        _set_switches(switches)
        self._reason = "forced" if switches["test_retract"] else "out_of_blocks"
        import sglang

        arguments = {**engine_arguments(settings), **options}
        self._engine: Any = sglang.Engine(**arguments)
        self._outputs = GrowingOutputs()
        self._retractions: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self.info = SessionInfo(
            config={
                **arguments,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "max_num_seqs": settings.max_num_seqs,
                "enable_prefix_caching": settings.enable_prefix_caching,
                "device": "cuda",
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            num_ranks=settings.tensor_parallel_size,
            versions={"python": platform.python_version(), "sglang": version("sglang")},
            observed=list(OBSERVED),
            batch_invariant=bool(arguments["enable_deterministic_inference"]),
        )

    def submit(self, request: RequestSpec) -> None:
        """Begin to ask; the engine hears of it when a poll waits."""
        self._outputs.arrived(request)
        self._tasks[request.id] = self._engine.loop.create_task(self._ask(request))

    def abort(self, request: str) -> None:
        """Give a request up."""
        if self._outputs.aborted(request):
            self._engine.tokenizer_manager.abort_request(request)

    def poll(self, timeout_s: float) -> Sequence[AnyEvent]:
        """What has arrived, after at most so long."""
        self._engine.loop.run_until_complete(self._wait(timeout_s))
        self._outputs.step += 1
        return self._outputs.take()

    def unfinished(self) -> bool:
        """True while a request has not ended."""
        return self._outputs.unfinished()

    def results(self) -> dict[str, RequestResult]:
        """What each request has given."""
        return self._outputs.results()

    def close(self) -> Sequence[AnyEvent]:
        """End the engine and its processes."""
        self._engine.loop.run_until_complete(self._cancel_tasks())
        self._engine.shutdown()
        return self._outputs.take()

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[Score]:
        """Each token by a request of its own for the one after what came before it."""
        scores = []
        for index, token_id in enumerate(continuation):
            answer = self._engine.generate(
                input_ids=[*prompt, *continuation[:index]],
                sampling_params=sampling_arguments(SamplingSpec(max_tokens=1)),
                return_logprob=True,
                top_logprobs_num=2,
                token_ids_logprob=[token_id],
            )
            scores.append(_score(token_id, answer["meta_info"]))
        return scores

    # Inside -------------------------------------------------------------------------------------

    async def _wait(self, timeout_s: float) -> None:
        """Let the tasks run until there is something to tell."""
        failed = [task for task in self._tasks.values() if task.done() and task.exception()]
        if failed:
            failed[0].result()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return
        self._news.clear()

    async def _cancel_tasks(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ask(self, request: RequestSpec) -> None:
        sampling = request.sampling
        try:
            answers = await self._engine.async_generate(
                input_ids=list(request.prompt_token_ids),
                sampling_params=sampling_arguments(sampling),
                return_logprob=sampling.logprobs is not None,
                top_logprobs_num=sampling.logprobs or 0,
                stream=True,
                rid=request.id,
            )
            async for answer in answers:
                self._take(request.id, answer)
                self._news.set()
        except ValueError as error:  # the engine refuses the request
            self._outputs.refused(request.id, str(error))
        finally:
            self._news.set()

    def _take(self, request: str, answer: Mapping[str, Any]) -> None:
        meta = answer["meta_info"]
        count = meta.get(RETRACTIONS, 0)
        before, self._retractions[request] = self._retractions[request], count
        if count < before:
            raise CounterFellError(f"{RETRACTIONS} of {request} fell from {before} to {count}")
        step = self._outputs.step
        self._outputs.add(
            *counted_preemptions(step, count - before, request=request, reason=self._reason)
        )
        self._outputs.seen_of_prompt(request, num_cached=meta.get("cached_tokens"))
        ended = meta["finish_reason"]
        if ended is not None and ended["type"] == "abort":
            self._outputs.refused(request, str(ended.get("message", "aborted by the engine")))
            return
        wanted = self._outputs.spec_of(request).sampling.logprobs is not None
        self._outputs.grown(
            request,
            0,
            SequenceOutput(
                token_ids=list(answer["output_ids"]),
                logprobs=_logprobs(meta) if wanted else None,
                finish_reason=None if ended is None else str(ended["type"]),
                stop_reason=None if ended is None else ended.get("matched"),
            ),
        )


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of `sglang.Engine`."""
    from preempt_harness.checkpoints import resolve_model_name

    arguments: dict[str, Any] = {
        "model_path": str(resolve_model_name(settings.model)),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "random_seed": settings.seed,
        "tp_size": settings.tensor_parallel_size,
        "page_size": settings.block_size,
        "max_total_tokens": settings.num_blocks * settings.block_size,
        "max_running_requests": settings.max_num_seqs,
        "chunked_prefill_size": settings.max_num_batched_tokens,
        "disable_radix_cache": not settings.enable_prefix_caching,
        "disable_cuda_graph": True,
        "enable_deterministic_inference": False,
    }
    if settings.max_model_len is not None:
        arguments["context_length"] = settings.max_model_len
    return arguments


def sampling_arguments(sampling: SamplingSpec) -> dict[str, Any]:
    """SGLang's sampling parameters, which are a dictionary."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _set_switches(given: Mapping[str, Any]) -> None:
    """Variables for the processes to come; those of an earlier session do not stay."""
    for option, value in given.items():
        if value is None:
            os.environ.pop(SWITCHES[option], None)
        else:
            os.environ[SWITCHES[option]] = str(int(value))


def _logprobs(meta: Mapping[str, Any]) -> list[dict[int, float]]:
    """Of each output token: its own log probability, and those of the likeliest."""
    own = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [()] * len(own)
    return [
        {**{token: value for value, token, *_ in top or ()}, token_id: logprob}
        for (logprob, token_id, *_), top in zip(own, tops, strict=True)
    ]


def _score(token_id: int, meta: Mapping[str, Any]) -> Score:
    (first, second), *_ = meta["output_top_logprobs"]
    (own, *_), *_ = meta["output_token_ids_logprobs"][0]
    return Score(token_id, own, first[1], first[0], second[0])
