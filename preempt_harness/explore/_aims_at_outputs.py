"""Aims at outputs that are known beforehand. No engine runs."""

from __future__ import annotations

import random

import msgspec

from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, KnowsOutputs
from preempt_harness.explore._aimed import Aimed, with_company, with_drafts_of
from preempt_harness.known_outputs import is_plain, with_followers, with_limits
from preempt_harness.plan import Action, OutputTokens, Preempt
from preempt_harness.workload import SamplingSpec, Workload

_LONGEST_OUTPUT_BLOCKS = 4
_LONG_OUTPUT = 120  # tokens


def followers(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Prompts that begin with another request's text, up to a block of its outputs."""
    settings = msgspec.structs.replace(trial.settings, enable_prefix_caching=True)
    if source.random() < 0.75:
        settings = with_drafts_of(source, settings, adapter, rates=(0.0, 0.0, 0.5, 0.9))
    workload = with_company(trial.workload, 2)
    index = source.randrange(len(workload.requests))
    prompt = workload.requests[index].prompt_token_ids
    length = source.randint(1, _LONGEST_OUTPUT_BLOCKS) * settings.block_size
    output = _output(adapter, settings, prompt, length)
    if output is None:
        return trial
    workload = with_followers(
        source, workload, text=[*prompt, *output], of=index, block_size=settings.block_size
    )
    spare = len(prompt) + length if source.random() < 0.5 else 0
    return Aimed(
        settings=settings, workload=workload, num_spare_blocks=spare // settings.block_size
    )


def limits(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """min_tokens, stop tokens and max_tokens close together within outputs."""
    settings = trial.settings
    if source.random() < 0.8:
        settings = with_drafts_of(source, settings, adapter, rates=(0.5, 0.9, 1.0, 1.0))
    requests, outputs = [], {}
    for index, request in enumerate(trial.workload.requests):
        length = request.sampling.max_tokens
        if not is_plain(request.sampling) and source.random() < 0.5:
            request = msgspec.structs.replace(request, sampling=SamplingSpec(max_tokens=length))
        output = _output(adapter, settings, request.prompt_token_ids, length)
        if is_plain(request.sampling) and output is not None:
            outputs[index] = output
        requests.append(request)
    workload = msgspec.structs.replace(trial.workload, requests=requests)
    workload = with_limits(source, workload, outputs=outputs, block_size=settings.block_size)
    return Aimed(settings=settings, workload=workload)


def long_outputs(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """A token depends on outputs of long ago, and somebody loses its blocks after many of them."""
    requests = []
    actions: list[Action] = []
    for request in trial.workload.requests[:2]:
        length = source.randint(_LONG_OUTPUT // 2, _LONG_OUTPUT)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=length, min_tokens=0)
        if sampling.beam is None and source.random() < 0.8:
            sampling = msgspec.structs.replace(
                sampling, repetition_penalty=1.5, frequency_penalty=source.choice((0.0, 0.7))
            )
        at = OutputTokens(source.randint(length // 2, length - 1))
        actions.append(Preempt(request.id, at))
        requests.append(msgspec.structs.replace(request, sampling=sampling))
    return Aimed(
        settings=trial.settings, workload=Workload(requests=requests), actions=tuple(actions)
    )


def _output(
    adapter: EngineAdapter, settings: EngineSettings, prompt: list[int], length: int
) -> list[int] | None:
    assert isinstance(adapter, KnowsOutputs)
    return adapter.greedy_output(settings, prompt, length)
