"""Aims at blocks, swap space and places that are scarce. No engine runs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.explore._aimed import (
    ROOM_FOR_DRAFTS,
    Aimed,
    ahead,
    ending_beside_boundaries,
    equals,
    horizon,
    small_blocks,
    with_company,
    with_option,
)
from preempt_harness.generators import in_order_of_arrival
from preempt_harness.plan import Preempt, PreemptAll, Squeeze, Step
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload


def ends(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Requests that end one by one beside block boundaries, while steps are decided ahead."""
    settings = ahead(source, small_blocks(source, trial.settings, adapter), adapter)
    settings = with_option(settings, adapter, protocol.POISON, "poison", True)
    order = source.choice(("lifo", "lifo", "random", "fifo"))
    name = protocol.BLOCK_REUSE_ORDER
    settings = with_option(settings, adapter, name, "block_reuse_order", order)
    settings = msgspec.structs.replace(
        settings,
        enable_prefix_caching=settings.enable_prefix_caching and source.random() < 0.5,
        max_num_seqs=max(4, settings.max_num_seqs),
    )
    workload = with_company(equals(trial.workload), source.randint(3, 8))
    workload = ending_beside_boundaries(source, workload, settings.block_size)
    tokens = sum(
        request.num_prompt_tokens + request.sampling.max_tokens for request in workload.requests
    )
    return Aimed(
        settings=settings,
        workload=workload,
        num_spare_blocks=tokens // settings.block_size // source.choice((1, 2, 4)),
    )


def want(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """One request or two, decided ahead, that get no block for long."""
    settings = ahead(source, small_blocks(source, trial.settings, adapter), adapter)
    requests = trial.workload.requests[: source.choice((1, 1, 2))]
    names = {request.id for request in requests}
    operations = [item for item in trial.workload.operations if item.request in ("", *names)]
    workload = equals(Workload(requests=requests, operations=operations))
    start = source.randint(0, 4)
    return Aimed(
        settings=settings,
        workload=ending_beside_boundaries(source, workload, settings.block_size),
        actions=(Squeeze("all", start, start + source.randint(8, 40)),),
    )


def both_ways(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """More and less urgent requests swapped out and in, with swap space for few blocks.

    Where there are priorities, some of those who are out, or about to come in, get another.
    """
    workload = with_company(trial.workload, source.randint(4, 6))
    settings = trial.settings
    if source.random() < 0.5:  # those who stay begin a block in most steps
        settings = small_blocks(source, settings, adapter)
    size = settings.block_size
    if protocol.PRIORITY in adapter.capabilities:
        workload = _calm_and_urgent(source, workload, size)
    blocks = sorted(
        (request.num_prompt_tokens + request.sampling.max_tokens // 2) // size + 1
        for request in workload.requests
    )
    settings = msgspec.structs.replace(
        settings,
        max_num_seqs=max(4, settings.max_num_seqs),
        options={
            **settings.options,
            "preemption_mode": "swap",
            "swap_space_blocks": source.randint(blocks[0], blocks[-2] + blocks[-1]),
        },
    )
    actions = tuple(_out_when_others_come(source, workload.requests))
    if {protocol.PRIORITY, protocol.SET_PRIORITY} <= adapter.capabilities:
        operations = [*workload.operations, *_changed_while_out(source, actions)]
        workload = msgspec.structs.replace(workload, operations=operations)
    return Aimed(settings=settings, workload=workload, actions=actions)


def all_out(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Everybody swapped out at once, for which there is swap space or not, and newcomers.

    Often they begin with one text, so that what one gives up another has still, or is copied.
    """
    workload = with_company(equals(trial.workload), source.randint(3, 6))
    settings = trial.settings
    size = settings.block_size
    if protocol.PREFIX_CACHING in adapter.capabilities and source.random() < 0.5:
        settings = msgspec.structs.replace(settings, enable_prefix_caching=True)
        workload = _with_one_beginning(source, workload, size)
    step = source.randint(2, 2 + horizon(workload) // 2)
    requests, blocks = [], []
    for request in workload.requests:
        arrival = step + source.randint(-1, 3) if source.random() < 0.3 else source.randint(0, 2)
        more = source.randint(1, 3) * size
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=request.sampling.max_tokens + more
        )
        requests.append(msgspec.structs.replace(request, arrival_step=arrival, sampling=sampling))
        blocks.append((request.num_prompt_tokens + step) // size + 1)
    settings = msgspec.structs.replace(
        settings,
        max_num_seqs=max(4, settings.max_num_seqs),
        max_num_batched_tokens=max(ROOM_FOR_DRAFTS, settings.max_num_batched_tokens),
        options={
            **settings.options,
            "preemption_mode": "swap",
            "swap_space_blocks": source.randint(min(blocks), sum(blocks)),
        },
    )
    return Aimed(
        settings=settings,
        workload=msgspec.structs.replace(workload, requests=in_order_of_arrival(requests)),
        actions=(PreemptAll(Step(step), "swap"),),
        num_spare_blocks=sum(blocks) // source.choice((1, 2, 4)),
    )


def crowd(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Many short requests that grow at once, in a pool for some of them, and some are given up."""
    settings = small_blocks(source, trial.settings, adapter)
    settings = msgspec.structs.replace(
        settings,
        max_num_seqs=source.choice((2, 3, 8, 8)),
        max_num_batched_tokens=max(64, settings.max_num_batched_tokens),
    )
    size = settings.block_size
    workload = with_company(trial.workload, source.randint(5, 8))
    most = 2 if protocol.PRIORITY in adapter.capabilities else 0
    requests = []
    for request in workload.requests:
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=source.randint(1, 6) * size + 1, min_tokens=0
        )
        requests.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=request.prompt_token_ids[: source.randint(1, 2 * size + 1)],
                arrival_step=source.randint(0, 4),
                priority=source.randint(0, most),
                sampling=sampling,
            )
        )
    workload = Workload(requests=in_order_of_arrival(requests))
    if protocol.ABORT in adapter.capabilities:
        given_up = source.sample([request.id for request in requests], source.randint(0, 3))
        steps = 4 + 2 * horizon(workload)
        workload.operations.extend(
            Operation(kind="abort", step=source.randint(2, steps), request=name)
            for name in given_up
        )
    blocks = sum((item.num_prompt_tokens + item.sampling.max_tokens) // size for item in requests)
    return Aimed(
        settings=settings,
        workload=workload,
        num_spare_blocks=blocks // source.choice((2, 3, 4, 8)),
    )


def urgent(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Urgent requests come one by one while others grow, in a pool that is all but full.

    Who makes room for them is copied to the host if the engine can, and the others grow meanwhile.
    """
    settings = small_blocks(source, trial.settings, adapter)
    settings = msgspec.structs.replace(settings, max_num_seqs=max(8, settings.max_num_seqs))
    if source.random() < 0.8:
        settings = with_option(settings, adapter, protocol.SWAP, "preemption_mode", "swap")
        settings = msgspec.structs.replace(
            settings,
            options={k: v for k, v in settings.options.items() if k != "swap_space_blocks"},
        )
    size = settings.block_size
    workload = with_company(trial.workload, source.randint(4, 6))
    num_calm = source.randint(2, 4)
    requests, blocks = [], 0
    for index, request in enumerate(workload.requests):
        is_calm = index < num_calm
        prompt = request.prompt_token_ids[: source.randint(1, 3 * size)]
        length = source.randint(1, 4 if is_calm else 2) * size + source.randint(1, 4)
        requests.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=prompt,
                arrival_step=0 if is_calm else source.randint(1, 3 * size),
                priority=1 if is_calm else 0,
                sampling=SamplingSpec(max_tokens=length),
            )
        )
        blocks += (len(prompt) + length) // size if is_calm else 0
    return Aimed(
        settings=settings,
        workload=Workload(requests=in_order_of_arrival(requests)),
        num_spare_blocks=blocks // source.choice((2, 3, 4)),
        is_quiet=source.random() < 0.7,
    )


def _with_one_beginning(source: random.Random, workload: Workload, block_size: int) -> Workload:
    """Most begin with the first one's prompt, or with some blocks of it."""
    text = workload.requests[0].prompt_token_ids
    requests = []
    for request in workload.requests:
        prompt = request.prompt_token_ids
        if source.random() < 0.7:
            prompt = [*text, *prompt[: source.randint(0, block_size + 1)]]
        requests.append(msgspec.structs.replace(request, prompt_token_ids=prompt))
    return msgspec.structs.replace(workload, requests=requests)


def _calm_and_urgent(source: random.Random, workload: Workload, block_size: int) -> Workload:
    """Some have time, come first and stay long; others are urgent and come meanwhile."""
    horizon = 4 + max(request.sampling.max_tokens for request in workload.requests) // 2
    requests = []
    for request in workload.requests:
        arrival, priority, more = 0, 2, source.randint(1, 4) * block_size
        if source.random() < 0.6:
            arrival, priority, more = source.randint(0, horizon), source.randrange(2), block_size
        length = request.sampling.max_tokens + more
        sampling = msgspec.structs.replace(request.sampling, max_tokens=length)
        requests.append(
            msgspec.structs.replace(
                request, arrival_step=arrival, priority=priority, sampling=sampling
            )
        )
    return msgspec.structs.replace(workload, requests=in_order_of_arrival(requests))


def _changed_while_out(source: random.Random, actions: Iterable[Preempt]) -> Iterable[Operation]:
    """Some victims are given another priority soon after they were swapped out."""
    for action in actions:
        if source.random() < 0.3:
            assert isinstance(action.at, Step)
            step = action.at.number + source.randint(1, 3)
            priority = source.randrange(3)
            yield Operation(
                kind="set_priority", step=step, request=action.request, priority=priority
            )


def _out_when_others_come(
    source: random.Random, requests: Sequence[RequestSpec]
) -> Iterable[Preempt]:
    """Who is at least as urgent as a later request is swapped out about when that one comes."""
    for index, request in enumerate(requests):
        before = [other for other in requests[:index] if other.priority <= request.priority]
        if request.arrival_step and before:
            victim = source.choice(before)
            step = max(
                victim.arrival_step + 1, request.arrival_step + source.choice((-1, -1, 0, 0, 1))
            )
            yield Preempt(victim.id, Step(step), "swap")
