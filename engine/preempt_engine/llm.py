"""The engine's facade. An `LLM` owns everything by instance: two can live side by side.

A step has three phases: `schedule` decides, `execute` launches and hands back a handle, `update`
applies what came out. Tokens are applied in `update` and nowhere else.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

from preempt_engine.config import EngineConfig
from preempt_engine.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineStalledError,
    InfeasibleRequestError,
)
from preempt_engine.executor.protocol import Executor
from preempt_engine.executor.uniproc import UniprocExecutor
from preempt_engine.observer import EngineObserver
from preempt_engine.output_builder import OutputBuilder
from preempt_engine.outputs import RequestOutput, TokenScore
from preempt_engine.reset import changed_config
from preempt_engine.sampling.logprobs import score_rows
from preempt_engine.sampling.noise import derive_seed
from preempt_engine.sampling.params import SamplingParams
from preempt_engine.sampling.sampler import SampledToken, SampleRequest, sample
from preempt_engine.scheduler import Counters, Scheduler
from preempt_engine.sequence import Request
from preempt_engine.step import LogitsBatch, SchedulerOutput, StepHandle
from preempt_engine.tokenizer import ExactTokenizer, HFTokenizer, Tokenizer
from preempt_engine.victims import PreemptionController
from preempt_engine.worker.build import build_runner
from preempt_engine.worker.hooks import run_worker_hooks

Prompt = str | Sequence[int]


class LLM:
    """A complete inference engine.

    Args:
        model: "exact", a directory in Hugging Face format, or a hub id.
        preemption_controller: may force preemptions before every step.
        observer: is told everything that happens.
        **options: the fields of `EngineConfig`.

    Raises:
        ConfigError: an option is unknown or wrong, or a needed package is not installed.
        ModelNotFoundError: `model` leads to no checkpoint.
        UnsupportedModelError: the checkpoint needs something this engine lacks.
        DeterminismError: `deterministic=True` cannot be honoured here.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        preemption_controller: PreemptionController | None = None,
        observer: EngineObserver | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_kwargs(os.fspath(model), options)
        self._executor, self.config, self.tokenizer = _build(config)
        self._built_config = self.config
        self._builders: dict[str, OutputBuilder] = {}
        self._scorings: dict[str, _Scoring] = {}
        self._ended_early: list[RequestOutput] = []
        self._closed = False
        self._begin(preemption_controller, observer)

    # One call does it all -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs stand in the order of the prompts.

        Args:
            prompts: texts or lists of token ids, or a single one of either.
            sampling_params: one for all, or one per prompt; None samples with the defaults.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt. A request that can never run has `finish_reason="error"` and
            says why in `error`; the others are not affected.

        Raises:
            ConfigError: the number of sampling parameters is not that of the prompts, or a prompt
                is text and the engine has no tokenizer.
        """
        self._check_open()
        if self.has_unfinished_requests():
            raise ConfigError(
                "generate() was called while requests of add_request() are unfinished.",
                "Finish them with step() first, or add the new prompts with add_request().",
            )
        prompt_list = _as_prompt_list(prompts)
        params_list = _as_params_list(sampling_params, len(prompt_list))
        request_ids = [
            self.add_request(prompt, params)
            for prompt, params in zip(prompt_list, params_list, strict=True)
        ]
        outputs: dict[str, RequestOutput] = {}
        with _progress_bar(len(request_ids), enabled=use_tqdm) as advance:
            while self.has_unfinished_requests():
                for output in self.step():
                    if output.finished:
                        outputs[output.request_id] = output
                        advance()
        return [outputs[request_id] for request_id in request_ids]

    def score(self, prompt: Prompt, continuation: Sequence[int]) -> list[TokenScore]:
        """Teacher-forced log probabilities of every token of a continuation.

        Args:
            prompt: text or token ids, at least one token.
            continuation: token ids that follow it.

        Returns:
            One score per token of `continuation`.

        Raises:
            InfeasibleRequestError: both together do not fit in the pool or the model.
        """
        self._check_open()
        _, prompt_token_ids = self._tokenize(prompt)
        token_ids = [*prompt_token_ids, *continuation]
        if not continuation:
            return []
        # The logits of the last token are not wanted, so it is not computed.
        error = self._why_infeasible(token_ids[:-1]) or self._why_outside_vocabulary(token_ids)
        if error is not None:
            raise error
        request = self._new_request(
            self._unused_request_id(None),
            token_ids[:-1],
            SamplingParams(temperature=0.0),
            score_from=len(prompt_token_ids) - 1,
        )
        scoring = self._scorings[request.request_id] = _Scoring(list(continuation))
        self.scheduler.add(request)
        others: list[RequestOutput] = []
        while request.request_id in self.scheduler.requests:
            others += self.step()
        self._ended_early += [output for output in others if output.finished]
        return scoring.scores

    # Step by step -------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        A request that can never run is not refused here: its output, with the error, comes from
        the next `step`.

        Raises:
            ConfigError: the id is in use, or the prompt is text and there is no tokenizer.
        """
        self._check_open()
        params = sampling_params or SamplingParams()
        request_id = self._unused_request_id(request_id)
        text, token_ids = self._tokenize(prompt)
        error = self._why_infeasible(token_ids) or self._why_outside_vocabulary(token_ids)
        builder = OutputBuilder.create(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._executor.eos_token_ids,
            max_output_tokens=min(params.max_tokens, self.max_total_tokens - len(token_ids)),
            tokenizer=self.tokenizer,
        )
        request = self._new_request(request_id, token_ids, params)
        if error is not None:
            self.scheduler.refuse(request)
            builder.fail(error)
            self._ended_early.append(builder.output)
            return request_id
        self._builders[request_id] = builder
        self.scheduler.add(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            Outputs of the requests that got a token or ended, live objects that grow in place.
            Empty when nothing was computed, for instance because every block is held.

        Raises:
            EngineStalledError: requests wait and nothing can ever let them run.
        """
        self._check_open()
        ended_early, self._ended_early = self._ended_early, []
        step = self.schedule()
        if step is None:
            return ended_early
        return ended_early + self.update(step, self.execute(step).result())

    def schedule(self) -> SchedulerOutput | None:
        """First phase: decide the next step; None when there is nothing to compute."""
        preemptions_before = self.scheduler.counters.num_preemptions
        step = self.scheduler.schedule()
        if step.scheduled:
            return step
        preempted = self.scheduler.counters.num_preemptions > preemptions_before
        if self.scheduler.requests and not preempted and not self.scheduler.blocks.held_blocks:
            raise EngineStalledError(
                f"{len(self.scheduler.requests)} requests wait and none can run.",
                "This is a bug of the engine; please report it with the configuration.",
            )
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_updated(step.step_id, self.scheduler)
        return None

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Second phase: launch the step."""
        return self._executor.execute(step)

    def update(self, step: SchedulerOutput, logits: LogitsBatch) -> list[RequestOutput]:
        """Third phase: apply what the step computed."""
        self.scheduler.advance(step)
        outputs = self._deliver(step, logits)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_updated(step.step_id, self.scheduler)
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its output so far, or None if it is not running."""
        builder = self._builders.pop(request_id, None)
        if builder is None:
            return None
        request = self.scheduler.requests[request_id]
        self.scheduler.abort(request)
        self._note_counts(builder, request)
        builder.finish("abort")
        return builder.output

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to return."""
        return bool(self.scheduler.requests or self._ended_early)

    # For a harness ------------------------------------------------------------------------------

    def preempt_request(self, request_id: str) -> None:
        """Preempt the request before the next step is scheduled, if it runs then."""
        self.scheduler.force_preemption(request_id)

    def hold_blocks(self, num_blocks: int) -> int:
        """Withhold up to so many free blocks from requests; returns how many are held now.

        Blocks that become free later are not taken by themselves: call again.
        """
        return self.scheduler.blocks.hold_blocks(num_blocks)

    def reset_prefix_cache(self) -> None:
        """Make all cached content unfindable."""
        self.scheduler.blocks.reset_prefix_cache()

    def set_observer(self, observer: EngineObserver | None) -> None:
        """Who is told what happens from now on."""
        self.scheduler.observer = observer
        self._executor.set_observer(observer)

    @property
    def counters(self) -> Counters:
        """Totals since the engine was built."""
        return self.scheduler.counters

    @property
    def vocab_size(self) -> int:
        """Tokens in the model's vocabulary."""
        return self._executor.vocab_size

    @property
    def num_kv_blocks(self) -> int:
        """Size of the pool in blocks."""
        return self.scheduler.blocks.num_blocks

    @property
    def worker_process_ids(self) -> list[int]:
        """Ids of the worker processes, by rank; none with one rank."""
        return self._executor.process_ids

    def reset(
        self,
        *,
        preemption_controller: PreemptionController | None = None,
        observer: EngineObserver | None = None,
        **changes: Any,
    ) -> None:
        """Make the engine as good as new, for another trial: same weights, same workers.

        Queues, pool, prefix cache, counters and numbering start afresh; an engine that was reset
        does what a new one would.

        Args:
            preemption_controller: of the next trial.
            observer: of the next trial.
            **changes: fields of `EngineConfig` that only the scheduler knows, such as
                `num_kv_blocks` or `seed`; the pool and the token budget can be at most as large
                as the engine was built for. Others stay as they are.

        Raises:
            EngineBusyError: requests are unfinished, or blocks are held.
            ConfigError: a change is wrong, or needs a new engine.
        """
        self._check_open()
        self._check_idle()
        config = changed_config(
            self.config, changes, self._built_config, self._executor.num_kv_blocks
        )
        self._executor.reset()
        self.config = config
        self._begin(preemption_controller, observer)

    # Closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything; may be called twice."""
        if not self._closed:
            self._closed = True
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Inside -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("This engine is closed.", "Build a new LLM.")

    def _begin(
        self, controller: PreemptionController | None, observer: EngineObserver | None
    ) -> None:
        """What is new in a new engine, and in one that was reset."""
        num_blocks = self.config.num_kv_blocks or self._executor.num_kv_blocks
        self.scheduler = Scheduler(self.config, num_blocks, controller=controller)
        self.max_total_tokens = min(
            self._executor.max_model_len,
            # The last token of a sequence is sampled but never computed.
            num_blocks * self.config.block_size + 1,
        )
        self._num_arrived = 0
        self.set_observer(observer)

    def _check_idle(self) -> None:
        """Nothing is left over: what a user may have left raises, what we may have left asserts."""
        blocks = self.scheduler.blocks
        if self.has_unfinished_requests() or blocks.held_blocks:
            raise EngineBusyError(
                f"{len(self.scheduler.requests)} requests are unfinished, {len(self._ended_early)} "
                f"outputs were not taken and {len(blocks.held_blocks)} blocks are held.",
                "Finish or abort the requests, call step() for the outputs, and hold_blocks(0).",
            )
        assert not self._builders, f"requests {list(self._builders)} ended and are still built"
        assert not self._scorings, f"scorings {list(self._scorings)} ended and are kept"
        self.scheduler.check_integrity()
        counts = self.scheduler.pool_counts()
        assert counts.free + counts.cached == counts.num_blocks, f"blocks leaked: {counts}"

    def _new_request(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        score_from: int | None = None,
    ) -> Request:
        arrival_index = self._num_arrived
        self._num_arrived += 1
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, arrival_index)
        return Request.create(
            request_id=request_id,
            arrival_index=arrival_index,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            score_from=score_from,
        )

    def _unused_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            return str(self._num_arrived)
        if request_id in self.scheduler.requests:
            raise ConfigError(
                f"Request id {request_id!r} is in use.", "Choose another, or leave it out."
            )
        return request_id

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise ConfigError(
                "The prompt is text, and the engine was built with skip_tokenizer_init=True.",
                "Pass token ids, or build the engine with a tokenizer.",
            )
        return prompt, self.tokenizer.encode(prompt)

    def _why_infeasible(self, token_ids: list[int]) -> InfeasibleRequestError | None:
        """Why these tokens can never be computed by this engine, if they cannot."""
        num_tokens = len(token_ids)
        pool_tokens = self.num_kv_blocks * self.config.block_size
        if num_tokens == 0:
            return InfeasibleRequestError("The prompt is empty.", "Give at least one token.")
        if num_tokens >= self._executor.max_model_len:
            return InfeasibleRequestError(
                f"The prompt has {num_tokens} tokens and max_model_len is "
                f"{self._executor.max_model_len}, which leaves no room for output.",
                "Shorten the prompt or raise max_model_len.",
            )
        if num_tokens > pool_tokens:
            return InfeasibleRequestError(
                f"The prompt has {num_tokens} tokens and the pool holds {pool_tokens} "
                f"({self.num_kv_blocks} blocks of {self.config.block_size}).",
                "Shorten the prompt or raise num_kv_blocks.",
            )
        return None

    def _why_outside_vocabulary(self, token_ids: list[int]) -> InfeasibleRequestError | None:
        vocab_size = self._executor.vocab_size
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                return InfeasibleRequestError(
                    f"Token id {token_id} at position {position} is not in [0, {vocab_size}).",
                    "Use the model's own tokenizer.",
                )
        return None

    def _deliver(self, step: SchedulerOutput, logits: LogitsBatch) -> list[RequestOutput]:
        """Score or sample from the step's rows; returns the outputs that changed."""
        wanted: list[tuple[Request, SampleRequest]] = []
        first_row = 0
        for item in step.scheduled:
            rows = range(first_row, first_row + item.num_logits)
            first_row = rows.stop
            request = self.scheduler.requests.get(item.key.request_id)
            if request is None or not rows:
                continue
            if request.score_from is None:
                wanted.append((request, self._sample_request(request, rows[0])))
            else:
                self._take_scores(request, logits, rows)
        tokens = sample(logits, [sample_request for _, sample_request in wanted])
        return [
            self._append_token(step.step_id, request, token)
            for (request, _), token in zip(wanted, tokens, strict=True)
        ]

    def _sample_request(self, request: Request, row: int) -> SampleRequest:
        sequence = request.sequence
        return SampleRequest(
            row=row,
            params=request.params,
            seed=request.seed,
            branch=sequence.key.branch,
            position=sequence.num_tokens,
            num_output_tokens=sequence.num_output_tokens,
            stop_ids=self._builders[request.request_id].stop_ids,
        )

    def _take_scores(self, request: Request, logits: LogitsBatch, rows: range) -> None:
        scoring = self._scorings[request.request_id]
        targets = scoring.continuation[request.num_scored : request.num_scored + len(rows)]
        scoring.scores += score_rows(logits, rows, targets)
        request.num_scored += len(rows)
        if request.num_scored == len(scoring.continuation):
            del self._scorings[request.request_id]
            self.scheduler.finish(request, "length")

    def _append_token(self, step_id: int, request: Request, token: SampledToken) -> RequestOutput:
        self.scheduler.append_token(request, token.token_id)
        builder = self._builders[request.request_id]
        text = builder.append(token)
        if self.scheduler.observer is not None:
            self.scheduler.observer.tokens_delivered(
                step_id,
                request.sequence.key,
                [token.token_id],
                None if token.logprobs is None else [token.logprobs],
                text,
            )
        self._note_counts(builder, request)
        reason = builder.completion.finish_reason
        if reason is not None:
            del self._builders[request.request_id]
            self.scheduler.finish(request, reason)
        return builder.output

    @staticmethod
    def _note_counts(builder: OutputBuilder, request: Request) -> None:
        builder.output.num_cached_tokens = request.num_cached_tokens or 0
        builder.output.num_preemptions = request.num_preemptions


@dataclasses.dataclass(slots=True)
class _Scoring:
    """A continuation being scored."""

    continuation: list[int]
    scores: list[TokenScore] = dataclasses.field(default_factory=list)


def _build(config: EngineConfig) -> tuple[Executor, EngineConfig, Tokenizer | None]:
    """The executor and the tokenizer of a configuration, and it with paths resolved."""
    if config.is_exact:
        return _build_executor(config), config, _exact_tokenizer(config)
    if importlib.util.find_spec("torch") is None:  # not imported here: workers may be who needs it
        raise ConfigError(
            f"model={config.model!r} needs torch, which is not installed.",
            'Install it with: pip install "preempt-harness[engine]".',
        )
    from preempt_engine.models.config import ModelConfig, resolve_model
    from preempt_engine.models.sharding import ModelShard

    config = dataclasses.replace(config, model=str(resolve_model(config.model)))
    # Refuse what cannot be divided before any worker starts.
    ModelShard.of(ModelConfig.from_directory(config.model), 0, config.tensor_parallel_size)
    tokenizer = None if config.skip_tokenizer_init else HFTokenizer(_tokenizer_path(config))
    return _build_executor(config), config, tokenizer


def _build_executor(config: EngineConfig) -> Executor:
    if config.tensor_parallel_size > 1:
        from preempt_engine.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config)
    runner = build_runner(config)
    run_worker_hooks(config.worker_hooks, runner)
    return UniprocExecutor(runner)


def _exact_tokenizer(config: EngineConfig) -> Tokenizer | None:
    return None if config.skip_tokenizer_init else ExactTokenizer(config.exact_vocab_size)


def _tokenizer_path(config: EngineConfig) -> str:
    if config.tokenizer is None:
        return config.model
    from preempt_engine.models.config import resolve_model

    return str(resolve_model(config.tokenizer))


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _as_params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ConfigError(
            f"{len(params)} SamplingParams for {num_prompts} prompts.",
            "Give one for all prompts, or one per prompt.",
        )
    return list(params)


@contextmanager
def _progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yields a function to call once per finished request."""
    if not enabled:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="Generating", unit="request", dynamic_ncols=True) as bar:

        def advance() -> None:
            bar.update(1)

        yield advance
