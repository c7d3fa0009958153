"""Aims at drafts, and at blocks that are copied and swapped beside them. No engine runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.explore._aimed import Aimed, ahead, equals, horizon
from preempt_harness.explore.random_settings import drafted
from preempt_harness.generators import FIRST_ORDINARY_ID, in_order_of_arrival
from preempt_harness.plan import Mode, Preempt, Step
from preempt_harness.workload import BeamSpec, RequestSpec, SamplingSpec, Workload

_ENDING_APART = {protocol.PARALLEL_SAMPLING, protocol.SAMPLING, protocol.STOP_TOKENS}
_SPLIT = 4  # by this step beams have split
_ENDED_APART = 12  # by this step most of their outputs have ended


def own_drafts(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """The target drafts for itself, while blocks are copied, swapped and computed anew."""
    settings = msgspec.structs.replace(
        trial.settings,
        async_scheduling=0,
        tensor_parallel_size=1,
        max_num_seqs=max(4, trial.settings.max_num_seqs),
    )
    settings = drafted(
        source, settings, adapter, methods=("draft_model",), counts=(1, 2, 3, 5), rates=(1.0,)
    )
    requests = []
    branches = {protocol.PARALLEL_SAMPLING, protocol.SAMPLING} <= adapter.capabilities
    for request in trial.workload.requests[:3]:
        most = request.sampling.max_tokens + settings.block_size
        sampling = SamplingSpec(max_tokens=most)
        if branches and source.random() < 0.6:
            count = source.choice((2, 2, 3))
            sampling = SamplingSpec(max_tokens=most, temperature=1.0, n=count)
        prompt = request.prompt_token_ids
        if len(prompt) % settings.block_size == 0 and len(prompt) > 1:
            prompt = prompt[:-1]  # branches share a block that each of them goes on writing
        requests.append(
            msgspec.structs.replace(request, prompt_token_ids=prompt, sampling=sampling)
        )
    return _moved(source, settings, equals(Workload(requests=requests)), adapter)


def under_way(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Requests that are swapped out while drafts of theirs, or ends of outputs, are under way."""
    settings = ahead(source, trial.settings, adapter, depths=(1, 1, 1, 2))
    ends_apart = adapter.capabilities >= _ENDING_APART and source.random() < 0.6
    requests = []
    for request in trial.workload.requests[:4]:
        more = source.randint(1, 3) * settings.block_size
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=request.sampling.max_tokens + more
        )
        if ends_apart:
            sampling = _ending_apart(source, sampling.max_tokens, adapter.vocab_size(settings))
            if protocol.MIN_TOKENS in adapter.capabilities and source.random() < 0.5:
                least = source.randint(1, sampling.max_tokens)
                sampling = msgspec.structs.replace(sampling, min_tokens=least)
        elif protocol.BEAM_SEARCH in adapter.capabilities and source.random() < 0.3:
            beam = BeamSpec(num_beams=source.randint(2, 3))
            sampling = SamplingSpec(max_tokens=sampling.max_tokens, beam=beam)
        requests.append(msgspec.structs.replace(request, sampling=sampling))
    workload = equals(Workload(requests=requests))
    if not ends_apart:
        splitting = [request for request in requests if request.sampling.beam is not None]
        if splitting and source.random() < 0.7:
            return _moved(source, settings, workload, adapter, last=_SPLIT, victims=splitting)
        return _moved(source, settings, workload, adapter)
    settings = msgspec.structs.replace(settings, max_num_seqs=max(8, settings.max_num_seqs))
    return _moved(source, settings, workload, adapter, most=6, last=_ENDED_APART)


def half_back(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Requests lose their blocks, and again before they have computed all anew, in another mode.

    They come back in chunks, with several outputs which have their beginning in common.
    """
    size = trial.settings.block_size
    workload = equals(Workload(requests=trial.workload.requests[: source.choice((1, 2, 2, 3))]))
    settings = msgspec.structs.replace(
        trial.settings,
        enable_prefix_caching=trial.settings.enable_prefix_caching and source.random() < 0.5,
        speculative_config=None,
        max_num_batched_tokens=source.randint(2, 2 * size + 4),
        max_num_seqs=max(6, trial.settings.max_num_seqs),
        options={k: v for k, v in trial.settings.options.items() if k != "swap_space_blocks"},
    )
    may_branch = {protocol.PARALLEL_SAMPLING, protocol.SAMPLING} <= adapter.capabilities
    modes: list[Mode] = [mode for mode in ("recompute", "swap") if mode in adapter.capabilities]
    requests, actions, num_blocks = [], [], 0
    for request in workload.requests:
        text = list(islice(cycle(request.prompt_token_ids), source.randint(1, 4 * size + 3)))
        sampling = SamplingSpec(max_tokens=source.randint(2, 3 * size + 4))
        if may_branch and source.random() < 0.7:
            count = source.choice((2, 2, 3))
            sampling = msgspec.structs.replace(sampling, temperature=1.0, n=count)
        num_chunks = len(text) // settings.max_num_batched_tokens + 1
        step = num_chunks + source.randint(1, 2 * size)
        for mode in source.sample(modes, len(modes)) * source.choice((1, 1, 2)):
            actions.append(Preempt(request.id, Step(step), mode))
            step += source.randint(1, 3 + num_chunks)
        requests.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=text,
                arrival_step=source.randint(0, 1),
                sampling=sampling,
            )
        )
        num_blocks += (len(text) + sampling.n * sampling.max_tokens) // size
    return Aimed(
        settings=settings,
        workload=Workload(requests=in_order_of_arrival(requests)),
        actions=tuple(actions),
        num_spare_blocks=num_blocks // source.choice((1, 2, 4)),
        is_quiet=True,
    )


def _ending_apart(source: random.Random, max_tokens: int, vocab_size: int) -> SamplingSpec:
    """Several outputs, each of which ends by itself: about one token in eight is a last one."""
    ordinary = range(FIRST_ORDINARY_ID, vocab_size)
    return SamplingSpec(
        max_tokens=max_tokens,
        temperature=1.0,
        n=source.randint(2, 4),
        stop_token_ids=tuple(sorted(source.sample(ordinary, len(ordinary) // 8))),
    )


def _moved(
    source: random.Random,
    settings: EngineSettings,
    workload: Workload,
    adapter: EngineAdapter,
    *,
    most: int = 3,
    last: int | None = None,
    victims: Sequence[RequestSpec] = (),
) -> Aimed:
    """Requests lose their blocks now and then, mostly to the host if the engine can.

    At most so often, and by step `last`, about which the longest output ends if none is given; it
    happens to `victims`, or to anybody.
    """
    modes: list[Mode] = [
        mode for mode in ("swap", "swap", "recompute") if mode in adapter.capabilities
    ]
    if not modes:
        return Aimed(settings=settings, workload=workload)
    mode = source.choice(modes)
    if mode == "swap":
        options = {**settings.options, "preemption_mode": mode}
        options.pop("swap_space_blocks", None)
        settings = msgspec.structs.replace(settings, options=options)
    last = last or horizon(workload)
    actions = [
        Preempt(source.choice(victims or workload.requests).id, Step(source.randint(1, last)), mode)
        for _ in range(source.randint(1, most))
    ]
    return Aimed(settings=settings, workload=workload, actions=tuple(actions))
