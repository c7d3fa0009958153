"""The engine's facade. An `LLM` owns everything by instance: two can live side by side.

A step has three phases: `schedule` decides, `execute` launches and hands back a handle, `update`
applies what came out. Tokens are applied in `update` and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, Self

from preempt_engine.async_scheduler import AsyncScheduler
from preempt_engine.batch import (
    Params,
    Prompt,
    params_list,
    priority_list,
    progress_bar,
    prompt_list,
)
from preempt_engine.building import build_executor, build_scheduler
from preempt_engine.config import EngineConfig, PreemptionMode
from preempt_engine.counters import Counters
from preempt_engine.delivery import Delivery
from preempt_engine.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineStalledError,
    WorkerError,
)
from preempt_engine.intake import Intake
from preempt_engine.observer import EngineObserver
from preempt_engine.outbox import Outbox
from preempt_engine.outputs import RequestOutput, StreamDelta, TokenScore
from preempt_engine.pipeline import StepPipeline
from preempt_engine.reset import changed_config
from preempt_engine.sampling.params import BeamSearchParams, SamplingParams
from preempt_engine.sampling.recipes import RecipeBook
from preempt_engine.spec_decode.speculator import Speculator, make_speculator
from preempt_engine.step import LogitsBatch, SchedulerOutput, StepHandle
from preempt_engine.stream import DeltaReader
from preempt_engine.victims import PreemptionController


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
        self._executor, self.config, self.tokenizer = build_executor(config)
        self._built_config = self.config
        self._recipes = RecipeBook(
            self.tokenizer, self._executor.vocab_size, self._executor.eos_token_ids
        )
        self._outbox = Outbox()
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
                    while not self._intake.queue_is_full() and (arrival := next(arrivals, None)):
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
        deltas = self._deltas(
            self._submit(prompt, sampling_params or SamplingParams(), priority, request_id)
        )
        next(deltas)  # what has not begun could be closed without an abort
        return deltas

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
        request = self._intake.to_score(prompt, continuation)
        if request is None:
            return []
        scoring = self._delivery.prompts.begin(request, continuation)
        self.scheduler.add(request)
        others: list[RequestOutput] = []
        while request.request_id in self.scheduler.requests:
            others += self.step()
        for output in others:
            if output.finished:
                self._outbox.put(output)
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
        self._intake.check_priority(priority)
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
        arrival = self._intake.arrival(prompt, params, priority, request_id)
        output = arrival.builders[0].output
        if arrival.error is not None:
            self.scheduler.refuse(arrival.request)
            for builder in arrival.builders:
                builder.fail(arrival.error)
            self._outbox.put(output)
            return output
        self._delivery.begin(arrival)
        self.scheduler.add(arrival.request)
        return output

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            Outputs of the requests that got a token or ended, live objects that grow in place.
            Empty when nothing was computed, for instance because every block is held.

        Raises:
            EngineStalledError: requests wait and nothing can ever let them run.
        """
        self._check_open()
        ended_early = self._outbox.take()
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
        outputs = self._delivery.deliver(step, requests, logits)
        if self._speculator is not None:
            self._speculator.draft(step, requests, self.scheduler)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_updated(step.step_id, self.scheduler)
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its output so far, or None if it is not running."""
        output = self._delivery.abort(request_id)
        if output is not None and self._pipeline is not None and not self.scheduler.requests:
            self._pipeline.drain()  # nobody else will
        return output

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to return."""
        return bool(self.scheduler.requests or len(self._outbox))

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
    def eos_token_ids(self) -> frozenset[int]:
        """Ids of the model that end a generation unless `ignore_eos`."""
        return self._executor.eos_token_ids

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

    def _withdraw(self, output: RequestOutput) -> None:
        """Make sure that nothing more comes of a request."""
        self._outbox.withdraw(output)
        if not output.finished:
            self.abort_request(output.request_id)

    def _deltas(self, output: RequestOutput) -> Iterator[StreamDelta]:
        """An empty delta at once, then those of the output."""
        reader = DeltaReader(output)
        try:
            with self._outbox.streaming(output):
                yield StreamDelta(output.request_id, 0, "", [], None, None, None)
                while True:
                    deltas = reader.read()
                    if deltas:  # and perhaps more when those have been taken
                        yield from deltas
                        continue
                    if output.finished:
                        break
                    # What ended for others is kept for the next who asks.
                    self._outbox.put_ended(self.step())
        finally:
            self._withdraw(output)
        if output.error is not None:
            raise output.error

    def _begin(
        self, controller: PreemptionController | None, observer: EngineObserver | None
    ) -> None:
        """What is new in a new engine, and in one that was reset."""
        self.scheduler = build_scheduler(self.config, self._executor, controller)
        self._pipeline: StepPipeline | None = None
        if isinstance(self.scheduler, AsyncScheduler):
            self._pipeline = StepPipeline(
                self.scheduler,
                self.config.async_scheduling,
                decide=self.schedule,
                execute=self.execute,
                update=self.update,
            )
        self._intake = Intake(
            self.config, self._executor, self.tokenizer, self._recipes, self.scheduler
        )
        self.max_total_tokens = self._intake.max_total_tokens(num_prompt_tokens=0, num_sequences=1)
        self._begin_speculation()
        self._delivery = Delivery(self.scheduler)
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
                f"{len(self.scheduler.requests)} requests are unfinished, {len(self._outbox)} "
                f"outputs were not taken and {len(blocks.held_blocks)} blocks are held.",
                "Finish or abort the requests, call step() for the outputs, and hold_blocks(0).",
            )
        self._delivery.check_nothing_is_left()
        dropped = self.scheduler.residency.dropped  # workers are told with the next step
        kept = set(self._executor.known_keys()).difference(dropped)
        assert not kept, f"sequences {sorted(map(str, kept))} ended and the workers keep them"
        if self._speculator is not None:
            self._speculator.check_nothing_is_left(dropped)
        self.scheduler.check_integrity()
        counts = self.scheduler.pool_counts()
        assert counts.free + counts.cached == counts.num_blocks, f"blocks leaked: {counts}"
