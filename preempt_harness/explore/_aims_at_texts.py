"""Aims at text that several requests have. No engine runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.explore._aimed import Aimed, equals, horizon, small_blocks, with_company
from preempt_harness.explore.random_settings import takes
from preempt_harness.generators import in_order_of_arrival
from preempt_harness.plan import OutputTokens, Preempt, Step
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload


def old_content(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Somebody loses its blocks about when the cache is reset; others come with its text.

    Some of those split into branches, lose their blocks with what they have written, and come back.
    """
    settings = msgspec.structs.replace(trial.settings, enable_prefix_caching=True)
    requests = with_company(trial.workload, source.randint(2, 4)).requests
    text = _long_text(source, requests, 2 * settings.block_size)
    reset = source.randint(2, 8)
    changed = []
    for index, request in enumerate(requests):
        arrival = 0 if index == 0 else reset + source.randint(0, 10)
        if index == 0 or source.random() < 0.7:
            end = request.prompt_token_ids[: source.randrange(2)]
            request = msgspec.structs.replace(request, prompt_token_ids=[*text, *end])
        length = request.sampling.max_tokens + (2 * reset if index == 0 else 0)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=length)
        changed.append(msgspec.structs.replace(request, arrival_step=arrival, sampling=sampling))
    requests = in_order_of_arrival(changed)
    kept = [item for item in trial.workload.operations if not item.kind.startswith("reset")]
    modes: list[Literal["recompute", "swap"]] = ["recompute"]
    if protocol.SWAP in adapter.capabilities:
        modes += ["swap", "swap"]
    steps = {max(1, reset + source.randint(-2, 2)) for _ in range(source.choice((1, 1, 2)))}
    aimed = Aimed(
        settings=settings,
        workload=Workload(
            requests=requests, operations=[*kept, Operation(kind="reset_prefix_cache", step=reset)]
        ),
        actions=tuple(Preempt("r0", Step(step), source.choice(modes)) for step in sorted(steps)),
        num_spare_blocks=source.choice((0, 4, 16)),
    )
    able = {protocol.PARALLEL_SAMPLING, protocol.SAMPLING, protocol.RECOMPUTE}
    if able <= adapter.capabilities and source.random() < 0.4:
        return _with_branches(source, aimed)
    return aimed


def _with_branches(source: random.Random, aimed: Aimed) -> Aimed:
    """All but the first have several outputs, and are preempted when those are some blocks long."""
    block_size = aimed.settings.block_size
    requests, actions = [], list(aimed.actions)
    for request in aimed.workload.requests:
        if request.id != "r0":
            length = source.randint(1, 2) * block_size + source.randint(1, 4)
            sampling = SamplingSpec(
                max_tokens=length + source.randint(2, 8), temperature=1.0, n=source.choice((2, 3))
            )
            request = msgspec.structs.replace(request, sampling=sampling)
            actions.append(Preempt(request.id, OutputTokens(length), "recompute"))
        requests.append(request)
    return msgspec.structs.replace(
        aimed,
        workload=msgspec.structs.replace(aimed.workload, requests=requests),
        actions=tuple(actions),
        num_spare_blocks=source.choice((4, 16, 32)),
    )


def same_text(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Several compute one long prompt, chunk by chunk, and some want what is said of its tokens."""
    settings = msgspec.structs.replace(
        trial.settings,
        enable_prefix_caching=True,
        max_num_batched_tokens=source.choice((3, 7, 16)),
        max_num_seqs=max(4, trial.settings.max_num_seqs),
    )
    requests = with_company(trial.workload, source.randint(2, 3)).requests
    length = max(3 * settings.max_num_batched_tokens, 3 * settings.block_size)
    text = _long_text(source, requests, length)
    changed, actions = [], []
    for index, request in enumerate(requests):
        arrival = index * source.randint(0, 6)
        cut = len(text) - source.choice((0, 0, 1, settings.block_size))
        sampling = request.sampling
        wants_rows = protocol.PROMPT_LOGPROBS in adapter.capabilities and sampling.beam is None
        if index and wants_rows and source.random() < 0.7:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=source.choice((0, 1)))
        changed.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=text[: max(1, cut)],
                arrival_step=arrival,
                sampling=sampling,
            )
        )
    requests = in_order_of_arrival(changed)
    for request in requests[1:]:
        step = request.arrival_step + source.randint(1, 6)
        actions.append(Preempt(request.id, Step(step), "recompute"))
    return Aimed(
        settings=settings,
        workload=Workload(requests=requests, operations=trial.workload.operations),
        actions=tuple(actions),
        num_spare_blocks=source.choice((0, 4, 16)),
    )


def begun_alike(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Requests that begin with one text, more and less urgent or decided ahead, in little room.

    Those that are decided ahead often wait for places, so that they come right when others end.
    """
    settings = msgspec.structs.replace(
        trial.settings,
        enable_prefix_caching=True,
        speculative_config=None,
        async_scheduling=0,
        max_num_seqs=source.choice((2, 4, 8)),
    )
    workload = equals(with_company(trial.workload, source.randint(3, 5)))
    depth = source.choice((0, 0, 1, 2))
    able = protocol.ASYNC_SCHEDULING in adapter.capabilities
    if depth and able and takes(adapter, settings, None, depth):
        settings = msgspec.structs.replace(
            settings, async_scheduling=depth, max_num_seqs=source.choice((1, 2, 2, 4))
        )
    may_be_urgent = not settings.async_scheduling and protocol.PRIORITY in adapter.capabilities
    may_branch = {protocol.PARALLEL_SAMPLING, protocol.SAMPLING} <= adapter.capabilities
    size = settings.block_size
    text = _long_text(source, workload.requests, source.randint(1, 4) * size)
    requests = []
    for index, request in enumerate(workload.requests):
        length = request.sampling.max_tokens + source.randint(0, 2) * size
        sampling = SamplingSpec(max_tokens=length)
        if may_branch and settings.max_num_seqs > 1 and source.random() < 0.3:
            count = source.randint(2, min(3, settings.max_num_seqs))
            sampling = SamplingSpec(max_tokens=length, temperature=1.0, n=count)
        requests.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=[*text, *request.prompt_token_ids[: source.randint(0, 2 * size)]],
                arrival_step=0 if index < 2 else source.randint(0, horizon(workload)),
                priority=source.randint(0, 2) if may_be_urgent else 0,
                sampling=sampling,
            )
        )
    return Aimed(
        settings=settings,
        workload=msgspec.structs.replace(workload, requests=in_order_of_arrival(requests)),
        num_spare_blocks=source.choice((0, 1, 2, 4, 8)),
    )


def alike_below(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Urgent ones come with the text of less urgent ones, which have little else to give up, while
    others that are as urgent keep what they have, in about as much room as there was before."""
    settings = small_blocks(source, trial.settings, adapter)
    settings = msgspec.structs.replace(
        settings,
        enable_prefix_caching=True,
        speculative_config=None,
        async_scheduling=0,
        max_num_seqs=max(8, settings.max_num_seqs),
        max_num_batched_tokens=max(64, settings.max_num_batched_tokens),
    )
    size = settings.block_size
    requests = with_company(trial.workload, source.randint(4, 6)).requests
    num_keepers = source.randint(1, 2)
    num_calm = source.randint(1, len(requests) - num_keepers - 1)
    step = source.randint(2, 4 * size)
    text = _long_text(source, requests, source.randint(2, 5) * size)
    changed, in_use = [], len(text) // size
    for index, request in enumerate(requests):
        keeps, comes_first = index < num_keepers, index < num_keepers + num_calm
        prompt = request.prompt_token_ids
        if not keeps:
            own = source.randint(0, 1) if comes_first else source.randint(1, 3 * size)
            prompt = [*text, *prompt[:own]]
        arrival = source.randint(0, step - 1) if comes_first else step + source.randint(0, size)
        if keeps:
            arrival = 0
        if comes_first:
            in_use += (step - arrival) // size + 1 + (len(prompt) // size if keeps else 0)
        length = (step if comes_first else 0) + source.randint(1, 3 * size)
        changed.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=prompt,
                arrival_step=arrival,
                priority=source.randint(1, 2) if comes_first and not keeps else 0,
                sampling=SamplingSpec(max_tokens=length),
            )
        )
    longest = max((item.num_prompt_tokens + item.sampling.max_tokens) // size for item in changed)
    return Aimed(
        settings=settings,
        workload=Workload(requests=in_order_of_arrival(changed)),
        num_spare_blocks=max(0, in_use - longest - source.randint(1, 5)),
        is_quiet=source.random() < 0.7,
    )


def sharers(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """One with several outputs, which all begin a block at once, between an elder, which goes on,
    and somebody who shares its prompt and has little else to give up."""
    settings = msgspec.structs.replace(
        trial.settings,
        enable_prefix_caching=True,
        speculative_config=None,
        async_scheduling=0,
        block_size=source.choice(sorted(adapter.block_sizes or (2, 3, 4))[:3]),
        max_num_seqs=max(8, trial.settings.max_num_seqs),
        max_num_batched_tokens=max(16, trial.settings.max_num_batched_tokens),
    )
    size = settings.block_size
    elder, needy, *others = with_company(trial.workload, source.choice((3, 3, 4))).requests
    text = _long_text(source, [needy], source.randint(1, 3) * size)
    length = source.randint(1, 3) * size + source.randint(1, 2)
    grown = SamplingSpec(max_tokens=length + source.randint(0, size))
    several = SamplingSpec(max_tokens=length, temperature=1.0, n=source.randint(2, 3))
    requests = [
        msgspec.structs.replace(elder, arrival_step=0, sampling=grown),
        msgspec.structs.replace(needy, prompt_token_ids=text, arrival_step=0, sampling=several),
    ]
    for other in others:
        own = other.prompt_token_ids[: source.randint(1, size)]
        requests.append(
            msgspec.structs.replace(
                other,
                prompt_token_ids=[*text, *own],
                arrival_step=source.randint(1, length),
                sampling=SamplingSpec(max_tokens=source.randint(1, 2 * size)),
            )
        )
    return Aimed(
        settings=settings,
        workload=equals(Workload(requests=requests)),
        num_spare_blocks=source.randint(0, (elder.num_prompt_tokens + length) // size),
        is_quiet=source.random() < 0.7,
    )


def _long_text(source: random.Random, requests: Sequence[RequestSpec], least: int) -> list[int]:
    """A text of at least so many tokens, made of the prompts."""
    text = [token_id for request in requests for token_id in request.prompt_token_ids]
    while len(text) < least:
        text += text
    return text[: least + source.randint(0, 3)]
