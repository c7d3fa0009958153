"""Aims at calls of an engine that run the steps. No engine runs."""

from __future__ import annotations

import random

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter
from preempt_harness.explore._aimed import Aimed, equals, horizon, with_company
from preempt_harness.plan import Abort, Action, Mode, Preempt, PreemptAll, Squeeze, Step
from preempt_harness.workload import SamplingSpec, Workload


def calls(source: random.Random, trial: Aimed, adapter: EngineAdapter) -> Aimed:
    """A batch, or streams read in turns, of which some lose their blocks, all at once or not, and
    some are given up while they wait; or a batch longer than the queue, in which victims stand."""
    call = source.choice(("generate", "stream"))
    settings = msgspec.structs.replace(
        trial.settings,
        max_waiting_requests=None,  # a batch would come one by one, in an order of the pool's
        options={**trial.settings.options, "call": call},
    )
    workload = equals(with_company(trial.workload, source.randint(2, 5)))
    may_be_short = protocol.QUEUE_LIMIT in adapter.capabilities
    if call == "generate" and may_be_short and source.random() < 0.6:
        settings = msgspec.structs.replace(
            settings,
            max_num_seqs=source.randint(1, 3),
            max_waiting_requests=source.randint(1, 2),
        )
        requests = [  # in whatever order they come, the same is said
            msgspec.structs.replace(
                request,
                arrival_step=0,
                sampling=SamplingSpec(max_tokens=request.sampling.max_tokens),
            )
            for request in workload.requests
        ]
        workload = Workload(requests=requests)
    modes: list[Mode] = [mode for mode in ("recompute", "swap") if mode in adapter.capabilities]
    actions: list[Action] = []
    for _ in range(source.randint(1, 3)) if modes else ():
        victim, step = source.choice(workload.requests), source.randint(1, horizon(workload))
        mode = source.choice(modes)
        if source.random() < 0.4:
            actions.append(PreemptAll(Step(step), mode))
        else:
            actions.append(Preempt(victim.id, Step(step), mode))
        if source.random() < 0.6:
            actions.append(Squeeze("all", step, step + source.randint(1, 6)))
        if source.random() < 0.7:
            actions.append(Abort(victim.id, Step(step + source.randint(0, 3))))
    return Aimed(settings=settings, workload=workload, actions=tuple(actions))
