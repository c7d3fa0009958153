"""Aims at one moment, up to which it is known what everybody holds. No engine runs."""

from __future__ import annotations

import random
from itertools import cycle, islice

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings
from preempt_harness.explore._aimed import Aimed, equals, small_blocks, with_company, with_option
from preempt_harness.generators import in_order_of_arrival
from preempt_harness.plan import Mode, Preempt, Step
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload


def at_once(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Some lose their blocks in one step, in different modes, when the others need more.

    Who loses them share a text, and have little else; who needs some have several outputs, which
    begin their blocks together. There is about as much room as they have had so far.
    """
    caches = protocol.PREFIX_CACHING in adapter.capabilities
    settings = _unhindered(source, trial.settings, adapter)
    settings = msgspec.structs.replace(settings, enable_prefix_caching=caches)
    size = settings.block_size
    requests = with_company(equals(trial.workload), source.randint(4, 6)).requests
    num_needy = len(requests) - source.choice((2, 2, 3))
    step = source.randint(3, 3 + 3 * size)
    prompt = requests[-1].prompt_token_ids
    text = [*prompt, *prompt][: max(size, len(prompt))]
    may_branch = {protocol.PARALLEL_SAMPLING, protocol.SAMPLING} <= adapter.capabilities
    modes: list[Mode] = [mode for mode in ("swap", "recompute") if mode in adapter.capabilities]
    source.shuffle(modes)
    in_turn = cycle(modes[: source.choice((1, 2, 2, 2))])  # of no mode there is no turn
    changed, actions, in_use = [], [], len(text) // size
    for index, request in enumerate(requests):
        sampling = SamplingSpec(max_tokens=step + source.randint(1, 2 * size))
        prompt = request.prompt_token_ids
        is_needy = index < num_needy
        arrival = source.randint(0, 1)
        if index > num_needy:  # it finds what the victim before it has computed
            arrival = source.randint(1, step - 1)
        grown = step - arrival
        if is_needy:
            if may_branch and source.random() < 0.9:
                count = source.randint(2, 3)
                sampling = msgspec.structs.replace(sampling, temperature=1.0, n=count)
            over = (len(prompt) + grown + source.choice((-1, -1, 0, 0))) % size
            prompt = prompt[: max(1, len(prompt) - over)]
            in_use += len(prompt) // size
        else:
            prompt = [*text, *prompt[: source.randint(1, size)]]
            actions += [Preempt(request.id, Step(step), mode) for mode in islice(in_turn, 1)]
        in_use += sampling.n * (grown // size + 1)
        changed.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=prompt,
                arrival_step=arrival,
                priority=0,
                sampling=sampling,
            )
        )
    longest = max(
        item.num_prompt_tokens // size + item.sampling.n * (item.sampling.max_tokens // size + 1)
        for item in changed
    )
    return Aimed(
        settings=settings,
        workload=Workload(requests=in_order_of_arrival(changed)),
        actions=tuple(source.sample(actions, len(actions))),
        num_spare_blocks=max(0, in_use - longest - source.randint(2, 5)),
        is_quiet=True,
    )


def just_enough(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """Some begin a block in one step, just after others came who hold a block or two each.

    There is about as much room as all have then, so that what a victim gives up is just enough.
    """
    settings = _unhindered(source, trial.settings, adapter)
    mode = trial.settings.options.get("preemption_mode", "recompute")
    settings = with_option(settings, adapter, protocol.SWAP, "preemption_mode", mode)
    size = settings.block_size
    requests = with_company(equals(trial.workload), source.randint(4, 7)).requests
    num_late = source.randint(2, len(requests) - 1)
    step = source.randint(2, 2 + 2 * size)
    changed, in_use = [], 0
    for index, request in enumerate(requests):
        prompt, arrival = request.prompt_token_ids[: source.randint(1, 4 * size)], 0
        if index >= len(requests) - num_late:
            arrival = step - source.choice((1, 1, 1, 2))
            prompt = prompt[: source.choice((1, 1, 1, 2, size))]
        else:
            over = (len(prompt) + step - 1 + source.choice((-1, 0, 0, 0))) % size
            prompt = prompt[: max(1, len(prompt) - over)]
        in_use += (len(prompt) + step - arrival - 2) // size + 1
        length = step - arrival + source.randint(1, 2 * size)
        changed.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=prompt,
                arrival_step=arrival,
                sampling=SamplingSpec(max_tokens=length),
            )
        )
    return _with_what_is_in_use(source, settings, changed, in_use)


def meanwhile(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """An urgent one comes, and who stays begins a block in the step in which a victim is copied.

    Or in that after it, in which the urgent one is let in. There is about as much room as all have
    had so far, and victims give up about what it needs.
    """
    settings = _unhindered(source, trial.settings, adapter)
    size = settings.block_size
    requests = with_company(equals(trial.workload), source.randint(4, 6)).requests
    num_urgent = source.choice((1, 1, 2))
    num_victims = source.choice((1, 1, 2))
    step = source.randint(2, 2 + 2 * size)
    changed, in_use, given_up = [], 0, 0
    for index, request in enumerate(requests):
        prompt = request.prompt_token_ids[: source.randint(1, 4 * size)]
        arrival = priority = 0
        if index >= len(requests) - num_urgent:
            wanted = max(1, given_up + source.randint(-2, 2))
            prompt = list(islice(cycle(prompt), size * wanted - source.choice((0, 0, 1))))
            arrival, length = step + source.choice((0, 0, 0, 1)), source.randint(1, 2 * size)
        elif index >= len(requests) - num_urgent - num_victims:
            priority, length = 1, step + source.randint(2, 2 * size)
            given_up += (len(prompt) + step - 1) // size + 1
        else:
            over = (len(prompt) + step + source.choice((-1, 0, 0, 0))) % size
            prompt = prompt[: max(1, len(prompt) - over)]
            length = step + source.randint(2, 2 * size)
        in_use += (len(prompt) + step - 1) // size + 1 if arrival == 0 else 0
        changed.append(
            msgspec.structs.replace(
                request,
                prompt_token_ids=prompt or request.prompt_token_ids,
                arrival_step=arrival,
                priority=priority,
                sampling=SamplingSpec(max_tokens=length),
            )
        )
    return _with_what_is_in_use(source, settings, changed, in_use)


def cut_off(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """An urgent one comes with a text whose beginning is cached, and whose rest somebody has.

    Who has it was swapped out and came back into other blocks; the ends of its old ones went to
    less urgent ones, who may be victims, and the beginning goes to whoever begins a block next.
    """
    settings = _unhindered(source, trial.settings, adapter)
    settings = msgspec.structs.replace(settings, enable_prefix_caching=True)
    size = settings.block_size
    holder, *others = equals(trial.workload).requests
    others = with_company(Workload(requests=others or [holder]), 2).requests
    step = source.randint(3, 4 + size)
    text = list(islice(cycle(holder.prompt_token_ids), source.randint(4, 7) * size))
    text = text[: len(text) - (len(text) + step + source.choice((-2, -2, -1))) % size]
    newcomer = msgspec.structs.replace(
        holder,
        prompt_token_ids=[*text, *others[0].prompt_token_ids[: source.choice((0, 0, 1))]],
        arrival_step=step,
        sampling=SamplingSpec(max_tokens=source.randint(1, 2 * size)),
    )
    sampling = SamplingSpec(max_tokens=step + source.randint(2, 2 * size))
    holder = msgspec.structs.replace(
        holder, prompt_token_ids=text, arrival_step=0, sampling=sampling
    )
    changed, in_use = [holder], (len(text) + step) // size
    for request in others[: source.choice((1, 1, 2))]:
        prompt = list(islice(cycle(request.prompt_token_ids), source.randint(1, 3 * size)))
        in_use += (len(prompt) + step - 3) // size + 1
        changed.append(
            msgspec.structs.replace(
                request, prompt_token_ids=prompt, arrival_step=2, priority=1, sampling=sampling
            )
        )
    aimed = _with_what_is_in_use(source, settings, [*changed, newcomer], in_use)
    return msgspec.structs.replace(aimed, actions=(Preempt("r0", Step(1), "swap"),))


def _unhindered(
    source: random.Random, settings: EngineSettings, adapter: EngineAdapter
) -> EngineSettings:
    """All who come are let in and get on, in small blocks; victims are swapped if they can be."""
    settings = small_blocks(source, settings, adapter)
    settings = msgspec.structs.replace(
        settings,
        max_num_seqs=max(12, settings.max_num_seqs),
        max_num_batched_tokens=max(128, settings.max_num_batched_tokens),
        options={k: v for k, v in settings.options.items() if k != "swap_space_blocks"},
    )
    return with_option(settings, adapter, protocol.SWAP, "preemption_mode", "swap")


def _with_what_is_in_use(
    source: random.Random, settings: EngineSettings, requests: list[RequestSpec], in_use: int
) -> Aimed:
    """With about so many blocks; those of the longest request are there anyway."""
    size = settings.block_size
    longest = max((item.num_prompt_tokens + item.sampling.max_tokens) // size for item in requests)
    return Aimed(
        settings=settings,
        workload=Workload(requests=in_order_of_arrival(requests)),
        num_spare_blocks=max(0, in_use - longest - source.randint(0, 2)),
        is_quiet=True,
    )
