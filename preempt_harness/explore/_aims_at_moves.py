"""Aims at drafts, and at blocks that are copied and swapped beside them. No engine runs."""

from __future__ import annotations

import random

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.explore._aimed import Aimed, ahead, equals, horizon
from preempt_harness.explore.random_settings import drafted
from preempt_harness.plan import Mode, Preempt, Step
from preempt_harness.workload import SamplingSpec, Workload


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
    """Requests that are swapped out while drafts of theirs are under way."""
    settings = ahead(source, trial.settings, adapter, depths=(1, 1, 1, 2))
    requests = []
    for request in trial.workload.requests[:4]:
        more = source.randint(1, 3) * settings.block_size
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=request.sampling.max_tokens + more
        )
        requests.append(msgspec.structs.replace(request, sampling=sampling))
    return _moved(source, settings, equals(Workload(requests=requests)), adapter)


def _moved(
    source: random.Random, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> Aimed:
    """Requests lose their blocks now and then, mostly to the host if the engine can."""
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
    last = horizon(workload)
    actions = [
        Preempt(source.choice(workload.requests).id, Step(source.randint(1, last)), mode)
        for _ in range(source.randint(1, 3))
    ]
    return Aimed(settings=settings, workload=workload, actions=tuple(actions))
