"""A trial that is being aimed, and what several aims do to it. Draws; runs nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.explore.random_settings import drafted, takes
from preempt_harness.generators import in_order_of_arrival
from preempt_harness.plan import Action
from preempt_harness.workload import Workload

ROOM_FOR_DRAFTS = 16  # tokens of a step


class Aimed(msgspec.Struct, frozen=True, kw_only=True):
    """A trial in the making.

    Attributes:
        settings, workload: of the trial.
        actions: for its plan, besides those that are drawn anyway.
        num_spare_blocks: by so many the pool is larger than it would be.
        is_quiet: nothing is planned besides `actions`.
    """

    settings: EngineSettings
    workload: Workload
    actions: tuple[Action, ...] = ()
    num_spare_blocks: int = 0
    is_quiet: bool = False


def with_company(workload: Workload, num_requests: int) -> Workload:
    """So many requests at least; those that are added have the others' prompts from behind."""
    requests = list(workload.requests)
    for index in range(len(requests), num_requests):
        like = requests[index - len(workload.requests)]
        prompt = [*reversed(like.prompt_token_ids)]
        requests.append(msgspec.structs.replace(like, id=f"r{index}", prompt_token_ids=prompt))
    return msgspec.structs.replace(workload, requests=in_order_of_arrival(requests))


def with_drafts_of(
    source: random.Random,
    settings: EngineSettings,
    adapter: EngineAdapter,
    *,
    rates: Sequence[float],
    counts: Sequence[int] = (1, 2, 3, 5),
) -> EngineSettings:
    """Tokens drafted ahead; of random text there is nothing to look up."""
    methods = ("draft_model", "scripted")
    return drafted(source, settings, adapter, methods=methods, counts=counts, rates=rates)


def equals(workload: Workload) -> Workload:
    """Nobody is more urgent than others: priorities do not go with steps ahead."""
    return Workload(
        requests=[msgspec.structs.replace(request, priority=0) for request in workload.requests],
        operations=[item for item in workload.operations if item.kind != "set_priority"],
    )


def small_blocks(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    sizes = sorted(adapter.block_sizes or (1, 2, 3, 4))[:3]
    return msgspec.structs.replace(settings, block_size=source.choice(sizes))


def ahead(
    source: random.Random,
    settings: EngineSettings,
    adapter: EngineAdapter,
    *,
    depths: Sequence[int] = (1, 2, 2),
) -> EngineSettings:
    """Steps are decided ahead if the engine can, mostly with drafts, for which there is room."""
    depth = source.choice(depths)
    budget = max(ROOM_FOR_DRAFTS, settings.max_num_batched_tokens)
    settings = msgspec.structs.replace(settings, max_num_batched_tokens=budget)
    if protocol.ASYNC_SCHEDULING in adapter.capabilities and takes(adapter, settings, None, depth):
        settings = msgspec.structs.replace(
            settings, speculative_config=None, async_scheduling=depth
        )
    if source.random() < 0.2:
        return settings
    return with_drafts_of(source, settings, adapter, counts=(2, 5, 8), rates=(0.7, 0.9, 1.0))


def ending_beside_boundaries(
    source: random.Random, workload: Workload, block_size: int
) -> Workload:
    """Requests end with a block, or a token or two in the next; some go on for longer."""
    requests = []
    for request in workload.requests:
        total = request.num_prompt_tokens + source.randint(0, 3 * block_size)
        total += source.choice((0, 0, source.randint(2, 10) * block_size))
        total = (total // block_size + 1) * block_size + source.choice((0, 1, 1, 2))
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=total - request.num_prompt_tokens, min_tokens=0
        )
        requests.append(msgspec.structs.replace(request, sampling=sampling))
    return msgspec.structs.replace(workload, requests=requests)


def horizon(workload: Workload) -> int:
    """A step about which the workload's longest output ends, if it has what it needs."""
    return 4 + max(request.sampling.max_tokens for request in workload.requests)


def with_option(
    settings: EngineSettings, adapter: EngineAdapter, capability: str, name: str, value: Any
) -> EngineSettings:
    if capability not in adapter.capabilities:
        return settings
    return msgspec.structs.replace(settings, options={**settings.options, name: value})
