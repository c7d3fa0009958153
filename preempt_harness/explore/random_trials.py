"""Whole trials from a seed: settings, workload, budget and plan that suit an engine.

No engine runs here. The generators aim (see `preempt_harness.generators`); this module combines
them with drawn settings and plans. The same seed gives the same trial.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import msgspec

from preempt_harness.adapters import protocol
from preempt_harness.adapters.protocol import EngineAdapter, EngineSettings, KnowsOutputs
from preempt_harness.admission import AdmissionModel
from preempt_harness.budget import KVBudget
from preempt_harness.explore._aimed import Aimed
from preempt_harness.explore.aims import aim
from preempt_harness.explore.random_plans import ACTION_KINDS, random_plan
from preempt_harness.explore.random_settings import (
    predictable,
    random_settings,
    takes,
    with_call,
    with_drafts,
    with_steps_ahead,
)
from preempt_harness.explore.search import SearchOutcome, TrialRunner, search
from preempt_harness.explore.strategy import SearchTask
from preempt_harness.generators import (
    FEATURES,
    LATER_FEATURES,
    in_order_of_arrival,
    likely_steps,
    random_tokens,
    random_workload,
)
from preempt_harness.known_outputs import is_plain, with_continuation
from preempt_harness.plan import PreemptionPlan
from preempt_harness.trial import Trial
from preempt_harness.workload import RequestSpec, SamplingSpec, Workload

_TRIALS_PER_SEED = 1_000_000  # so that two seeds share no trial
_MAX_SLACK = 4  # blocks above the smallest feasible pool
_OUTGROWN = 0.1  # share of trials whose pool is smaller than that
_GIANTS = 0.1  # of trials with a request that can never run
_LATE_GIANTS = 0.4  # of these, how many find nobody who runs or waits
_SHORT_MODELS = 0.15  # of trials in which max_model_len ends a request
_LATER = 0.15  # share of trials with each of the later features
_PREDICTABLE = 0.15  # of trials that the engine's admission model can be played over
_IN_TURN = 0.5  # of these, how many have requests that come one by one
_UNPREDICTABLE = (
    "outputs",
    "beams",
    "prompt_logprobs",
    "priorities",
    "running_resets",
    "operations",
)
_CONTINUED = 0.25  # of trials in which a prompt goes on where another's output is
_AIMED = 0.7  # of the trials that are not predictable: how many aim at several things at once
_QUEUE_LIMITED = 0.1  # of trials in which few requests may wait


def random_trial(
    seed: int | str,
    adapter: EngineAdapter,
    *,
    model: str,
    max_requests: int = 5,
    max_tokens: int = 20,
    settings: EngineSettings | None = None,
    features: Iterable[str] | None = None,
    action_kinds: Sequence[str] = ACTION_KINDS,
    later: bool = True,
) -> Trial:
    """A trial under pressure: a pool near the smallest feasible one, and often a plan as well.

    Args:
        seed: of everything.
        adapter: of the engine; its capabilities bound what is drawn.
        model: name of the model.
        max_requests, max_tokens: size of the workload.
        settings, features: instead of drawn ones.
        action_kinds: of `ACTION_KINDS`, for the plan; with none there is no plan.
        later: draw later features, continuations, queue limits and predictable trials as well,
            and aims where settings are drawn. Each has draws of its own, so that without them a
            seed gives what it gave before there were any.
    """
    source = random.Random(f"{seed}/trial")
    given = settings is not None
    if settings is None:
        settings = random_settings(source, adapter, model)
        settings = with_drafts(random.Random(f"{seed}/drafts"), settings, adapter)
        settings = with_steps_ahead(random.Random(f"{seed}/ahead"), settings, adapter)
    chosen = random_features(source, adapter) if features is None else list(features)
    in_turn = random.Random(f"{seed}/predictable")
    foreseen = later and in_turn.random() < _PREDICTABLE
    if foreseen:
        settings = predictable(settings)
        chosen = [name for name in chosen if name not in _UNPREDICTABLE]
        action_kinds = ()
    workload = random_workload(
        seed,
        vocab_size=adapter.vocab_size(settings),
        block_size=settings.block_size,
        max_requests=max_requests,
        max_tokens=max_tokens,
        features=[*chosen, *(later_features(seed, adapter) if later else ())],
    )
    if foreseen and in_turn.random() < _IN_TURN:
        settings, workload = _in_turn(in_turn, settings, workload, adapter)
    if later:
        workload = _continued(random.Random(f"{seed}/continued"), settings, workload, adapter)
        queue = random.Random(f"{seed}/queue")
        settings, workload = _with_short_queue(queue, settings, workload, adapter)
    drawn = Aimed(settings=settings, workload=workload)
    aims = random.Random(f"{seed}/aim")
    if later and not given and not foreseen and aims.random() < _AIMED:
        drawn = aim(aims, drawn, adapter, planned=bool(action_kinds))
    settings, workload = _limited(source, drawn.settings, drawn.workload, adapter)
    if later and not given:
        settings = with_call(random.Random(f"{seed}/call"), settings, adapter)
    admission = adapter.admission_model(settings)
    num_blocks = _num_blocks(source, workload, admission, adapter) + drawn.num_spare_blocks
    budget = KVBudget.solve(workload, admission, num_blocks)
    if source.random() < _GIANTS:
        workload = _with_giant(source, workload, settings, budget.num_blocks, adapter)
        late = random.Random(f"{seed}/late")
        if later and late.random() < _LATE_GIANTS:
            workload = _last_comes_late(workload)
    plan = random_plan(source, workload, adapter, () if drawn.is_quiet else action_kinds)
    return Trial(
        engine=adapter.name,
        settings=msgspec.structs.replace(settings, num_blocks=budget.num_blocks),
        workload=workload,
        plan=PreemptionPlan([*drawn.actions, *plan.actions]).encode(),
        budget=budget.to_builtins(),
    )


def _limited(
    source: random.Random, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> tuple[EngineSettings, Workload]:
    """What the workload asks for; and sometimes a max_model_len that ends requests early."""
    if protocol.SET_PRIORITY not in adapter.capabilities:
        kept = [item for item in workload.operations if item.kind != "set_priority"]
        workload = msgspec.structs.replace(workload, operations=kept)
    branches = max(request.sampling.num_sequences for request in workload.requests)
    urgent = any(request.priority for request in workload.requests) or any(
        operation.kind == "set_priority" for operation in workload.operations
    )
    settings = msgspec.structs.replace(
        settings,
        max_num_seqs=max(settings.max_num_seqs, branches),
        scheduling_policy="priority" if urgent else settings.scheduling_policy,
    )
    if not takes(adapter, settings, settings.speculative_config, settings.async_scheduling):
        settings = msgspec.structs.replace(settings, async_scheduling=0)
    longest = max(request.num_prompt_tokens for request in workload.requests)
    total = max(
        request.num_prompt_tokens + request.sampling.max_tokens for request in workload.requests
    )
    if protocol.MAX_MODEL_LEN in adapter.capabilities and source.random() < _SHORT_MODELS:
        limit = source.randint(longest + 1, max(total, longest + 1))
        settings = msgspec.structs.replace(settings, max_model_len=limit)
    return settings, workload


def _num_blocks(
    source: random.Random, workload: Workload, admission: AdmissionModel, adapter: EngineAdapter
) -> int:
    """Near the smallest pool in which everybody can finish, or sometimes below it.

    Below it the prompts fit all the same, with a block of its own for each of several outputs, so
    that requests end when they have filled the pool. Beams that end so are others than in a larger
    one.
    """
    least = KVBudget.solve(workload, admission, "minimal").num_blocks
    prompts = max(
        admission.blocks_for(request.num_prompt_tokens)
        + (request.sampling.num_sequences if request.sampling.num_sequences > 1 else 0)
        for request in workload.requests
    )
    smallest = admission.reserved_blocks + prompts
    outgrown = protocol.POOL_LIMIT in adapter.capabilities and source.random() < _OUTGROWN
    beams = any(request.sampling.beam is not None for request in workload.requests)
    if outgrown and smallest < least and not beams:
        return source.randint(smallest, least - 1)
    return least + source.randint(0, _MAX_SLACK)


def _with_giant(
    source: random.Random,
    workload: Workload,
    settings: EngineSettings,
    num_blocks: int,
    adapter: EngineAdapter,
) -> Workload:
    """One more request, the last to arrive, whose prompt is larger than the pool."""
    index = len(workload.requests)
    giant = RequestSpec(
        id=f"r{index}",
        prompt_token_ids=random_tokens(
            adapter.vocab_size(settings),
            f"{source.random()}/giant",
            num_blocks * settings.block_size + source.randint(1, settings.block_size),
        ),
        sampling=SamplingSpec(max_tokens=source.randint(1, 4)),
        arrival_step=max(request.arrival_step for request in workload.requests),
    )
    return msgspec.structs.replace(workload, requests=[*workload.requests, giant])


def _last_comes_late(workload: Workload) -> Workload:
    """When all others are likely to have ended, a few preemptions included."""
    *others, last = workload.requests
    num_steps = 2 * sum(likely_steps(r.num_prompt_tokens, r.sampling.max_tokens) for r in others)
    arrival = last.arrival_step + num_steps
    last = msgspec.structs.replace(last, arrival_step=arrival)
    return msgspec.structs.replace(workload, requests=[*others, last])


def random_features(source: random.Random, adapter: EngineAdapter) -> list[str]:
    """Workload features; each is left out half of the time, and where the engine lacks it."""
    needs = {
        "sampling": {protocol.SAMPLING},
        "operations": {protocol.ABORT, protocol.RESET_PREFIX_CACHE},
        "stops": {protocol.STOP_TOKENS, protocol.MIN_TOKENS},
        "logprobs": {protocol.LOGPROBS},
        "outputs": {protocol.PARALLEL_SAMPLING, protocol.SAMPLING},
        "beams": {protocol.BEAM_SEARCH},
        "penalties": {protocol.PENALTIES, protocol.LOGIT_BIAS},
        "processors": {protocol.LOGITS_PROCESSORS},
        "prompt_logprobs": {protocol.PROMPT_LOGPROBS},
        "priorities": {protocol.PRIORITY},
        "running_resets": {protocol.RESET_RUNNING_REQUESTS},
    }
    return [
        name
        for name in FEATURES
        if source.random() < 0.5 and needs.get(name, set()) <= adapter.capabilities
    ]


def later_features(seed: int | str, adapter: EngineAdapter) -> list[str]:
    """Some of the later features that the engine has, by a draw of its own for each."""
    text = {protocol.TEXT, protocol.LOGIT_BIAS}
    needs = {
        "few_tokens": {protocol.PROMPT_ONLY},
        "bad_words": {*text, protocol.BAD_WORDS},
        "stop_strings": {*text, protocol.STOP_STRINGS, protocol.MIN_TOKENS},
        "grammars": {*text, protocol.STRUCTURED_OUTPUTS},
        "eos": {protocol.EOS},
    }
    return [
        name
        for name in LATER_FEATURES
        if random.Random(f"{seed}/{name}/chosen").random() < _LATER
        and needs.get(name, set()) <= adapter.capabilities
    ]


def _in_turn(
    source: random.Random, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> tuple[EngineSettings, Workload]:
    """Both; requests come one by one, or all but the first at once, while others run or wait.

    Who come at once find the first one's blocks, and share a small token budget if they can.
    """
    horizon = max(request.sampling.max_tokens for request in workload.requests)
    first, *others = workload.requests
    if protocol.PREFIX_CACHING not in adapter.capabilities or source.random() < 0.5:
        requests = [
            msgspec.structs.replace(request, arrival_step=source.randint(0, horizon))
            for request in workload.requests
        ]
        return settings, msgspec.structs.replace(workload, requests=in_order_of_arrival(requests))
    settings = msgspec.structs.replace(settings, enable_prefix_caching=True)
    if protocol.CHUNKED_PREFILL in adapter.capabilities:
        budget = source.randint(2, 2 + 2 * first.num_prompt_tokens)
        settings = msgspec.structs.replace(settings, max_num_batched_tokens=budget)
    arrival = first.arrival_step + source.randint(1, 4 + horizon)
    requests = [
        msgspec.structs.replace(
            other,
            prompt_token_ids=[*first.prompt_token_ids, *other.prompt_token_ids[:2]],
            arrival_step=arrival,
        )
        for other in others
    ]
    workload = msgspec.structs.replace(workload, requests=in_order_of_arrival([first, *requests]))
    return settings, workload


def _continued(
    source: random.Random, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> Workload:
    """The workload, sometimes with a prompt that goes on where another request's output is."""
    if not isinstance(adapter, KnowsOutputs) or source.random() >= _CONTINUED:
        return workload
    greedy = [
        index for index, request in enumerate(workload.requests) if is_plain(request.sampling)
    ]
    if len(workload.requests) < 2 or not greedy:
        return workload
    index = source.choice(greedy)
    first = workload.requests[index]
    output = adapter.greedy_output(settings, first.prompt_token_ids, first.sampling.max_tokens)
    if output is None:
        return workload
    return with_continuation(
        source,
        workload,
        text=[*first.prompt_token_ids, *output],
        of=index,
        block_size=settings.block_size,
    )


def _with_short_queue(
    source: random.Random, settings: EngineSettings, workload: Workload, adapter: EngineAdapter
) -> tuple[EngineSettings, Workload]:
    """Both, sometimes with a short queue; who finds it full is refused.

    Requests come one by one then, so that the queue is filled by those who were preempted.
    """
    if protocol.QUEUE_LIMIT not in adapter.capabilities or source.random() >= _QUEUE_LIMITED:
        return settings, workload
    spread = [
        msgspec.structs.replace(request, arrival_step=request.arrival_step + 3 * index)
        for index, request in enumerate(workload.requests)
    ]
    return (
        msgspec.structs.replace(settings, max_waiting_requests=source.choice((1, 2, 3))),
        msgspec.structs.replace(workload, requests=spread),
    )


class RandomTrials:
    """Strategy "random": independent trials, without end."""

    name = "random"

    def explore(self, runner: TrialRunner, task: SearchTask) -> SearchOutcome:
        """Trials number 0, 1, ... of the seed."""
        first = task.seed * _TRIALS_PER_SEED
        trials = (
            random_trial(number, runner.adapter, model=task.model)
            for number in itertools.count(first)
        )
        return search(trials, runner, max_trials=task.max_trials, max_cpu_s=task.max_cpu_s)
