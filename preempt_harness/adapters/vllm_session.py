"""A session on vLLM's own scheduler; what stands for its model runner holds the exact KV model.

Steps follow the engine core: one at a time, or with asynchronous scheduling a queue in which one
step is scheduled before the previous one's output is known.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from preempt_harness import record
from preempt_harness.adapters.exact_workers import END_TOKEN_ID, VOCAB_SIZE, ExactWorkers
from preempt_harness.adapters.protocol import EngineSettings, SessionInfo
from preempt_harness.adapters.scheduler_log import OBSERVED, Log
from preempt_harness.adapters.scheduler_loop import SchedulerSession
from preempt_harness.adapters.vllm_drafts import make_proposer, num_drafts_of
from preempt_harness.adapters.vllm_engine import (
    block_hasher,
    make_config,
    make_request,
    make_scheduler,
    vllm,
)
from preempt_harness.adapters.vllm_runner import Launched, ModelRunner
from preempt_harness.adapters.vllm_watch import SchedulerWatch
from preempt_harness.record import AnyEvent, RequestResult
from preempt_harness.workload import RequestSpec


class VllmSession(SchedulerSession):
    """One scheduler of vLLM, one step of the engine core a poll.

    Args:
        settings: what the trial asks for; there are no options.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if settings.options:
            raise ValueError(f"{', '.join(sorted(settings.options))}: no such option, of none")
        # No request may outgrow the pool; its last token is never computed, and needs no slot.
        room = (settings.num_blocks - 1) * settings.block_size + 1
        self._max_model_len = min(settings.max_model_len or room, room)
        self._config = make_config(settings, self._max_model_len)
        self._queue_size = self._config.max_concurrent_batches
        self._scheduler: Any = make_scheduler(self._config, settings)
        self._hasher = block_hasher(settings.block_size)
        num_drafts = num_drafts_of(settings.speculative_config)
        proposer = make_proposer(settings.speculative_config, settings.seed)
        self._runner = ModelRunner(settings.block_size, num_drafts, proposer)
        self._workers = ExactWorkers(settings.num_blocks, settings.block_size)
        limits = self._config.scheduler_config
        super().__init__(Log(limits.max_num_batched_tokens, settings.block_size))
        self._watch = SchedulerWatch(self._scheduler, self._log)
        self._requests: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._num_cached: dict[str, int] = {}  # by the engine's own word, with the first output
        self._in_flight: deque[tuple[int, Launched]] = deque()
        self._drafts_wait = num_drafts > 0 and not settings.async_scheduling
        self._forced: set[str] = set()
        self._admits = True  # in the next step
        self.info = SessionInfo(
            config={
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_num_seqs": limits.max_num_seqs,
                "max_model_len": self._max_model_len,
                "reserved_blocks": 1,
                "enable_prefix_caching": settings.enable_prefix_caching,
                "scheduling_policy": settings.scheduling_policy,
                "watermark": settings.watermark,
                "async_scheduling": settings.async_scheduling,
                "speculative_config": settings.speculative_config,
                "num_speculative_tokens": num_drafts,
            },
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[END_TOKEN_ID],
            versions={"python": platform.python_version(), "vllm": version("vllm")},
            observed=[*OBSERVED, "CacheReset", "Counters"],
            batch_invariant=True,
            max_total_tokens=self._max_model_len,
        )

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
        made = make_request(request, len(self._requests), self._hasher)
        self._requests[request.id] = made
        self._scheduler.add_request(made)

    def results(self) -> dict[str, RequestResult]:
        """The engine's own outputs."""
        results = self._log.results(
            lambda name: (
                list(self._requests[name].output_token_ids) if name in self._requests else []
            )
        )
        for name, request in self._requests.items():
            results[name] = msgspec.structs.replace(
                results[name],
                num_cached_tokens=self._num_cached.get(name),
                num_preemptions=request.num_preemptions,
            )
        for name, why in self._refused.items():
            results[name] = RequestResult(outputs=[], finished=True, error=why)
        return results

    def close(self) -> Sequence[AnyEvent]:
        """What was recorded since the last poll, and the final state of the pool."""
        events = super().close()
        self._scheduler.shutdown()
        return events

    # What the capabilities promise --------------------------------------------------------------

    def abort(self, request: str) -> None:
        """Abort now; whoever has ended, or not arrived, is not concerned."""
        track = self._log.tracks.get(request)
        if track is None or track.finish_reason:
            return
        status = vllm().RequestStatus.FINISHED_ABORTED
        self._log.aborted(request)
        self._scheduler.finish_requests(request, status)

    def preempt(self, request: str, mode: str) -> None:
        """Preempt before the next step, by the scheduler's own method."""
        self._forced.add(request)

    def hold_blocks(self, num_blocks: int) -> int:
        """Take free blocks from the pool, or give them back."""
        return self._watch.hold_blocks(num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forget cached content; vLLM declines while blocks are in use."""
        if self._scheduler.reset_prefix_cache():
            self._log.cache_reset(running=False)

    def reset_running_requests(self) -> None:
        """Preempt all that run, then forget cached content. Held blocks would forbid it."""
        held = self._watch.num_held
        self.hold_blocks(0)
        self._watch.reason = "forced"
        if self._scheduler.reset_prefix_cache(reset_running_requests=True):
            self._log.cache_reset(running=True)
        self._watch.reason = "out_of_blocks"
        self.hold_blocks(held)

    # A step -------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One step of the engine core."""
        self._force()
        if self._scheduler.has_requests():
            self._launch()
        executed = bool(self._in_flight) and bool(self._in_flight[-1][1].rows)
        more = executed or self._scheduler.has_requests()
        if self._in_flight and not (len(self._in_flight) < self._queue_size and more):
            self._finish(*self._in_flight.popleft())

    def _force(self) -> None:
        """Preempt those that were asked for, the last admitted first, as a reset does.

        The scheduler admits nobody in a step in which it preempts. Here that matters where output
        is in flight: until it is there the victim cannot come back, and others would overtake it.
        """
        self._watch.reason = "forced"
        self._admits = True
        for request in reversed(list(self._scheduler.running)):
            if request.request_id in self._forced:
                self._scheduler.running.remove(request)
                self._scheduler._preempt_request(request, time.monotonic())
                self._admits = not request.num_stale_output_tokens and self._admits
        self._forced.clear()
        self._watch.reason = "out_of_blocks"

    def _launch(self) -> None:
        """Schedule a step and compute it; what it gave stays in the queue."""
        step, log = self._log.step, self._log
        if not self._admits:
            self._scheduler.set_pause_state(vllm().PauseState.PAUSED_NEW)
        output = self._scheduler.schedule()
        self._scheduler.set_pause_state(vllm().PauseState.UNPAUSED)
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
            greedy = self._workers.compute(step, [launched.rows], log.add)
            self._runner.take_tokens(launched, greedy)
            log.add(record.StepDone(step))
        self._in_flight.append((step, launched))

    def _late_rejections(self, name: str) -> int:
        """Drafts of a request that were rejected, and the scheduler has not heard of it."""
        return sum(
            launched.rejected.get(name, 0)
            for step, launched in self._in_flight
            if step >= self._watch.counted_from.get(name, 0)
        )

    def _finish(self, step: int, launched: Launched) -> None:
        """Give the oldest step's output to the scheduler, and its outputs to the user."""
        log = self._log
        now, log.step = log.step, step
        earlier = log.take()
        names = list(launched.sampled)
        outputs = self._scheduler.update_from_output(
            launched.output,
            vllm().ModelRunnerOutput(
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
            self._watch.count(group.scheduler_stats)
            for output in group.outputs:
                log.delivered(output.request_id, output.new_token_ids)
                if output.prefill_stats is not None:
                    self._num_cached[output.request_id] = output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    ends.append((output.request_id, str(output.finish_reason)))
        for event in freed:
            log.add(event)
        for name, reason in ends:
            log.finished(name, reason)
        log.step = now
        if self._drafts_wait and launched.rows:
            drafts = self._runner.drafts(launched)
            made = vllm().DraftTokenIds(list(drafts), list(drafts.values()))
            self._scheduler.update_draft_token_ids(made)

    def _record_pool(self) -> None:
        self._watch.record_pool()
