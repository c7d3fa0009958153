"""Runs a workload on the embedded engine with the exact model, to hold predictions against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from preempt_engine import LLM, SamplingParams
from preempt_engine.observer import EngineObserver
from preempt_harness.admission import AdmissionModel, PredictedPreemption
from preempt_harness.workload import SamplingSpec, Workload

VOCAB_SIZE = 64


@dataclass
class ExactRun:
    """What happened: preemptions in the simulator's terms, and outputs of finished requests."""

    preemptions: list[PredictedPreemption] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class _Observer(EngineObserver):
    def __init__(self, run: ExactRun) -> None:
        self._run = run
        self._num_prompt_tokens: dict[str, int] = {}
        self.step = 0

    def arrived(self, step_id: int, request_id: str, prompt_token_ids: Any, *rest: Any) -> None:
        self._num_prompt_tokens[request_id] = len(prompt_token_ids)

    def preempted(
        self,
        step_id: int,
        request_id: str,
        *,
        num_computed_tokens: int,
        num_tokens: int,
        **rest: Any,
    ) -> None:
        num_outputs = num_tokens - self._num_prompt_tokens[request_id]
        self._run.preemptions.append(
            PredictedPreemption(self.step, request_id, num_computed_tokens, num_outputs)
        )

    def finished(self, step_id: int, request_id: str, reason: str) -> None:
        self._run.reasons[request_id] = reason


def run_exactly(workload: Workload, model: AdmissionModel, num_blocks: int) -> ExactRun:
    """Play the workload on the engine that the admission model describes."""
    assert model.policy == "full_prompt"
    assert not model.reserved_blocks
    assert not model.lookahead_tokens
    run = ExactRun()
    observer = _Observer(run)
    with LLM(
        "exact",
        num_kv_blocks=num_blocks,
        block_size=model.block_size,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_num_seqs=model.max_num_seqs,
        max_model_len=model.max_model_len,
        watermark=model.watermark,
        enable_prefix_caching=model.prefix_caching,
        exact_vocab_size=VOCAB_SIZE,
    ) as llm:
        llm.set_observer(observer)
        arrivals = sorted(workload.requests, key=lambda request: request.arrival_step)
        while arrivals or llm.has_unfinished_requests():
            while arrivals and arrivals[0].arrival_step <= observer.step:
                request = arrivals.pop(0)
                params = _sampling_params(request.sampling)
                llm.add_request(request.prompt_token_ids, params, request_id=request.id)
            for operation in workload.operations:
                if operation.step == observer.step and operation.kind == "abort":
                    llm.abort_request(operation.request)
                elif operation.step == observer.step:
                    llm.reset_prefix_cache()
            if llm.has_unfinished_requests():
                for output in llm.step():
                    if output.finished:
                        run.outputs[output.request_id] = list(output.outputs[0].token_ids)
            observer.step += 1
    return run


def _sampling_params(spec: SamplingSpec) -> SamplingParams:
    return SamplingParams(
        temperature=spec.temperature,
        seed=spec.seed,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        ignore_eos=spec.ignore_eos,
        stop_token_ids=spec.stop_token_ids,
    )
