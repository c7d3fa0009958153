"""Trials that aim at things which happen together. Each aim changes a drawn trial; no engine runs.

    followers    prompts that begin with another request's text, up to a block of its outputs; it
                 ends with a block, by its length or by a stop token
    limits       min_tokens, stop tokens and max_tokens close together within outputs, which drafts
                 run across
    ends         requests that end one by one, with a block or with the first token of one, while
                 steps are decided ahead and drafts take blocks
    want         one request or two, decided ahead, that get no block for long
    both ways    more and less urgent requests swapped out and in, with swap space for few blocks
    all out      everybody swapped out at once, for which there is swap space or not, and newcomers
    own drafts   the target drafts for itself, while blocks are copied, swapped and computed anew
    under way    requests swapped out while drafts of theirs are under way
    old content  a cache reset while somebody with a text that others come with later runs or waits
    same text    prompts of one text, cut into chunks, whose readers lose their blocks on the way

What an engine is not capable of is left out; an aim of which nothing would be left is not drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, KnowsOutputs
from preempt_harness.explore.random_settings import drafted, takes
from preempt_harness.generators import in_order_of_arrival
from preempt_harness.known_outputs import is_plain, with_followers, with_limits
from preempt_harness.plan import (
    Action,
    Mode,
    Preempt,
    PreemptAll,
    PreemptionPlan,
    Squeeze,
    Step,
)
from preempt_harness.workload import Operation, RequestSpec, SamplingSpec, Workload

_LONGEST_OUTPUT_BLOCKS = 4
_ROOM_FOR_DRAFTS = 16  # tokens of a step


class Aimed(msgspec.Struct, frozen=True, kw_only=True):
    """A trial in the making.

    Attributes:
        settings, workload: of the trial.
        actions: for its plan, besides those that are drawn anyway.
        num_spare_blocks: by so many the pool is larger than it would be.
    """

    settings: EngineSettings
    workload: Workload
    actions: tuple[Action, ...] = ()
    num_spare_blocks: int = 0


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """One of them.

    Attributes:
        apply: changes a trial.
        needed: capabilities without which nothing would be left of it.
        at_outputs: whether outputs must be known beforehand.
        weight: how often it is drawn, in proportion to others; more if what it is for seldom
            happens in its trials.
    """

    apply: Callable[[random.Random, Aimed, EngineAdapter], Aimed]
    needed: frozenset[str]
    at_outputs: bool = False
    weight: int = 2

    def suits(self, adapter: EngineAdapter) -> bool:
        """Whether the engine is capable of it."""
        known = isinstance(adapter, KnowsOutputs) or not self.at_outputs
        return known and self.needed <= adapter.capabilities


def aim(
    source: random.Random, trial: Aimed, adapter: EngineAdapter, *, planned: bool = True
) -> Aimed:
    """Apply one of the aims that the engine is capable of, if there is any.

    Args:
        source: of the draws.
        trial: what was drawn so far.
        adapter: of the engine.
        planned: whether the trial may have a plan.
    """
    able = [candidate for candidate in AIMS.values() if candidate.suits(adapter)]
    if not able:
        return trial
    (chosen,) = source.choices(able, [candidate.weight for candidate in able])
    aimed = chosen.apply(source, trial, adapter)
    actions = tuple(
        action
        for action in aimed.actions
        if planned and PreemptionPlan([action]).capabilities <= adapter.capabilities
    )
    return msgspec.structs.replace(aimed, actions=actions)


# Outputs that are known ---------------------------------------------------------------------------


def _followers(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    settings = msgspec.structs.replace(trial.settings, enable_prefix_caching=True)
    if source.random() < 0.75:
        settings = _drafted(source, settings, adapter, rates=(0.0, 0.0, 0.5, 0.9))
    workload = _with_company(trial.workload, 2)
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


def _limits(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    settings = trial.settings
    if source.random() < 0.8:
        settings = _drafted(source, settings, adapter, rates=(0.5, 0.9, 1.0, 1.0))
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


def _output(
    adapter: EngineAdapter, settings: EngineSettings, prompt: list[int], length: int
) -> list[int] | None:
    assert isinstance(adapter, KnowsOutputs)
    return adapter.greedy_output(settings, prompt, length)


def _with_company(workload: Workload, num_requests: int) -> Workload:
    """So many requests at least; those that are added have the others' prompts from behind."""
    requests = list(workload.requests)
    for index in range(len(requests), num_requests):
        like = requests[index - len(workload.requests)]
        prompt = [*reversed(like.prompt_token_ids)]
        requests.append(msgspec.structs.replace(like, id=f"r{index}", prompt_token_ids=prompt))
    return msgspec.structs.replace(workload, requests=in_order_of_arrival(requests))


def _drafted(
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


# Blocks that are scarce ---------------------------------------------------------------------------


def _ends(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    settings = _ahead(source, _small_blocks(source, trial.settings, adapter), adapter)
    settings = _with_option(settings, adapter, protocol.POISON, "poison", True)
    order = source.choice(("lifo", "lifo", "random", "fifo"))
    name = protocol.BLOCK_REUSE_ORDER
    settings = _with_option(settings, adapter, name, "block_reuse_order", order)
    settings = msgspec.structs.replace(
        settings,
        enable_prefix_caching=settings.enable_prefix_caching and source.random() < 0.5,
        max_num_seqs=max(4, settings.max_num_seqs),
    )
    workload = _with_company(_equals(trial.workload), source.randint(3, 8))
    workload = _ending_beside_boundaries(source, workload, settings.block_size)
    tokens = sum(
        request.num_prompt_tokens + request.sampling.max_tokens for request in workload.requests
    )
    return Aimed(
        settings=settings,
        workload=workload,
        num_spare_blocks=tokens // settings.block_size // source.choice((1, 2, 4)),
    )


def _want(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    settings = _ahead(source, _small_blocks(source, trial.settings, adapter), adapter)
    requests = trial.workload.requests[: source.choice((1, 1, 2))]
    names = {request.id for request in requests}
    operations = [item for item in trial.workload.operations if item.request in ("", *names)]
    workload = _equals(Workload(requests=requests, operations=operations))
    start = source.randint(0, 4)
    return Aimed(
        settings=settings,
        workload=_ending_beside_boundaries(source, workload, settings.block_size),
        actions=(Squeeze("all", start, start + source.randint(8, 40)),),
    )


def _equals(workload: Workload) -> Workload:
    """Nobody is more urgent than others: priorities do not go with steps ahead."""
    return Workload(
        requests=[msgspec.structs.replace(request, priority=0) for request in workload.requests],
        operations=[item for item in workload.operations if item.kind != "set_priority"],
    )


def _small_blocks(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    sizes = sorted(adapter.block_sizes or (1, 2, 3, 4))[:3]
    return msgspec.structs.replace(settings, block_size=source.choice(sizes))


def _ahead(
    source: random.Random,
    settings: EngineSettings,
    adapter: EngineAdapter,
    *,
    depths: Sequence[int] = (1, 2, 2),
) -> EngineSettings:
    """Steps are decided ahead if the engine can, mostly with drafts, for which there is room."""
    depth = source.choice(depths)
    budget = max(_ROOM_FOR_DRAFTS, settings.max_num_batched_tokens)
    settings = msgspec.structs.replace(settings, max_num_batched_tokens=budget)
    if protocol.ASYNC_SCHEDULING in adapter.capabilities and takes(adapter, settings, None, depth):
        settings = msgspec.structs.replace(
            settings, speculative_config=None, async_scheduling=depth
        )
    if source.random() < 0.2:
        return settings
    return _drafted(source, settings, adapter, counts=(2, 5, 8), rates=(0.7, 0.9, 1.0))


def _ending_beside_boundaries(
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


def _both_ways(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    workload = _with_company(trial.workload, source.randint(4, 6))
    size = trial.settings.block_size
    if protocol.PRIORITY in adapter.capabilities:
        workload = _calm_and_urgent(source, workload, size)
    blocks = sorted(
        (request.num_prompt_tokens + request.sampling.max_tokens // 2) // size + 1
        for request in workload.requests
    )
    settings = msgspec.structs.replace(
        trial.settings,
        max_num_seqs=max(4, trial.settings.max_num_seqs),
        options={
            **trial.settings.options,
            "preemption_mode": "swap",
            "swap_space_blocks": source.randint(blocks[0], blocks[-2] + blocks[-1]),
        },
    )
    return Aimed(
        settings=settings,
        workload=workload,
        actions=tuple(_out_when_others_come(source, workload.requests)),
    )


def _all_out(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    workload = _with_company(_equals(trial.workload), source.randint(3, 6))
    size = trial.settings.block_size
    step = source.randint(2, 2 + _horizon(workload) // 2)
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
        trial.settings,
        max_num_seqs=max(4, trial.settings.max_num_seqs),
        max_num_batched_tokens=max(_ROOM_FOR_DRAFTS, trial.settings.max_num_batched_tokens),
        options={
            **trial.settings.options,
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


def _out_when_others_come(
    source: random.Random, requests: Sequence[RequestSpec]
) -> Iterable[Action]:
    """Who is at least as urgent as a later request is swapped out about when that one comes."""
    for index, request in enumerate(requests):
        before = [other for other in requests[:index] if other.priority <= request.priority]
        if request.arrival_step and before:
            victim = source.choice(before)
            step = max(
                victim.arrival_step + 1, request.arrival_step + source.choice((-1, -1, 0, 0, 1))
            )
            yield Preempt(victim.id, Step(step), "swap")


# Text that others have too ------------------------------------------------------------------------


def _old_content(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Somebody loses its blocks about when the cache is reset; others come with its text."""
    settings = msgspec.structs.replace(trial.settings, enable_prefix_caching=True)
    requests = _with_company(trial.workload, source.randint(2, 4)).requests
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
    return Aimed(
        settings=settings,
        workload=Workload(
            requests=requests, operations=[*kept, Operation(kind="reset_prefix_cache", step=reset)]
        ),
        actions=tuple(Preempt("r0", Step(step), source.choice(modes)) for step in sorted(steps)),
        num_spare_blocks=source.choice((0, 4, 16)),
    )


def _same_text(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Several compute one long prompt, chunk by chunk, and some want what is said of its tokens."""
    settings = msgspec.structs.replace(
        trial.settings,
        enable_prefix_caching=True,
        max_num_batched_tokens=source.choice((3, 7, 16)),
        max_num_seqs=max(4, trial.settings.max_num_seqs),
    )
    requests = _with_company(trial.workload, source.randint(2, 3)).requests
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


def _long_text(source: random.Random, requests: Sequence[RequestSpec], least: int) -> list[int]:
    """A text of at least so many tokens, made of the prompts."""
    text = [token_id for request in requests for token_id in request.prompt_token_ids]
    while len(text) < least:
        text += text
    return text[: least + source.randint(0, 3)]


# Drafts and blocks that move ----------------------------------------------------------------------


def _own_drafts(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
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
    return _moved(source, settings, _equals(Workload(requests=requests)), adapter)


def _under_way(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    settings = _ahead(source, trial.settings, adapter, depths=(1, 1, 1, 2))
    requests = []
    for request in trial.workload.requests[:4]:
        more = source.randint(1, 3) * settings.block_size
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=request.sampling.max_tokens + more
        )
        requests.append(msgspec.structs.replace(request, sampling=sampling))
    return _moved(source, settings, _equals(Workload(requests=requests)), adapter)


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
    last = _horizon(workload)
    actions = [
        Preempt(source.choice(workload.requests).id, Step(source.randint(1, last)), mode)
        for _ in range(source.randint(1, 3))
    ]
    return Aimed(settings=settings, workload=workload, actions=tuple(actions))


def _horizon(workload: Workload) -> int:
    """A step about which the workload's longest output ends, if it has what it needs."""
    return 4 + max(request.sampling.max_tokens for request in workload.requests)


def _with_option(
    settings: EngineSettings, adapter: EngineAdapter, capability: str, name: str, value: Any
) -> EngineSettings:
    if capability not in adapter.capabilities:
        return settings
    return msgspec.structs.replace(settings, options={**settings.options, name: value})


AIMS = {
    "followers": Aim(
        apply=_followers,
        needed=frozenset({protocol.PREFIX_CACHING, protocol.STOP_TOKENS}),
        at_outputs=True,
        weight=3,
    ),
    "limits": Aim(
        apply=_limits,
        needed=frozenset({protocol.STOP_TOKENS, protocol.MIN_TOKENS}),
        at_outputs=True,
    ),
    "ends": Aim(apply=_ends, needed=frozenset({protocol.STEPPED})),
    "want": Aim(apply=_want, needed=frozenset({protocol.STEPPED, protocol.HOLD_BLOCKS})),
    "both ways": Aim(
        apply=_both_ways,
        needed=frozenset({protocol.STEPPED, protocol.SWAP, protocol.PREEMPT}),
        weight=3,
    ),
    "all out": Aim(
        apply=_all_out, needed=frozenset({protocol.STEPPED, protocol.SWAP, protocol.PREEMPT})
    ),
    "own drafts": Aim(
        apply=_own_drafts,
        needed=frozenset({protocol.STEPPED, protocol.SPECULATION, protocol.PREEMPT}),
        weight=1,
    ),
    "under way": Aim(
        apply=_under_way,
        needed=frozenset({protocol.STEPPED, protocol.ASYNC_SCHEDULING, protocol.PREEMPT}),
    ),
    "old content": Aim(
        apply=_old_content,
        needed=frozenset(
            {
                protocol.STEPPED,
                protocol.PREEMPT,
                protocol.PREFIX_CACHING,
                protocol.RESET_PREFIX_CACHE,
            }
        ),
    ),
    "same text": Aim(
        apply=_same_text,
        needed=frozenset(
            {
                protocol.STEPPED,
                protocol.PREEMPT,
                protocol.PREFIX_CACHING,
                protocol.CHUNKED_PREFILL,
                protocol.RECOMPUTE,
            }
        ),
    ),
}
"""By name."""
