"""Small modules that stand for `vllm` and `sglang`: the calls that the adapters make, a toy model.

What they show is that the adapters keep their own books: order of events, differences of counters,
ends. Whether the real packages take these calls is for the tests of their signatures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.harness.fake_server import VOCAB_SIZE, next_token

COUNTED_BEFORE = 5  # preemptions that the process counted before the engine was made

Spoil = Callable[[str, list[int]], list[int]]
"""Request and its output so far -> what the engine hands over instead."""


def _whole(name: str, output: list[int]) -> list[int]:
    return list(output)


def next_logprobs(token_ids: list[int]) -> dict[int, float]:
    """The toy model's two likeliest tokens."""
    best = next_token(token_ids)
    return {best: -0.25, (best + 1) % VOCAB_SIZE: -2.0}


# vLLM ---------------------------------------------------------------------------------------------


@dataclass
class _VllmRequest:
    prompt: list[int]
    params: SimpleNamespace
    priority: int
    is_away: bool = False
    outputs: list[list[int]] = field(default_factory=list)


class ToyLLMEngine:
    """One token for every branch of every request a step; a pool that holds too few preempts.

    While the tokens do not fit, the request that came last is away, which counts as a preemption.
    """

    made: ToyLLMEngine | None = None

    def __init__(self, arguments: SimpleNamespace, spoil: Spoil = _whole) -> None:
        self.arguments = vars(arguments)
        self.aborted: list[str] = []
        self.resets: list[bool] = []
        self.is_shut = False
        self.num_preemptions = COUNTED_BEFORE
        self.model_config = SimpleNamespace(
            dtype="torch.float32", get_vocab_size=lambda: VOCAB_SIZE
        )
        self.engine_core = SimpleNamespace(shutdown=self._shut)
        self._spoil = spoil
        self._requests: dict[str, _VllmRequest] = {}
        ToyLLMEngine.made = self

    def _shut(self) -> None:
        self.is_shut = True

    def add_request(
        self, request_id: str, prompt: dict[str, list[int]], params: Any, *, priority: int = 0
    ) -> None:
        ids = list(prompt["prompt_token_ids"])
        if len(ids) >= self.arguments["max_model_len"]:
            raise ValueError(f"{len(ids)} tokens are too many")
        self._requests[request_id] = _VllmRequest(
            ids, params, priority, outputs=[[] for _ in range(getattr(params, "n", 1))]
        )

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request in request_ids:
            self._requests.pop(request, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.resets.append(reset_running_requests)
        return True

    def get_metrics(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name="vllm:num_preemptions", value=self.num_preemptions),
            SimpleNamespace(name="vllm:kv_cache_usage_perc", value=0.5),
        ]

    def step(self) -> list[SimpleNamespace]:
        room = (self.arguments["num_gpu_blocks_override"] - 1) * self.arguments["block_size"]
        given = []
        for name, request in list(self._requests.items()):
            room -= sum(len(request.prompt) + len(output) for output in request.outputs)
            if room < 0 and len(self._requests) > 1 and name == list(self._requests)[-1]:
                self.num_preemptions += not request.is_away
                request.is_away = True
                continue
            request.is_away = False
            given.append(self._advance(name, request))
        return given

    def _advance(self, name: str, request: _VllmRequest) -> SimpleNamespace:
        params = request.params
        completions = []
        for index, output in enumerate(request.outputs):
            output.append(next_token([*request.prompt, *output]))
            is_last = len(output) == params.max_tokens
            shown = self._spoil(name, output)
            logprobs = [
                _as_vllm(next_logprobs([*request.prompt, *output[:position]]))
                for position in range(len(shown))
            ]
            completions.append(
                SimpleNamespace(
                    index=index,
                    token_ids=shown,
                    logprobs=logprobs if getattr(params, "logprobs", None) else None,
                    cumulative_logprob=_sum_of_chosen(logprobs, shown),
                    finish_reason="length" if is_last else None,
                    stop_reason=None,
                )
            )
        if completions[0].finish_reason:
            del self._requests[name]
        prompt_logprobs = None
        if getattr(params, "prompt_logprobs", None):
            prompt_logprobs = [None] + [
                _as_vllm(next_logprobs(request.prompt[:position]))
                for position in range(1, len(request.prompt))
            ]
        return SimpleNamespace(
            request_id=name,
            outputs=completions,
            finished=completions[0].finish_reason is not None,
            num_cached_tokens=3,
            prompt_logprobs=prompt_logprobs,
        )


def _sum_of_chosen(
    logprobs: list[dict[int, SimpleNamespace]], token_ids: list[int]
) -> float | None:
    try:
        return float(
            sum(entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True))
        )
    except KeyError:  # spoilt
        return None


def _as_vllm(logprobs: dict[int, float]) -> dict[int, SimpleNamespace]:
    return {token_id: SimpleNamespace(logprob=value) for token_id, value in logprobs.items()}


def toy_vllm(spoil: Spoil = _whole) -> ModuleType:
    """A module with the names that the adapter takes from vLLM."""
    module: Any = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    module.EngineArgs = SimpleNamespace
    module.LLMEngine = SimpleNamespace(
        from_engine_args=lambda arguments: ToyLLMEngine(arguments, spoil)
    )
    made: ModuleType = module
    return made


# SGLang -------------------------------------------------------------------------------------------


class ToyEngine:
    """Answers as `sglang.Engine` does: everything so far, again and again.

    Every third token of a request is preceded by a retraction.
    """

    made: ToyEngine | None = None
    spoil: Spoil = staticmethod(_whole)

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.aborted: list[str] = []
        self.is_shut = False
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(abort_request=self.aborted.append)
        ToyEngine.made = self

    def shutdown(self) -> None:
        self.is_shut = True
        self.loop.close()

    async def async_generate(self, *, rid: str, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        if len(asked["input_ids"]) > self.arguments["max_total_tokens"]:
            raise ValueError("the prompt is too long")
        return self._answers(rid, asked)

    def generate(self, **asked: Any) -> dict[str, Any]:
        (*_, last) = self._pieces("", asked)
        return last

    async def _answers(self, rid: str, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        for piece in self._pieces(rid, asked):
            await asyncio.sleep(0)
            if rid in self.aborted:
                return
            yield piece

    def _pieces(self, rid: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt, output = list(asked["input_ids"]), list[int]()
        own, tops, wanted = [], [], []
        most = asked["sampling_params"]["max_new_tokens"]
        while len(output) < most:
            best = next_logprobs([*prompt, *output])
            output.append(next(iter(best)))
            own.append((best[output[-1]], output[-1], None))
            tops.append([(value, token_id, None) for token_id, value in best.items()])
            asked_for = asked.get("token_ids_logprob") or ()
            wanted.append([(best.get(token_id, -9.0), token_id, None) for token_id in asked_for])
            ended = {"type": "length", "length": most} if len(output) == most else None
            meta = {
                "finish_reason": ended,
                "cached_tokens": 2,
                "num_retractions": len(output) // 3,
                "output_token_logprobs": own,
                "output_top_logprobs": tops,
                "output_token_ids_logprobs": wanted,
            }
            yield {"output_ids": type(self).spoil(rid, output), "meta_info": meta}


def toy_sglang() -> ModuleType:
    """A module with the name that the adapter takes from SGLang."""
    module: Any = ModuleType("sglang")
    module.Engine = ToyEngine
    made: ModuleType = module
    return made
