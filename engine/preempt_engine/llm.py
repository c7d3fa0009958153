"""The engine's facade. An `LLM` owns everything by instance: two can live side by side.

A step has three phases: `schedule` decides, `execute` launches and hands back a handle, `update`
applies what came out. Tokens are applied in `update` and nowhere else.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from preempt_engine.async_scheduler import AsyncScheduler
from preempt_engine.batch import (
    Params,
    Prompt,
    params_list,
    priority_list,
    progress_bar,
    prompt_list,
)
from preempt_engine.beam_search import BeamSearch
from preempt_engine.config import EngineConfig, PreemptionMode
from preempt_engine.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    EngineStalledError,
    InfeasibleRequestError,
    QueueFullError,
    WorkerError,
)
from preempt_engine.executor.protocol import Executor
from preempt_engine.executor.uniproc import UniprocExecutor
from preempt_engine.observer import EngineObserver
from preempt_engine.output_builder import OutputBuilder
from preempt_engine.outputs import RequestOutput, StreamDelta, TokenScore
from preempt_engine.pipeline import StepPipeline
from preempt_engine.reset import changed_config
from preempt_engine.sampling.history import ProcessorStates
from preempt_engine.sampling.logprobs import read_row, score_rows, top_logprobs_of_rows
from preempt_engine.sampling.noise import derive_seed
from preempt_engine.sampling.params import BeamSearchParams, SamplingParams
from preempt_engine.sampling.recipes import ProcessorRecipe, RecipeBook
from preempt_engine.sampling.sampler import SampledToken, SampleRequest, sample
from preempt_engine.scheduler import Counters, Scheduler
from preempt_engine.sequence import Request, Sequence
from preempt_engine.spec_decode.speculator import Speculator, make_speculator
from preempt_engine.step import LogitsBatch, SchedulerOutput, SequenceKey, StepHandle
from preempt_engine.stream import DeltaReader
from preempt_engine.tokenizer import ExactTokenizer, HFTokenizer, Tokenizer
from preempt_engine.victims import PreemptionController
from preempt_engine.worker.build import build_runner
from preempt_engine.worker.hooks import run_worker_hooks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Wanted: TypeAlias = tuple[Request, Sequence, SampleRequest]
"""A token to choose, and for whom."""


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
        self._recipes = RecipeBook(
            self.tokenizer, self._executor.vocab_size, self._executor.eos_token_ids
        )
        self._states = ProcessorStates()
        self._builders: dict[str, list[OutputBuilder]] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._scorings: dict[str, _Scoring] = {}
        self._ended_early: list[RequestOutput] = []
        self._streamed: list[RequestOutput] = []
        self._speculator: Speculator | None = None
        self._closed = False
        try:
            self._begin(preemption_controller, observer)
        except BaseException:
            self.close()
            raise

    # One call does it all -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: Params | Seq[Params] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Seq[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs stand in the order of the prompts.

        Args:
            prompts: texts or lists of token ids, or a single one of either.
            sampling_params: one for all, or one per prompt; None samples with the defaults, and
                `BeamSearchParams` search beams.
            use_tqdm: show a progress bar.
            priority: one per prompt, see `add_request`; None gives all the same.

        Returns:
            One output per prompt. A request that can never run has `finish_reason="error"` and
            says why in `error`; the others are not affected.

        Raises:
            ConfigError: the number of sampling parameters or priorities is not that of the prompts,
                or a prompt is text and the engine has no tokenizer.
        """
        self._check_open()
        if self.has_unfinished_requests():
            raise ConfigError(
                "generate() was called while requests of add_request() are unfinished.",
                "Finish them with step() first, or add the new prompts with add_request().",
            )
        listed = prompt_list(prompts)
        arrivals = zip(
            listed,
            params_list(sampling_params, len(listed)),
            priority_list(priority, len(listed)),
            strict=True,
        )
        outputs: list[RequestOutput] = []
        try:
            with progress_bar(len(listed), enabled=use_tqdm) as advance:
                while len(outputs) < len(listed) or self.has_unfinished_requests():
                    # Prompts wait here while the queue is full; none is refused.
                    while not self._queue_is_full() and (arrival := next(arrivals, None)):
                        outputs.append(self._submit(*arrival))
                    for output in self.step():
                        if output.finished:
                            advance()
        except WorkerError:  # the engine is closed by it
            raise
        except BaseException:  # nothing of a call that failed half-way stays behind
            for output in outputs:
                self._withdraw(output)
            raise
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Iterator[StreamDelta]:
        """Generate for one prompt and hand on each piece of output as it comes.

        The request is queued at once; the iterator runs steps whenever it has nothing to tell.
        Several streams may be read in turns, beside `add_request` and `step`: each gets every
        token once. Closing the iterator, or dropping it, aborts a request that has not ended.

        Args:
            prompt, sampling_params, request_id, priority: see `add_request`.

        Returns:
            Deltas, the last of each branch with its `finish_reason`; those of a beam search come
            whole, at its end.

        Raises:
            ConfigError: as `add_request`.
            EngineError: from the iterator: the request's own error, after its last delta.
        """
        self._check_open()
        return self._deltas(
            self._submit(prompt, sampling_params or SamplingParams(), priority, request_id)
        )

    def beam_search(
        self, prompts: Prompt | Seq[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Search beams for every prompt.

        Returns:
            One output per prompt; its `outputs` are `params.beam_width` results, best first, each
            with its `score` and the log probability of every token.

        Raises:
            ConfigError: as `generate`.
        """
        return self.generate(prompts, params, use_tqdm)

    def score(self, prompt: Prompt, continuation: Seq[int]) -> list[TokenScore]:
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
            num_to_score=len(continuation),
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
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id.

        A request that can never run, or that finds `max_waiting_requests` others in the queue, does
        not raise here: its output, with the error, comes from the next `step`. One whose branches
        cannot all grow to `max_tokens` with the whole pool to themselves ends with
        `finish_reason="length"` when they are as long as they can all be.

        Args:
            prompt: text or token ids.
            sampling_params: None samples with the defaults, `BeamSearchParams` search beams.
            request_id: unique among unfinished requests; None chooses one.
            priority: the lower value goes first; 0 unless `scheduling_policy="priority"`.

        Raises:
            ConfigError: the id is in use, the prompt or the parameters need a tokenizer or a
                package that the engine lacks, or there is a priority without the policy.
        """
        self._check_open()
        params = sampling_params or SamplingParams()
        return self._submit(prompt, params, priority, request_id).request_id

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Change the priority of a waiting or running request; False if there is no such request.

        Raises:
            ConfigError: the engine does not schedule by priority.
        """
        self._check_priority(priority)
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self.scheduler.set_priority(request, priority)
        return True

    def _submit(
        self,
        prompt: Prompt,
        params: Params,
        priority: int,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Queue a request; returns its live output."""
        self._check_priority(priority)
        request_id = self._unused_request_id(request_id)
        text, token_ids = self._tokenize(prompt)
        asked = params if isinstance(params, SamplingParams) else params.for_output
        recipe, recipe_error = self._recipe(asked)
        max_total_tokens = self._max_total_tokens(len(token_ids), params.num_sequences)
        builders = OutputBuilder.create_branches(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=asked,
            eos_token_ids=self._executor.eos_token_ids,
            max_output_tokens=min(params.max_tokens, max_total_tokens - len(token_ids)),
            tokenizer=self.tokenizer,
        )
        error: EngineError | None = (
            self._why_infeasible(token_ids, min(params.max_tokens, 1))
            or self._why_outside_vocabulary(token_ids)
            or self._why_too_many_sequences(params, builders[0].stop_ids)
            or recipe_error
            or self._why_refused()
        )
        request = self._new_request(
            request_id,
            token_ids,
            params,
            priority=priority,
            score_from=None if asked.prompt_logprobs is None else 0,
            num_to_score=0 if asked.prompt_logprobs is None else len(token_ids) - 1,
        )
        if error is not None:
            self.scheduler.refuse(request)
            for builder in builders:
                builder.fail(error)
            self._ended_early.append(builders[0].output)
            return builders[0].output
        self._builders[request_id] = builders
        request.max_output_tokens = builders[0].max_output_tokens
        if recipe is not None:
            self._states.add(request_id, recipe)
        if isinstance(params, BeamSearchParams):
            self._searches[request_id] = BeamSearch(
                params, builders[0].stop_ids, builders[0].max_output_tokens
            )
        self.scheduler.add(request)
        return builders[0].output

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
        if self._pipeline is not None:
            return ended_early + self._pipeline.step()
        step = self.schedule()
        if step is None:
            return ended_early
        try:
            logits = self.execute(step).result()
        except BaseException:
            self.scheduler.leave_step(step)
            raise
        return ended_early + self.update(step, logits)

    def schedule(self) -> SchedulerOutput | None:
        """First phase: decide the next step; None when there is nothing to compute."""
        preemptions_before = self.scheduler.counters.num_preemptions
        step = self.scheduler.schedule()
        if step.has_work:
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
        requests = self.scheduler.advance(step)
        outputs = self._deliver(step, requests, logits)
        if self._speculator is not None:
            self._speculator.draft(step, requests, self.scheduler)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_updated(step.step_id, self.scheduler)
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its output so far, or None if it is not running."""
        builders = self._builders.pop(request_id, None)
        if builders is None:
            return None
        self._searches.pop(request_id, None)
        request = self.scheduler.requests[request_id]
        _note_counts(builders[0].output, request)
        self._finish_branches(self.scheduler.next_step_id, builders, "abort")
        self._states.drop(request)
        self.scheduler.abort(request)
        if self._pipeline is not None and not self.scheduler.requests:
            self._pipeline.drain()  # nobody else will
        return builders[0].output

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to return."""
        return bool(self.scheduler.requests or self._ended_early)

    # For a harness ------------------------------------------------------------------------------

    def preempt_request(self, request_id: str, mode: PreemptionMode | None = None) -> None:
        """Preempt the request before the next step is scheduled, if it runs then.

        Args:
            mode: "recompute", "swap", or None for the engine's `preemption_mode`.
        """
        self.scheduler.force_preemption(request_id, mode)

    def hold_blocks(self, num_blocks: int) -> int:
        """Withhold up to so many free blocks from requests; returns how many are held now.

        Blocks that become free later are not taken by themselves: call again.
        """
        return self.scheduler.blocks.hold_blocks(num_blocks)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Make all cached content unfindable.

        Args:
            reset_running_requests: preempt every running request first, so that nothing computed
                before this call is ever read again. Their outputs do not change.
        """
        if reset_running_requests:
            self.scheduler.preempt_all()
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
            self.config,
            changes,
            self._built_config,
            num_built_blocks=self._executor.num_kv_blocks,
            num_built_host_blocks=self._executor.num_host_blocks,
        )
        self._executor.reset()
        self.config = config
        self._begin(preemption_controller, observer)

    # Closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything; may be called twice."""
        if not self._closed:
            self._closed = True
            if self._speculator is not None:
                self._speculator.close()
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
        self._executor.check_usable()

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ConfigError(
                f"priority={priority}, and the engine serves in order of arrival.",
                'Build it with scheduling_policy="priority", or leave the priority at 0.',
            )

    def _recipe(
        self, params: SamplingParams
    ) -> tuple[ProcessorRecipe | None, InfeasibleRequestError | None]:
        """What the request's processors are made of, or why they cannot be made."""
        if not params.has_processors:
            return None, None
        try:
            return self._recipes.recipe(params), None
        except InfeasibleRequestError as error:
            return None, error

    def _queue_is_full(self) -> bool:
        limit = self.config.max_waiting_requests
        return limit is not None and len(self.scheduler.waiting) >= limit

    def _why_refused(self) -> QueueFullError | None:
        if not self._queue_is_full():
            return None
        return QueueFullError(
            f"{len(self.scheduler.waiting)} requests wait already, and max_waiting_requests is "
            f"{self.config.max_waiting_requests}.",
            "Try again later, or raise max_waiting_requests.",
        )

    def _withdraw(self, output: RequestOutput) -> None:
        """Make sure that nothing more comes of a request."""
        self._ended_early = [early for early in self._ended_early if early is not output]
        if not output.finished:
            self.abort_request(output.request_id)

    def _deltas(self, output: RequestOutput) -> Iterator[StreamDelta]:
        reader = DeltaReader(output)
        self._streamed.append(output)
        try:
            while True:
                deltas = reader.read()
                if deltas:  # and perhaps more when those have been taken
                    yield from deltas
                    continue
                if output.finished:
                    break
                stepped = self.step()
                # What ended for others is kept for the next who asks.
                self._ended_early += [
                    other
                    for other in stepped
                    if other.finished and not any(other is mine for mine in self._streamed)
                ]
        finally:
            self._streamed = [other for other in self._streamed if other is not output]
            self._withdraw(output)
        if output.error is not None:
            raise output.error

    def _begin(
        self, controller: PreemptionController | None, observer: EngineObserver | None
    ) -> None:
        """What is new in a new engine, and in one that was reset."""
        num_host_blocks = self.config.swap_space_blocks
        if num_host_blocks is None:
            num_host_blocks = self._executor.num_host_blocks
        depth = self.config.async_scheduling
        self.scheduler = (AsyncScheduler if depth else Scheduler)(
            self.config,
            self.config.num_kv_blocks or self._executor.num_kv_blocks,
            num_host_blocks=num_host_blocks,
            controller=controller,
        )
        self._pipeline: StepPipeline | None = None
        if isinstance(self.scheduler, AsyncScheduler):
            self._pipeline = StepPipeline(
                self.scheduler,
                depth,
                decide=self.schedule,
                execute=self.execute,
                update=self.update,
            )
        self.max_total_tokens = self._max_total_tokens(num_prompt_tokens=0, num_sequences=1)
        self._num_arrived = 0
        self._begin_speculation()
        self.set_observer(observer)

    def _begin_speculation(self) -> None:
        """A draft model that is there already, and is to be there, only forgets."""
        speculator = self._speculator
        if speculator is not None and speculator.config == self.config.speculative_config:
            speculator.reset()
            return
        if speculator is not None:
            speculator.close()
        self._speculator = None
        self._speculator = make_speculator(self.config, self._executor)

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
        assert not self._searches, f"searches {list(self._searches)} ended and are kept"
        assert not self._states, "requests ended and their processors are kept"
        assert not self._scorings, f"scorings {list(self._scorings)} ended and are kept"
        self.scheduler.check_integrity()
        counts = self.scheduler.pool_counts()
        assert counts.free + counts.cached == counts.num_blocks, f"blocks leaked: {counts}"

    def _new_request(
        self,
        request_id: str,
        token_ids: list[int],
        params: Params,
        *,
        priority: int = 0,
        score_from: int | None = None,
        num_to_score: int = 0,
    ) -> Request:
        arrival_index = self._num_arrived
        self._num_arrived += 1
        seed = params.seed if isinstance(params, SamplingParams) else None
        if seed is None:
            seed = derive_seed(self.config.seed, arrival_index)
        return Request.create(
            request_id=request_id,
            arrival_index=arrival_index,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            priority=priority,
            score_from=score_from,
            num_to_score=num_to_score,
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

    def _max_total_tokens(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Most tokens of each of several sequences of one prompt that have the pool to themselves.

        Full blocks of the prompt are shared; the rest of the pool is divided. The last token of a
        sequence is chosen but never computed, and the first needs no block beyond the prompt's.
        """
        num_shared = num_prompt_tokens // self.config.block_size
        num_own = (self.num_kv_blocks - num_shared) // num_sequences
        pool_tokens = (num_shared + num_own) * self.config.block_size + 1
        return min(self._executor.max_model_len, max(pool_tokens, num_prompt_tokens + 1))

    def _why_infeasible(
        self, token_ids: list[int], num_output_tokens: int = 1
    ) -> InfeasibleRequestError | None:
        """Why these tokens, and so many after them, are too many for this engine, if they are."""
        num_tokens = len(token_ids)
        pool_tokens = self.num_kv_blocks * self.config.block_size
        if num_tokens == 0:
            return InfeasibleRequestError("The prompt is empty.", "Give at least one token.")
        if num_tokens + num_output_tokens > self._executor.max_model_len:
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

    def _why_too_many_sequences(
        self, params: Params, stop_ids: frozenset[int]
    ) -> InfeasibleRequestError | None:
        name = "n" if isinstance(params, SamplingParams) else "beam_width"
        if params.num_sequences > self.config.max_num_seqs:
            return InfeasibleRequestError(
                f"{name}={params.num_sequences} sequences of one request never run at once with "
                f"max_num_seqs={self.config.max_num_seqs}.",
                f"Lower {name} or raise max_num_seqs.",
            )
        if isinstance(params, SamplingParams):
            return None
        num_candidates = BeamSearch.num_candidates(params.beam_width, stop_ids)
        if num_candidates > self._executor.vocab_size:
            return InfeasibleRequestError(
                f"beam_width={params.beam_width} with {len(stop_ids)} stop ids needs "
                f"{num_candidates} tokens to choose from; the vocabulary has "
                f"{self._executor.vocab_size}.",
                "Lower beam_width.",
            )
        return None

    def _deliver(
        self, step: SchedulerOutput, requests: list[Request | None], logits: LogitsBatch
    ) -> list[RequestOutput]:
        """Score, sample or search from the step's rows; returns the outputs that changed.

        Args:
            step: that was executed.
            requests: whose each scheduled sequence is, None for rows that nobody wants any more.
            logits: the step's rows.
        """
        wanted: list[Wanted] = []
        outputs: dict[str, RequestOutput] = {}
        first_row = 0
        for item, request in zip(step.scheduled, requests, strict=True):
            rows = range(first_row, first_row + item.num_logits)
            first_row = rows.stop
            if request is None or not rows:
                continue
            sequence = request.sequences[item.key.branch]
            if request.reads_prompt:
                rows = self._read_prompt(request, logits, rows)
                if rows and request.params.max_tokens == 0:
                    outputs[request.request_id] = self._end_prompt(step.step_id, request)
                    continue
            if not rows:
                continue
            sequence.first_wanted_logits += 1
            if request.request_id in self._searches:
                if self._search(request, sequence, read_row(logits, rows[0])):
                    outputs[request.request_id] = self._finish_search(step.step_id, request)
            else:
                for one in self._branches(request, sequence):
                    wanted.append((request, one, self._sample_request(request, one, rows[0])))
        while wanted:
            wanted = self._choose_tokens(step.step_id, logits, wanted, outputs)
        return list(outputs.values())

    def _choose_tokens(
        self,
        step_id: int,
        logits: LogitsBatch,
        wanted: list[Wanted],
        outputs: dict[str, RequestOutput],
    ) -> list[Wanted]:
        """One more token for each sequence in `wanted`; adds to `outputs` those that changed.

        Returns:
            Sequences whose token was drafted: the next one can be sampled at once, from the row
            of the draft, with everything as it is after the draft.
        """
        if self._states:
            self._attach_states(wanted)
        tokens = sample(logits, [sample_request for _, _, sample_request in wanted])
        drafts = self._speculator is not None
        drafted: list[Wanted] = []
        for (request, sequence, sample_request), token in zip(wanted, tokens, strict=True):
            if isinstance(token, SampledToken):
                output = self._append_token(step_id, request, sequence, token)
            else:
                output = self._fail_branch(step_id, request, sequence, token)
            outputs[output.request_id] = output
            # With the token's position computed already, it was drafted.
            if drafts and sequence.num_computed_tokens >= len(sequence.token_ids):
                sequence.first_wanted_logits += 1
                row = sample_request.row + 1
                drafted.append((request, sequence, self._sample_request(request, sequence, row)))
        return drafted

    def _branches(self, request: Request, sequence: Sequence) -> list[Sequence]:
        """Who samples from the sequence's logits: itself and, from the prompt's, all branches."""
        branches = [sequence]
        while request.next_branch < request.num_seqs:
            branches.append(self.scheduler.fork(request, sequence))
        return branches

    def _sample_request(self, request: Request, sequence: Sequence, row: int) -> SampleRequest:
        branch = sequence.key.branch
        builder = self._builders[request.request_id][branch]
        return SampleRequest(
            row=row,
            params=builder.params,
            seed=request.seed,
            branch=branch,
            position=sequence.num_tokens,
            num_output_tokens=sequence.num_output_tokens,
            stop_ids=builder.stop_ids,
        )

    def _attach_states(self, wanted: list[Wanted]) -> None:
        for request, sequence, sample_request in wanted:
            sample_request.state = self._states.of(request, sequence)
            if sample_request.state is not None:
                sample_request.output_token_ids = sequence.output_token_ids

    def _read_prompt(self, request: Request, logits: LogitsBatch, rows: range) -> range:
        """Score given tokens with the rows that predict them; returns the rows to sample from."""
        if request.score_from is None:
            return rows
        sequence = request.sequence
        done = sequence.first_wanted_logits - request.score_from
        num = min(len(rows), max(0, request.num_to_score - done))
        if num == 0:
            return rows
        sequence.first_wanted_logits += num
        scoring = self._scorings.get(request.request_id)
        if scoring is None:  # the prompt's own tokens, of which nothing predicts the first
            builder = self._builders[request.request_id][0]
            assert builder.params.prompt_logprobs is not None
            targets = sequence.token_ids[done + 1 : done + 1 + num]
            builder.append_prompt_logprobs(
                top_logprobs_of_rows(logits, rows[:num], builder.params.prompt_logprobs, targets)
            )
            return rows[num:]
        targets = scoring.continuation[done : done + num]
        scoring.scores += score_rows(logits, rows[:num], targets)
        if done + num == request.num_to_score:
            del self._scorings[request.request_id]
            self.scheduler.finish(request, "length")
        return rows[num:]

    def _append_token(
        self, step_id: int, request: Request, sequence: Sequence, token: SampledToken
    ) -> RequestOutput:
        self.scheduler.append_token(sequence, token.token_id)
        text = self._builders[request.request_id][sequence.key.branch].append(token)
        if self.scheduler.observer is not None:
            self.scheduler.observer.tokens_delivered(
                step_id,
                sequence.key,
                [token.token_id],
                None if token.logprobs is None else [token.logprobs],
                text,
            )
        return self._follow_up(request, sequence)

    def _fail_branch(
        self, step_id: int, request: Request, sequence: Sequence, error: EngineError
    ) -> RequestOutput:
        """No token can be chosen for the branch: it ends alone, the others go on."""
        text = self._builders[request.request_id][sequence.key.branch].fail(error)
        self._tell_text(step_id, sequence.key, text)
        return self._follow_up(request, sequence)

    def _follow_up(self, request: Request, sequence: Sequence) -> RequestOutput:
        """Let the branch, or the request, end if the branch's output says so."""
        builder = self._builders[request.request_id][sequence.key.branch]
        output = builder.output
        _note_counts(output, request)
        reason = builder.completion.finish_reason
        if output.finished:
            assert reason is not None
            self._finish(request, reason)
        elif reason is not None:
            self.scheduler.end_branch(request, sequence)
        return output

    def _end_prompt(self, step_id: int, request: Request) -> RequestOutput:
        """The prompt is computed, and no token after it is wanted."""
        builders = self._builders[request.request_id]
        self._finish_branches(step_id, builders, "length")
        _note_counts(builders[0].output, request)
        self._finish(request, "length")
        return builders[0].output

    def _finish(self, request: Request, reason: str) -> None:
        del self._builders[request.request_id]
        self._states.drop(request)
        self.scheduler.finish(request, reason)

    def _finish_branches(self, step_id: int, builders: list[OutputBuilder], reason: str) -> None:
        """End the branches that have not ended."""
        for builder in builders:
            if not builder.completion.finished():
                key = SequenceKey(builder.output.request_id, builder.completion.index)
                self._tell_text(step_id, key, builder.finish(reason))

    def _tell_text(self, step_id: int, key: SequenceKey, text: str) -> None:
        """Text that was held back until the branch ended without another token."""
        if text and self.scheduler.observer is not None:
            self.scheduler.observer.tokens_delivered(step_id, key, [], None, text)

    def _search(self, request: Request, sequence: Sequence, row: NDArray[np.float64]) -> bool:
        """Take in a beam's logits and go on when all beams have theirs; True ends the search."""
        search = self._searches[request.request_id]
        if not search.take_row(sequence.key.branch, row):
            return False
        beams = search.advance()
        if not beams:
            return True
        search.renumber(self.scheduler.continue_beams(request, beams))
        return False

    def _finish_search(self, step_id: int, request: Request) -> RequestOutput:
        search = self._searches.pop(request.request_id)
        builders = self._builders.pop(request.request_id)
        for builder, hypothesis in zip(builders, search.hypotheses, strict=True):
            tokens = [
                SampledToken(token_id, {token_id: logprob})
                for token_id, logprob in hypothesis.tokens()
            ]
            for token in tokens:
                builder.append(token)
            builder.completion.score = hypothesis.score
            self.scheduler.counters.num_generated_tokens += len(tokens)
            if self.scheduler.observer is not None:
                self.scheduler.observer.tokens_delivered(
                    step_id,
                    SequenceKey(request.request_id, builder.completion.index),
                    builder.completion.token_ids,
                    builder.completion.logprobs,
                    builder.completion.text,
                )
        output = builders[0].output
        _note_counts(output, request)
        self.scheduler.finish(request, builders[0].completion.finish_reason or "length")
        return output


def _note_counts(output: RequestOutput, request: Request) -> None:
    output.num_cached_tokens = request.num_cached_tokens or 0
    output.num_preemptions = request.num_preemptions


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
